"""Agent Q's tree search on real MiniWoB++ pages, with a scripted policy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from webagent_core.browser.errors import PageDied
from webagent_core.browser.page import PageLimits
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.contexts import AgentQContext, ContextOverflow, goal_of
from webagent_core.episode.runner import Response
from webagent_core.episode.trajectory import ExitStatus
from webagent_core.sampling.page_search import AskedPolicy, PageEnvironment, Question, Sampled, search_pages
from webagent_core.sampling.pairs import Answer
from webagent_core.sampling.search import SearchSettings, State, search_pairs
from webagent_core.tasks.demonstrations import demonstrate, elements
from webagent_core.tasks.task import Task

OPTION, TEXT = Task("miniwob/click-option", 1), Task("miniwob/enter-text", 2)
SETTINGS = SearchSettings(proposals=3, mix=1.0, threshold=0.5, iterations=4, depth=5, ranking="likelihood")


@pytest.fixture(scope="module")
def rollout() -> Iterator[BrowserRollout]:
    patient = PageLimits(load_seconds=60, call_seconds=60, action_seconds=20, settle_seconds=20)  # with a busy machine
    with BrowserRollout(pages=2, context=AgentQContext(), screenshots=False, page_limits=patient) as rollout:
        yield rollout


def right(messages: list[dict]) -> str:
    goal, page = goal_of(messages), messages[-1]["content"]
    task = OPTION if goal.startswith("Select") else TEXT
    return demonstrate(task.name, goal, page, 0.0, random.Random(0))


def impatient(messages: list[dict]) -> str:
    last = elements(messages[-1]["content"])[-1]
    return f"{last.name} {last.id}\nAction: click({last.id})"


def answered(questions: list[Question]) -> list[Sampled]:
    """To a node's question: the impatient answer, the right one, and no action at all; else the right one."""
    results = []
    for question in questions:
        texts = [impatient(question.messages), right(question.messages), "I cannot tell"]
        texts = texts if question.count == 3 else [right(question.messages)]
        responses = [Response(text, [1, 2], list(text.encode()), "stop") for text in texts]
        results.append(Sampled(responses, [-0.5, -1.5, -3.0] if question.scored else [None] * len(texts)))
    return results


def test_search_tells_the_right_action_from_the_impatient_one(rollout):
    trees = search_pages(rollout, [OPTION, TEXT], answered, SETTINGS)
    for tree, task in zip(trees, (OPTION, TEXT), strict=True):
        assert tree.group == task.group
        assert tree.counts["env_error"] == tree.counts["not_restored"] == tree.counts["unjudged"] == 0
        assert tree.counts["successes"] >= 2 and tree.counts["format_errors"] >= 1
        pairs = search_pairs(tree, SETTINGS)
        at_the_start = [pair for pair in pairs if len(pair.messages) == 1]
        assert (
            [(p.chosen.text, p.rejected.text) for p in at_the_start]
            == [(right(p.messages), impatient(p.messages)) for p in at_the_start]
            != []
        )
        assert {(pair.chosen.logp, pair.rejected.logp, tuple(pair.prompt_ids)) for pair in pairs} == {
            (-1.5, -0.5, (1, 2))
        }
    again = search_pages(rollout, [OPTION, TEXT], answered, SETTINGS)
    assert [tree.describe(1.0) for tree in again] == [tree.describe(1.0) for tree in trees]


def test_a_state_is_shown_to_the_policy_as_a_rollout_shows_it(rollout):
    (trajectory,) = rollout.play([TEXT], lambda chats: [Response(right(chat)) for chat in chats])
    assert trajectory.success and len(trajectory.steps) == 2
    (tree,) = search_pages(rollout, [TEXT], answered, SETTINGS)
    node = tree.root
    for step in trajectory.steps:
        assert node.messages == step.messages
        assert node.state.observation == step.observation
        node = next(edge.child for edge in node.edges if edge.answer.text == step.response)
    assert node.seen.done and node.seen.reward == 1.0


