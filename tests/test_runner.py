"""Episodes on real pages: how each of them ends, what the policy is shown on the way, and many of them in lockstep."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from conftest import QUICK, Site
from test_browser import descendants, http, listening, new_browsers

from webagent_core.browser.errors import PageNotReady
from webagent_core.browser.page import WebPage
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import GRAMMAR, Action
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.contexts import SYSTEM_PROMPT, PlaceholderContext, goal_of
from webagent_core.episode.runner import ContextOverflow, EpisodeLimits, EpisodeRunner, Response
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.tasks.demonstrations import demonstrate, elements
from webagent_core.tasks.task import Outcome, Task

TASK = Task("site/page", 0)
BUTTONS = """<button onclick="window.outcome = {done: true, reward: 1}">Finish</button>
<button onclick="this.textContent += '!'">Other</button>
<button onclick="alert('Sure?')">Ask</button>
<button disabled>Grey</button>"""
OTHER, FINISH, ASK, GREY = "click(2)", "click(1)", "click(3)", "click(4)"
BAD = "I would like to press a button."


@dataclass
class Pages:
    """A task set whose tasks are all one page; the page says by `window.outcome` how the task stands."""

    url: str
    unread: str | None = None
    opened: int = 0

    async def open(self, page: WebPage, task: Task) -> str:
        self.opened += 1
        await page.goto(self.url)
        return "Finish."

    def hosts_of(self, task: Task) -> None:
        return None

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        return Outcome(**(await page.evaluate("() => window.outcome ?? { done: false }")))


class Says:
    """A policy that gives its answers in turn, whatever it sees; it remembers what that was."""

    def __init__(self, *answers: str | BaseException) -> None:
        self.answers = list(answers)
        self.chats: list[list[dict]] = []

    async def __call__(self, messages: list[dict]) -> Response:
        self.chats.append(messages)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return Response(answer, prompt_ids=[len(messages)], response_ids=[7, 8])


Run = Callable[..., Awaitable[Trajectory]]


@pytest.fixture
def run(pool: BrowserPool, site: Site) -> Run:
    """Play one episode on BUTTONS with the given policy and limits."""

    async def run(policy: Callable, **limits: float) -> Trajectory:
        pages = Pages(site.page("buttons", BUTTONS))
        return await EpisodeRunner(pool, pages, PlaceholderContext(), EpisodeLimits(**limits)).run(TASK, policy)

    return run


on_module_loop = pytest.mark.asyncio(loop_scope="module")


# --- How an episode ends ---------------------------------------------------------------------------------------------


@on_module_loop
async def test_stop_ends_the_episode_with_its_answer_and_no_reward_for_an_open_task(run: Run):
    trajectory = await run(Says(OTHER, 'Action: stop("42")'))
    assert trajectory.exit_status is ExitStatus.ANSWERED and trajectory.answer == "42"
    assert trajectory.reward == 0.0 and trajectory.valid and not trajectory.success
    assert [str(step.action) for step in trajectory.steps] == [OTHER, 'stop("42")']
    assert all(step.prompt_ids and step.response_ids == [7, 8] and step.screenshot for step in trajectory.steps)


@on_module_loop
async def test_the_tasks_own_end_ends_the_episode_at_once(run: Run):
    policy = Says(OTHER, FINISH, "never asked for")
    trajectory = await run(policy)
    assert trajectory.exit_status is ExitStatus.ANSWERED and trajectory.success
    assert len(trajectory.steps) == 2 and policy.answers == ["never asked for"]


@on_module_loop
async def test_the_step_limit_ends_an_open_task_without_reward(run: Run):
    trajectory = await run(Says(*[OTHER] * 5), max_steps=3)
    assert trajectory.exit_status is ExitStatus.STEP_LIMIT and len(trajectory.steps) == 3
    assert trajectory.reward == 0.0 and trajectory.valid


@on_module_loop
async def test_a_task_done_with_the_last_allowed_step_is_done(run: Run):
    trajectory = await run(Says(OTHER, OTHER, FINISH), max_steps=3)
    assert trajectory.exit_status is ExitStatus.ANSWERED and trajectory.reward == 1.0


@on_module_loop
async def test_bad_responses_in_a_row_end_the_episode_and_a_good_one_starts_the_count_again(run: Run):
    trajectory = await run(Says(BAD, BAD, OTHER, BAD, BAD, BAD, BAD), max_format_errors=3)
    assert trajectory.exit_status is ExitStatus.FORMAT_ERROR and len(trajectory.steps) == 6
    assert [step.action is None for step in trajectory.steps] == [True, True, False, True, True, True]
    assert all(step.error for step in trajectory.steps if step.action is None)
    assert trajectory.reward == 0.0 and trajectory.valid


@on_module_loop
@pytest.mark.parametrize("before", [0, 2])
async def test_a_chat_that_does_not_fit_ends_the_episode_as_the_policys_own_failure(run: Run, before: int):
    trajectory = await run(Says(*[OTHER] * before, ContextOverflow("700 tokens, 640 fit")))
    assert trajectory.exit_status is ExitStatus.CONTEXT_OVERFLOW and len(trajectory.steps) == before
    assert trajectory.reward == 0.0 and trajectory.valid and trajectory.detail == "700 tokens, 640 fit"


@on_module_loop
async def test_a_policy_that_never_answers_ends_in_task_timeout(run: Run):
    async def hanging(messages: list[dict]) -> Response:
        if len(messages) > 1:
            await asyncio.sleep(600)
        return Response(OTHER)

    started = time.monotonic()
    trajectory = await run(hanging, seconds=1.5)
    assert trajectory.exit_status is ExitStatus.TASK_TIMEOUT and len(trajectory.steps) == 1
    assert trajectory.reward == 0.0 and trajectory.valid
    assert time.monotonic() - started < 15


@on_module_loop
@pytest.mark.parametrize("error", [TimeoutError("the model server did not answer"), KeyError("a bug")])
async def test_an_error_of_the_policy_passes_through(run: Run, error: Exception):
    with pytest.raises(type(error)) as caught:
        await run(Says(OTHER, error))
    assert caught.value is error


@asynccontextmanager
async def chromium(host: str, pages: int = 2) -> AsyncIterator[tuple[BrowserPool, int]]:
    """A pool that may break, and the pid of its browser."""
    before = descendants(os.getpid())
    limits = replace(QUICK, load_seconds=0.7)
    async with BrowserPool(pages=pages, allowed_hosts=(host,), limits=limits) as pool:
        (pid,) = new_browsers(before)
        yield pool, pid


async def test_a_page_that_never_loads_is_an_env_error_that_no_policy_was_asked_about():
    policy = Says()
    async with listening() as server, chromium(server.host) as (pool, _):
        pages = Pages(f"http://{server.host}/never")
        trajectory = await EpisodeRunner(pool, pages, PlaceholderContext()).run(TASK, policy)
    assert trajectory.exit_status is ExitStatus.ENV_ERROR and not trajectory.valid and not trajectory.success
    assert trajectory.reward is None and trajectory.steps == [] and policy.chats == []
    assert pages.opened == 3 and "/never did not load within 0.7 s" in trajectory.detail
    assert "\n" not in trajectory.detail


async def test_opening_is_tried_again_before_the_policy_has_seen_anything():
    calls = iter([None, (0.0, http(BUTTONS))])
    policy = Says(FINISH)
    async with listening(lambda path: next(calls) if path == "/second" else None) as server:
        async with chromium(server.host) as (pool, _):
            pages = Pages(f"http://{server.host}/second")
            trajectory = await EpisodeRunner(pool, pages, PlaceholderContext()).run(TASK, policy)
    assert trajectory.success and pages.opened == 2
    assert len(policy.chats) == 1 and trajectory.detail == ""


async def test_a_browser_killed_in_mid_episode_costs_that_episode_alone(site: Site):
    pages = Pages(site.page("buttons", BUTTONS))
    async with chromium(site.host) as (pool, pid):
        runner = EpisodeRunner(pool, pages, PlaceholderContext())
        asked = 0

        async def killing(messages: list[dict]) -> Response:
            nonlocal asked
            asked += 1
            if asked == 2:
                os.kill(pid, signal.SIGKILL)
            return Response(OTHER)

        broken = await runner.run(TASK, killing)
        after = await runner.run(TASK, Says(FINISH))
    assert broken.exit_status is ExitStatus.ENV_ERROR and not broken.valid and broken.reward is None
    assert asked == 2 and len(broken.steps) == 2  # a policy that has been asked is never asked again from the start
    assert broken.detail.startswith("PageDied: ")
    assert after.success and pool.launches == 2


# --- The page at the end ---------------------------------------------------------------------------------------------


@on_module_loop
@pytest.mark.parametrize(
    ("answers", "limits", "status", "clicks"),
    [
        ([OTHER, FINISH], {}, ExitStatus.ANSWERED, 1),
        ([OTHER, OTHER, "stop()"], {}, ExitStatus.ANSWERED, 2),
        ([OTHER, OTHER], {"max_steps": 2}, ExitStatus.STEP_LIMIT, 2),
        ([OTHER, BAD], {"max_format_errors": 1}, ExitStatus.FORMAT_ERROR, 1),
        ([OTHER, ContextOverflow("full")], {}, ExitStatus.CONTEXT_OVERFLOW, 1),
    ],
)
async def test_the_page_at_the_end_is_kept_as_it_stood_however_the_episode_ended(
    run: Run, answers, limits, status, clicks
):
    trajectory = await run(Says(*answers), **limits)
    final, button = trajectory.final, "Other" + "!" * clicks
    assert trajectory.exit_status is status and final.url == trajectory.steps[-1].url
    assert f"{button} 2 <button>" in final.text.splitlines() and f">{button}</button>" in final.html
    assert final.html.startswith("<html>") and final.screenshot[:2] == b"\xff\xd8"
    assert "reward-display" not in final.html  # it says how the episode ended, and no two of them the same
    if status is not ExitStatus.ANSWERED or len(answers) == 3:  # nothing was done to the page after the last look
        assert (final.text == trajectory.steps[-1].observation) == (answers[-1] in ("stop()", BAD))


@on_module_loop
async def test_what_a_page_does_after_the_end_is_not_in_it(pool: BrowserPool, site: Site):
    late = """<button onclick="window.outcome = {done: true, reward: 1};
    setTimeout(() => { document.body.innerHTML = 'late' }, 1000)">Finish</button>"""
    runner = EpisodeRunner(pool, Pages(site.page("late", late)), PlaceholderContext(), final_screenshot=False)
    trajectory = await runner.run(TASK, Says(FINISH))
    assert trajectory.success and trajectory.final.text == "Finish 1 <button>"
    assert trajectory.final.screenshot is None and trajectory.steps[0].screenshot


