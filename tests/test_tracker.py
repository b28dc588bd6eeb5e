"""The tracker: its tasks done by their demonstrators on real pages, a database an episode, what counts and what not."""

from __future__ import annotations

import asyncio
import random
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from copy import deepcopy

import pytest
import pytest_asyncio

from webagent_core.browser.page import PageLimits
from webagent_core.episode.actions import parse_action
from webagent_core.episode.browser_rollout import open_runner, settings_of
from webagent_core.episode.runner import EpisodeLimits, EpisodeRunner, Response
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.recipe import load_recipe
from webagent_core.tasks.demonstrations import check_demonstrated, demonstrate
from webagent_core.tasks.lookup import check_tasks, task_set_of
from webagent_core.tasks.site import Site, SiteKind
from webagent_core.tasks.task import Task
from webagent_core.tasks.tracker import PEOPLE, TRACKER, differences, read_issues, task_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATIENT = PageLimits(load_seconds=60, call_seconds=60, action_seconds=20, settle_seconds=5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner() -> AsyncIterator[EpisodeRunner]:
    limits = EpisodeLimits(max_steps=15, seconds=600)
    async with open_runner(
        task_set=Site(TRACKER), pages=4, limits=limits, page_limits=PATIENT, screenshots=False
    ) as runner:
        yield runner


Change = Callable[[str], str | None]


async def play(runner: EpisodeRunner, task: Task, change: Change = lambda response: None) -> Trajectory:
    """The demonstrator's episode; `change` may put another response in place of one of its."""
    pages = []

    async def answer(chat: list[dict]) -> Response:
        goal = task_of(task.name.removeprefix("tracker/"), task.seed)[1].goal
        usual = demonstrate(task.name, goal, pages[-1].text, 0.0, random.Random(0))
        return Response(change(usual) or usual)

    return await runner.run(task, answer, watch=pages.append)


# --- Tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_every_task_is_done_by_its_demonstrator_in_5_to_15_steps(runner):
    tasks = [Task(name, seed) for name in TRACKER.all_tasks() for seed in (0, 1)]
    for played in await asyncio.gather(*(play(runner, task) for task in tasks)):
        assert (played.exit_status, played.reward) == (ExitStatus.ANSWERED, 1.0), (played.group, played.detail)
        assert 5 <= len(played.steps) <= 15 and not any(step.error for step in played.steps)
    assert {check_demonstrated(task.name) for task in tasks} == set(TRACKER.all_tasks())


async def test_a_seed_fixes_the_task_and_seeds_differ():
    for name in TRACKER.tasks:
        assert task_of(name, 7) == task_of(name, 7)
        goals = {task_of(name, seed)[1].goal for seed in range(50)}
        assert len(goals) > 40
        for seed in range(50):
            before, asked = task_of(name, seed)
            assert (differences(asked, before) == []) == (name == "read-priority")
            assert differences(asked, asked.issues) == []
            assert len({issue.title for issue in asked.issues}) == len(asked.issues)


async def test_the_page_shows_the_issues_of_the_seed_and_only_after_the_login(runner):
    played = await play(runner, Task("tracker/read-priority", 5))
    issues, asked = task_of("read-priority", 5)
    titles = [issue.title for issue in issues]
    assert not any(title in played.steps[0].observation for title in titles)
    assert all(title in played.steps[3].observation for title in titles)
    assert played.answer == asked.answer and played.reward == 1.0


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tracker/read-priority", lambda response: 'stop("none")' if "stop" in response else None, "the answer is"),
        ("tracker/change-status", lambda response: "stop()" if "Submit" in response else None, "status is"),
        ("tracker/file-issue", lambda response: re.sub(r"type\((\d+), ", r"type(\1, 'A ' ", response), ""),
    ],
)
async def test_what_was_not_done_or_said_is_a_failure(runner, name, change, said):
    played = await play(runner, Task(name, 3), change)
    assert played.reward == 0.0 and said in played.detail


async def test_more_than_what_was_asked_is_a_failure():
    _, asked = task_of("comment", 4)
    wanted = next(issue for issue in asked.issues if issue.comments)
    assert differences(asked, deepcopy(asked.issues)) == []
    for spoil in (
        lambda issues: issues.append(deepcopy(issues[0])),
        lambda issues: issues.pop(),
        lambda issues: issues[asked.issues.index(wanted)].comments.append("And more"),
        lambda issues: setattr(issues[asked.issues.index(wanted) - 1], "status", "resolved"),
        lambda issues: setattr(issues[asked.issues.index(wanted)], "priority", "other"),
    ):
        found = deepcopy(asked.issues)
        spoil(found)
        assert len(differences(asked, found)) == 1
    found = deepcopy(asked.issues)
    found[asked.issues.index(wanted)].status = "chatting"  # which the tracker does by itself
    assert differences(asked, found) == []