def test_how_attempts_end(rollout):
    async def walk():
        environment = PageEnvironment(rollout.runner, TEXT)
        try:
            first = await environment.start()
            missed = await environment.act("click(99)")  # there is no such element: nothing happens
            stopped = await environment.act('stop("done")')
            again = await environment.start()
            with pytest.raises(ValueError, match="action = 'press it' is not allowed"):
                await environment.act("press it")
            return first, missed, stopped, again
        finally:
            await environment.close()

    first, missed, stopped, again = rollout.loop.run(walk())
    assert not first.done and missed == first == again
    assert stopped.done and stopped.reward == 0.0


def test_the_recipes_judge_scores_what_was_done(rollout):
    judged = []

    async def score(trajectory) -> None:
        judged.append(trajectory)
        if len(judged) == 2:
            trajectory.exit_status = ExitStatus.JUDGE_ERROR
        trajectory.reward = 1.0

    async def walk():
        environment = PageEnvironment(rollout.runner, TEXT, score)
        try:
            for _ in range(2):
                seen = await environment.start()
                await environment.act(f'type({elements(seen.observation)[0].id}, "Bo")')
                yield await environment.act('stop("typed")')
        finally:
            await environment.close()

    async def all_of(walk):
        return [seen async for seen in walk]

    ends = rollout.loop.run(all_of(walk()))
    assert [end.reward for end in ends] == [1.0, None]  # what nobody could judge is no failure
    assert [str(step.action) for step in judged[0].steps] == ['type(1, "Bo")', 'stop("typed")']
    assert judged[0].goal and judged[0].answer == "typed" and judged[0].final.text == ends[0].observation


def test_a_page_that_dies_is_given_back_and_the_next_attempt_has_another(rollout):
    async def walk():
        environment = PageEnvironment(rollout.runner, TEXT)
        try:
            first = await environment.start()
            await environment._page.page.close()
            with pytest.raises(PageDied):
                await environment.act("click(1)")
            return first, await environment.start()
        finally:
            await environment.close()

    first, second = rollout.loop.run(walk())
    assert first == second


# --- Ranking, without a page -----------------------------------------------------------------------------------------

STATE = State("do it", (), "a 1 <button>\nb 2 <button>\nc 3 <button>")
ANSWERS = [Answer("", f"click({n})", [n], logp) for n, logp in ((1, -2.0), (2, -1.0), (3, -3.0))]


def ranked(ranking: str, *replies: str | Exception) -> tuple[list[int], list[str]]:
    left, asked = list(replies), []

    async def ask(question: Question) -> Sampled:
        asked.append(question.messages[-1]["content"])
        reply = left.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return Sampled([Response(reply)], [None])

    runner = SimpleNamespace(context=AgentQContext(), budget=None)
    return asyncio.run(AskedPolicy(runner, ask, ranking).rank(STATE, ANSWERS)), asked


def test_ranking_by_likelihood_asks_nothing():
    assert ranked("likelihood") == ([1, 0, 2], [])


def test_ranking_by_asking_takes_the_best_then_the_best_of_the_rest():
    order, asked = ranked("asked", "Number 3, I think.", "1")
    assert order == [2, 0, 1]
    assert "3. click(3)" in asked[0] and "2. click(2)" in asked[1] and "3." not in asked[1]


@pytest.mark.parametrize("reply", ["none of them", "4", "0", ContextOverflow("too long")])
def test_a_policy_that_names_none_is_ranked_by_likelihood(reply):
    assert ranked("asked", "3", reply)[0] == [2, 1, 0]


def test_a_chat_that_does_not_fit_ends_the_attempt():
    async def ask(question: Question) -> Sampled:
        raise ContextOverflow("too long")

    policy = AskedPolicy(SimpleNamespace(context=AgentQContext(), budget=None), ask)
    assert asyncio.run(policy.propose(STATE, 3)).answers == []