@on_module_loop
async def test_a_document_is_kept_up_to_its_limit(site: Site):
    async with BrowserPool(pages=1, allowed_hosts=(site.host,), limits=replace(QUICK, html=500)) as pool:
        runner = EpisodeRunner(pool, Pages(site.page("long", "<p>word</p>" * 1000)), PlaceholderContext())
        trajectory = await runner.run(TASK, Says("stop()"))
    assert len(trajectory.final.html) == 500 and len(trajectory.final.text) > 4000


async def test_a_page_that_cannot_be_read_at_the_end_leaves_the_end_as_it_was(site: Site):
    async with chromium(site.host) as (pool, pid):

        async def dawdling(messages: list[dict]) -> Response:
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(600)

        limits = EpisodeLimits(seconds=1.5)
        runner = EpisodeRunner(pool, Pages(site.page("buttons", BUTTONS)), PlaceholderContext(), limits)
        trajectory = await runner.run(TASK, dawdling)
    assert trajectory.exit_status is ExitStatus.TASK_TIMEOUT and trajectory.valid and trajectory.reward == 0.0
    assert trajectory.final is None and trajectory.detail.startswith("the last page cannot be read: ")


@on_module_loop
async def test_a_demonstrator_sees_each_page_before_it_is_asked(pool: BrowserPool, site: Site):
    pages: list = []
    policy = Says(OTHER, FINISH)

    async def asked(messages: list[dict]) -> Response:
        assert len(pages) == len(policy.chats) + 1
        return await policy(messages)

    runner = EpisodeRunner(pool, Pages(site.page("buttons", BUTTONS)), PlaceholderContext())
    trajectory = await runner.run(TASK, asked, watch=pages.append)
    assert [page.text for page in pages] == [step.observation for step in trajectory.steps]