# --- A database an episode -------------------------------------------------------------------------------------------


async def test_episodes_at_the_same_time_have_states_of_their_own(runner):
    """Two of one seed and one of another: what one of them files, the others do not have."""
    site, task, other = runner.task_set, Task("tracker/file-issue", 3), Task("tracker/file-issue", 4)
    filed, waiting = asyncio.Event(), asyncio.Event()
    kept: dict[str, list] = {}

    async def idle(name: str, which: Task) -> None:
        async with runner.pool.page() as page:
            await site.open(page, which)
            waiting.set()
            await filed.wait()
            kept[name] = read_issues(site.folder_of(page) / "db" / "db")
            assert (await site.outcome(page, "")).reward == 0.0

    async def files() -> None:
        await waiting.wait()
        try:
            assert (await play(runner, task)).reward == 1.0
        finally:
            filed.set()

    await asyncio.gather(idle("same", task), idle("other", other), files())
    before = {name: task_of("file-issue", which.seed)[0] for name, which in (("same", task), ("other", other))}
    assert kept == before and kept["same"] != kept["other"]


async def test_a_page_that_plays_again_begins_anew(runner):
    site, task = runner.task_set, Task("tracker/comment", 6)
    async with runner.pool.page() as page:
        seen = []
        for _ in range(2):
            goal = await site.open(page, task)
            for _ in range(4):
                await page.settle()
                seen.append((await page.observe()).text)
                response = demonstrate(task.name, goal, seen[-1], 0.0, random.Random(0))
                await page.act(parse_action(response))
            folder = site.folder_of(page)
        assert seen[:4] == seen[4:] and "Logout" in seen[3] and "Logout" not in seen[4]
        left = {path.name for path in folder.parent.iterdir()}
    assert left == {"empty", folder.name}  # the first one's is gone
    await _until(lambda: not folder.exists())


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come about")


async def test_without_an_episodes_header_there_is_nothing(runner):
    def status(episode: str) -> int:
        request = urllib.request.Request(f"http://{runner.task_set.host}/", headers={"X-Episode": episode})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    codes = [await asyncio.to_thread(status, episode) for episode in ("", "e999", "../empty", "empty")]
    assert codes == [404, 404, 404, 404]


async def test_a_server_that_dies_is_no_failure_of_the_policy():
    site = Site(TRACKER)
    async with open_runner(
        task_set=site, pages=1, limits=EpisodeLimits(seconds=120), page_limits=PATIENT, screenshots=False
    ) as own:
        assert (await play(own, Task("tracker/read-priority", 1))).reward == 1.0
        site._process.kill()
        died = await play(own, Task("tracker/read-priority", 1))
    assert died.exit_status is ExitStatus.ENV_ERROR and died.reward is None and "tracker" in died.detail


# --- Settings --------------------------------------------------------------------------------------------------------


async def test_the_names_of_a_recipe_choose_the_tracker():
    recipe = load_recipe("webagent_r1", overrides={"tasks.names": ["tracker/comment", "tracker/file-issue"]})
    check_tasks(recipe)
    chosen = task_set_of(recipe.tasks)
    assert isinstance(chosen, Site) and chosen.kind is TRACKER
    assert settings_of(recipe, len)["task_set"].kind is TRACKER
    for names, said in (
        (["tracker/comment", "miniwob/click-test"], "tasks of one set at a time"),
        (["tracker/coment"], "task 'tracker/coment' is unknown; there are tracker/file-issue"),
        (["elsewhere"], "task 'elsewhere' is unknown: names begin with miniwob/, shop/, tracker/, or are webarena, or"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            check_tasks(load_recipe("webagent_r1", overrides={"tasks.names": names}))


async def test_a_missing_package_is_told_with_the_remedy():
    kind = SiteKind("forum/", "webagent_core.tasks.forum", "a_forum_that_is_not_installed", ("post",))
    with pytest.raises(ModuleNotFoundError, match=r"need the package a_forum.*: pip install 'webagent-rl\[sites\]'"):
        kind.check(["forum/post"])


async def test_people_are_asked_for_with_their_passwords():
    asked = Counter(
        re.match(r'Log in as "(\w+)" with the password "([\w-]+)"', task_of("comment", seed)[1].goal).groups()
        for seed in range(40)
    )
    assert set(asked) == set(PEOPLE.items())
