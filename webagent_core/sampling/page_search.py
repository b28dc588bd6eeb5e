"""Tree search on real pages: a task's page as the search's environment, and a batched policy behind many searches.

    trees = search_pages(rollout, tasks, answer, settings)

As many trees grow as there are pages. When all of them wait for the policy their questions go out as one batch, as in
`webagent_core.episode.rollout`, so the same seed gives the same trees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from webagent_core.browser.errors import ActionFailed, BrowserError
from webagent_core.browser.page import WebPage
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import FormatError, parse_action
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.contexts import ContextOverflow
from webagent_core.episode.rollout import play
from webagent_core.episode.runner import EpisodeRunner, Response
from webagent_core.episode.trajectory import ExitStatus, FinalPage, Step, Trajectory
from webagent_core.sampling.pairs import Answer
from webagent_core.sampling.search import Proposed, SearchSettings, Seen, State, Tree, search
from webagent_core.tasks.task import Task


@dataclass(frozen=True)
class Question:
    """`count` answers to one chat are wanted; with `scored`, each with its log-probability under the policy."""

    messages: list[dict]
    count: int
    scored: bool = False


@dataclass(frozen=True)
class Sampled:
    """The answers to a question; `logps` has one sum over the tokens of each, where they were asked for."""

    responses: list[Response]
    logps: list[float | None]


# The policy: for each question its answers, in order. A ContextOverflow stands for a chat that does not fit.
AnswerBatch = Callable[[list[Question]], list[Sampled | ContextOverflow]]


# Scores a finished trajectory, in place: its reward, and its exit status where nobody could judge it.
Score = Callable[[Trajectory], Awaitable[None]]


class PageEnvironment:
    """A task on a page of the pool (see `search.Environment`). `start` loads the page anew from the task's seed.

    The page is kept from attempt to attempt, and given back as soon as it fails: the next attempt gets another.

    Args:
        score: asked for the reward of a finished attempt, of which it is given a trajectory; its steps have an action
            and what was seen before it, but no chat. None: what the task's own program says.
    """

    def __init__(self, runner: EpisodeRunner, task: Task, score: Score | None = None) -> None:
        self.runner, self.task, self.group, self.score = runner, task, task.group, score
        self.goal = ""
        self._lease = AsyncExitStack()
        self._page: WebPage | None = None

    async def start(self) -> Seen:
        return await self._or_give_back(self._start())

    async def act(self, action: str) -> Seen:
        return await self._or_give_back(self._act(action))

    async def close(self) -> None:
        self._page = None
        await self._lease.aclose()

    async def _start(self) -> Seen:
        if self._page is None:
            hosts = self.runner.task_set.hosts_of(self.task)
            self._page = await self._lease.enter_async_context(self.runner.pool.page(hosts))
        self.goal = await self.runner.task_set.open(self._page, self.task)
        self._attempt = Trajectory(self.task.name, self.task.seed, self.group, self.goal)
        return await self._seen(stopped=False)

    async def _act(self, text: str) -> Seen:
        action = parse_action(text)
        if isinstance(action, FormatError):
            raise ValueError(f"{self.group}: action = {text!r} is not allowed: {action.message}")
        step = Step(self._now.url, self._now.text, [], text, action, screenshot=self._now.screenshot)
        self._attempt.steps.append(step)
        if action.name == "stop":
            self._attempt.answer = action.answer
        else:
            try:
                step.error = await self._page.act(action)
            except ActionFailed as error:  # the page is as it was, and the policy goes on from there
                step.error = str(error)
        return await self._seen(stopped=action.name == "stop")

    async def _seen(self, stopped: bool) -> Seen:
        await self._page.settle()
        outcome = await self.runner.task_set.outcome(self._page, self._attempt.answer)
        asked = self.score is not None
        self._now = await self._page.observe(skip=self.runner.task_set.unread, screenshot=asked)
        if not (outcome.done or stopped):
            return Seen(self._now.text)
        reward = outcome.reward if outcome.done else 0.0
        return Seen(self._now.text, True, await self._scored(reward) if asked else reward)

    async def _scored(self, reward: float | None) -> float | None:
        """The attempt's reward, None where nobody could judge it; `reward` is what the task's own program says."""
        attempt, now = self._attempt, self._now
        attempt.exit_status, attempt.reward = ExitStatus.ANSWERED, reward
        attempt.final = FinalPage(now.url, now.text, screenshot=now.screenshot)
        await self.score(attempt)
        return attempt.reward if attempt.valid else None

    async def _or_give_back(self, call: Awaitable[Seen]) -> Seen:
        try:
            return await call
        except BrowserError:
            lease, self._lease, self._page = self._lease, AsyncExitStack(), None
            await lease.aclose()
            raise


@dataclass(frozen=True)
class AskedPolicy:
    """The policy of a search, as the runner's context shows it each state; see `search.Policy`.

    Args:
        ask: puts a question and waits for its answers.
        ranking: "likelihood" ranks answers by the log-probability that the policy sampled them with; "asked" asks the
            policy for the best of them, then for the best of the rest, and so on (the paper's AI feedback).
    """

    runner: EpisodeRunner
    ask: Callable[[Question], Awaitable[Sampled]]
    ranking: str = "likelihood"

    async def propose(self, state: State, count: int) -> Proposed:
        try:
            messages = self._messages(state)
            # Only what is proposed at a node can become half of a pair; what plays an attempt out cannot.
            sampled = await self.ask(Question(messages, count, scored=count > 1))
        except ContextOverflow:
            return Proposed([], [])
        answers = []
        for response, logp in zip(sampled.responses, sampled.logps, strict=True):
            action = parse_action(response.text, finish_reason=response.finish_reason)
            line = None if isinstance(action, FormatError) else str(action)
            answers.append(Answer(response.text, line, list(response.response_ids), logp))
        return Proposed(messages, answers, list(sampled.responses[0].prompt_ids))

    async def rank(self, state: State, answers: Sequence[Answer]) -> list[int]:
        likeliest = sorted(range(len(answers)), key=lambda index: -(answers[index].logp or 0.0))
        if self.ranking == "likelihood":
            return likeliest
        order: list[int] = []
        left = list(range(len(answers)))
        while len(left) > 1:
            chosen = await self._best(state, [answers[index] for index in left])
            if chosen is None:
                break
            order.append(left.pop(chosen))
        return order + [index for index in likeliest if index in left]

    async def _best(self, state: State, answers: Sequence[Answer]) -> int | None:
        """Index of the answer that the policy names when asked; None: it names none."""
        options = "\n".join(f"{number}. {answer.action}" for number, answer in enumerate(answers, start=1))
        question = {
            "role": "user",
            "content": f"Possible next actions:\n{options}\nWhich of them brings the task furthest? Answer its number.",
        }
        try:
            sampled = await self.ask(Question([*self._messages(state), question], 1))
        except ContextOverflow:
            return None
        number = next((int(word) for word in _words(sampled.responses[0].text) if word.isdecimal()), 0)
        return number - 1 if 1 <= number <= len(answers) else None

    def _messages(self, state: State) -> list[dict]:
        steps = [
            Step(url="", observation="", messages=[], response=response, action=parse_action(action))
            for response, action in zip(state.responses, state.actions, strict=True)
        ]
        context, budget = self.runner.context, self.runner.budget
        if budget:
            return budget.fit(context, state.goal, steps, state.observation)[0]
        return context.messages(state.goal, steps, state.observation)


def _words(text: str) -> list[str]:
    return text.replace(".", " ").replace(",", " ").split()


@dataclass
class _Searcher:
    """Grows one tree at a time, where `rollout.play` expects a runner that plays one episode."""

    runner: EpisodeRunner
    settings: SearchSettings
    score: Score | None

    @property
    def pool(self) -> BrowserPool:
        return self.runner.pool

    async def run(self, task: Task, ask: Callable[[Any], Awaitable[Any]]) -> Tree | None:
        environment = PageEnvironment(self.runner, task, self.score)
        policy = AskedPolicy(self.runner, ask, self.settings.ranking)
        limits = self.runner.limits
        try:
            for attempt in range(limits.open_attempts):
                try:
                    return await search(environment, policy, self.settings)
                except BrowserError:  # search counts what breaks later on; here the task did not open
                    if attempt + 1 < limits.open_attempts:
                        await asyncio.sleep(0.2 * 2**attempt)
            return None
        finally:
            await environment.close()


def search_pages(
    rollout: BrowserRollout,
    tasks: Sequence[Task],
    answer: AnswerBatch,
    settings: SearchSettings,
    *,
    score: Score | None = None,
    progress: Callable[[Tree | None], None] | None = None,
) -> list[Tree | None]:
    """One search for each task, in order; None for a task whose page did not open.

    Args:
        answer: called in the calling thread, with the questions of all trees that wait.
        score: see `PageEnvironment`.
    """
    return play(_Searcher(rollout.runner, settings, score), tasks, answer, rollout.loop, progress)