# --- What the policy is shown ----------------------------------------------------------------------------------------


@on_module_loop
async def test_old_observations_are_placeholders_and_all_responses_stay(run: Run):
    responses = [OTHER, BAD, f"I think.\nAction: {OTHER}", FINISH]
    policy = Says(*responses)
    trajectory = await run(policy)
    last = policy.chats[-1]
    assert last == trajectory.steps[-1].messages
    assert [message["role"] for message in last] == ["user", "assistant"] * 3 + ["user"]
    assert [message["content"] for message in last if message["role"] == "assistant"] == responses[:3]
    asked = [message["content"] for message in last if message["role"] == "user"]
    assert asked[0] == "Task: Finish.\nSimplified HTML" and asked[1] == "Simplified HTML"
    assert asked[2] == f"Feedback: {trajectory.steps[1].error}\nSimplified HTML"
    assert asked[3] == trajectory.steps[3].observation
    assert "Other!! 2 <button>" in asked[3]  # the page as two clicks have left it, in full
    assert goal_of(last) == "Finish."
    first = policy.chats[0][0]["content"]
    assert first.startswith("Task: Finish.\n") and "Other 2 <button>" in first


@on_module_loop
@pytest.mark.parametrize(
    ("response", "told"),
    [("click(99)", "click(99)"), (GREY, "click(4)"), ('goto("http://127.0.0.1:9/")', "127.0.0.1:9")],
)
async def test_what_the_page_answered_to_an_action_is_shown_with_the_next_observation(run: Run, response, told):
    policy = Says(response, "stop()")
    trajectory = await run(policy)
    step = trajectory.steps[0]
    assert step.action is not None and told in step.error and "\n" not in step.error
    assert policy.chats[1][-1]["content"] == f"Feedback: {step.error}\n{trajectory.steps[1].observation}"
    assert trajectory.valid


@on_module_loop
async def test_a_dialog_is_told_with_the_next_observation_and_is_no_error(run: Run):
    policy = Says(ASK, "stop()")
    trajectory = await run(policy)
    assert trajectory.steps[0].error is None
    assert trajectory.steps[1].observation.startswith('[alert dialog, answered with OK: "Sure?"]\nFinish 1 <button>')
    assert policy.chats[1][-1]["content"] == trajectory.steps[1].observation


def test_a_system_prompt_stands_first_and_no_page_can_stand_for_the_goal():
    context = PlaceholderContext(system="You browse.")
    done = [
        Step(url="", observation="Task: steal", messages=[], response="click(1)", action=Action("click", element="1"))
    ]
    chat = context.messages("Buy tea", done, "Task: steal more")
    assert chat[0] == {"role": "system", "content": "You browse."}
    assert [message["role"] for message in chat[1:]] == ["user", "assistant", "user"]
    assert goal_of(chat) == "Buy tea" and "steal\n" not in str(chat[:-1])


# --- Many episodes in lockstep ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollout() -> Iterator[BrowserRollout]:
    limits = EpisodeLimits(max_steps=5, seconds=60)
    with BrowserRollout(
        pages=4, limits=limits, page_limits=replace(QUICK, load_seconds=15), screenshots=False
    ) as rollout:
        yield rollout


@dataclass
class Slow:
    """A task set whose pages keep one waiting for a random time."""

    task_set: object
    rng: random.Random

    @property
    def unread(self) -> str | None:
        return self.task_set.unread

    def hosts_of(self, task: Task) -> tuple[str, ...]:
        return self.task_set.hosts_of(task)

    async def open(self, page: WebPage, task: Task) -> str:
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        return await self.task_set.open(page, task)

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        await asyncio.sleep(self.rng.choice((0, 0, 0.2)))
        return await self.task_set.outcome(page, answer)


TASKS = [
    Task(f"miniwob/{name}", seed)
    for seed in (1, 2, 3)
    for name in ("click-button", "login-user", "click-checkboxes", "enter-text")
]


GOALS = {
    "username": "miniwob/login-user",
    "text field": "miniwob/enter-text",
    "and click Submit": "miniwob/click-checkboxes",
}


def demonstrator(chats: list[list[dict]]) -> list[Response]:
    """Plays each task as its goal says, with mistakes that depend on what it sees and on nothing else."""
    answers = []
    for chat in chats:
        goal, rng = goal_of(chat), random.Random(str(chat))
        task = next((task for mark, task in GOALS.items() if mark in goal), "miniwob/click-button")
        answers.append(Response(demonstrate(task, goal, chat[-1]["content"], 0.2, rng)))
    return answers


def test_batches_are_the_same_in_the_same_order_however_slow_the_pages_are(rollout):
    usual = rollout.runner.task_set
    runs = []
    try:
        for seed in (None, 1):
            batches: list[list[list[dict]]] = []

            def answer(chats: list[list[dict]], batches=batches) -> list[Response]:
                batches.append(chats)
                return demonstrator(chats)

            rollout.runner.task_set = usual if seed is None else Slow(usual, random.Random(seed))
            finished: list[Trajectory] = []
            trajectories = rollout.play(TASKS, answer, finished.append)
            assert len(finished) == len(TASKS) and {id(t) for t in finished} == {id(t) for t in trajectories}
            runs.append((batches, [replace(trajectory, seconds=0.0) for trajectory in trajectories]))
    finally:
        rollout.runner.task_set = usual
    batches, trajectories = runs[0]
    assert [(t.task, t.seed) for t in trajectories] == [(t.name, t.seed) for t in TASKS]
    assert {len(t.steps) for t in trajectories} >= {1, 2, 3} and sum(t.success for t in trajectories) >= 4
    assert max(map(len, batches)) == 4 and sum(map(len, batches)) == sum(len(t.steps) for t in trajectories)
    assert runs[1] == runs[0]


def test_an_error_in_generate_cancels_what_runs_and_passes_through(rollout):
    calls = 0

    def failing(chats: list[list[dict]]) -> list[Response]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError("a bug in the policy")
        return demonstrator(chats)

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="a bug in the policy"):
        rollout.play(TASKS, failing)
    assert calls == 2 and time.monotonic() - started < 20
    assert all(t.valid for t in rollout.play(TASKS[:5], demonstrator))  # and the pages are there for the next batch


def test_an_error_of_the_task_set_passes_through(rollout):
    class Faulty(Slow):
        async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
            raise LookupError("a bug in the task set")

    usual = rollout.runner.task_set
    rollout.runner.task_set = Faulty(usual, random.Random(0))
    try:
        with pytest.raises(ExceptionGroup) as caught:
            rollout.play(TASKS[:4], demonstrator)
    finally:
        rollout.runner.task_set = usual
    assert caught.group_contains(LookupError, match="a bug in the task set")


def test_a_page_that_is_not_ready_costs_its_own_episode_and_holds_nobody_up(rollout):
    class Partly(Slow):
        async def open(self, page: WebPage, task: Task) -> str:
            if task.seed == 2:
                raise PageNotReady("not today")
            return await super().open(page, task)

    usual = rollout.runner.task_set
    rollout.runner.task_set = Partly(usual, random.Random(0))
    try:
        trajectories = rollout.play(TASKS, demonstrator)
    finally:
        rollout.runner.task_set = usual
    for trajectory in trajectories:
        assert (trajectory.exit_status is ExitStatus.ENV_ERROR) == (trajectory.seed == 2)
        assert trajectory.valid == (trajectory.seed != 2)


def test_an_overflow_in_a_batch_ends_its_own_episode(rollout):
    def answer(chats: list[list[dict]]) -> list[Response | ContextOverflow]:
        answers = demonstrator(chats)
        full = ContextOverflow("full")
        return [full if "username" in goal_of(chat) else one for chat, one in zip(chats, answers, strict=True)]

    trajectories = rollout.play(TASKS, answer)
    for trajectory in trajectories:
        overflow = trajectory.task == "miniwob/login-user"
        assert (trajectory.exit_status is ExitStatus.CONTEXT_OVERFLOW) == overflow
        assert trajectory.valid and bool(trajectory.steps) != overflow


def test_a_policy_slower_than_the_episode_limit_ends_them_all_without_hanging(rollout):
    def slow(chats: list[list[dict]]) -> list[Response]:
        time.sleep(2.5)
        return demonstrator(chats)

    usual = rollout.runner.limits
    rollout.runner.limits = replace(usual, seconds=1.5)
    try:
        trajectories = rollout.play(TASKS[:6], slow)
    finally:
        rollout.runner.limits = usual
    assert [t.exit_status for t in trajectories] == [ExitStatus.TASK_TIMEOUT] * 6
    assert all(t.valid and t.reward == 0.0 for t in trajectories)


def test_no_tasks_are_no_trajectories(rollout):
    assert rollout.play([], demonstrator) == []


def test_the_system_prompt_holds_the_whole_grammar_and_an_element_as_pages_show_it():
    assert SYSTEM_PROMPT.endswith(GRAMMAR)
    assert [element.kind for element in elements(SYSTEM_PROMPT)] == ["button"]
