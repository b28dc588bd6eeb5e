"""One episode, from a fresh page to a trajectory. The same for every trainer: the policy is an awaitable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from webagent_core.browser.errors import ActionFailed, BrowserError
from webagent_core.browser.page import WebPage
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import FormatError, parse_action
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.tasks.task import Outcome, Task, TaskSet


class ContextOverflow(Exception):
    """Raised by `Generate` when the messages do not fit the policy's context. The policy's own doing: reward stands."""


@dataclass
class Response:
    """One answer of the policy. The token ids are those that were sampled, so that training needs no re-tokenising."""

    text: str
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "length": cut off at the token limit


Generate = Callable[[list[dict]], Awaitable[Response]]


class Context(Protocol):
    def messages(self, goal: str, steps: list[Step], observation: str) -> list[dict]: ...


@dataclass(frozen=True)
class EpisodeLimits:
    max_steps: int = 15
    seconds: float = 120.0  # wall clock of a whole episode, waiting for the policy included
    max_format_errors: int = 3  # responses in a row without an action; the last of them ends the episode
    open_attempts: int = 3  # a page that does not open has met no policy yet, so trying again favours nobody


@dataclass
class EpisodeRunner:
    """Plays one episode at a time on a page of the pool; call it concurrently for several."""

    pool: BrowserPool
    task_set: TaskSet
    context: Context
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    screenshots: bool = True

    async def run(self, task: Task, generate: Generate) -> Trajectory:
        """Play `task`. Whatever happens on the way is in the trajectory's exit status; errors of `generate` pass
        through."""
        for attempt in range(self.limits.open_attempts):
            trajectory = Trajectory(task=task.name, seed=task.seed, group=task.group)
            started = time.monotonic()
            try:
                async with self.pool.page() as page:
                    await self._play(page, task, trajectory, generate)
            except BrowserError as error:
                trajectory.exit_status = ExitStatus.ENV_ERROR
                trajectory.reward = None
                trajectory.detail = f"{type(error).__name__}: {error}"
            trajectory.seconds = time.monotonic() - started
            if trajectory.exit_status is not ExitStatus.ENV_ERROR or trajectory.steps:
                break
            if attempt + 1 < self.limits.open_attempts:
                await asyncio.sleep(0.2 * 2**attempt)
        return trajectory

    async def _play(self, page: WebPage, task: Task, trajectory: Trajectory, generate: Generate) -> None:
        trajectory.goal = await self.task_set.open(page, task)
        await page.settle()
        outcome = Outcome(done=False)
        try:
            async with asyncio.timeout(self.limits.seconds) as limit:
                while trajectory.exit_status is None:
                    await self._step(page, trajectory, generate)
                    await page.settle()
                    outcome = await self.task_set.outcome(page)
                    if outcome.done:
                        # The task ended by what the policy did last: nothing it does later may count.
                        trajectory.exit_status = ExitStatus.ANSWERED
        except TimeoutError:
            if not limit.expired():  # the policy's own, of a model server say
                raise
            trajectory.exit_status = ExitStatus.TASK_TIMEOUT
        except ContextOverflow as error:
            trajectory.exit_status = ExitStatus.CONTEXT_OVERFLOW
            trajectory.detail = str(error)
        trajectory.reward = outcome.reward if outcome.done else 0.0
        trajectory.detail = trajectory.detail or outcome.detail

    async def _step(self, page: WebPage, trajectory: Trajectory, generate: Generate) -> None:
        """One model call and the action that follows. Sets the exit status if the episode ends with it."""
        seen = await page.observe(skip=self.task_set.unread, screenshot=self.screenshots)
        messages = self.context.messages(trajectory.goal, trajectory.steps, seen.text)
        response = await generate(messages)
        action = parse_action(response.text, finish_reason=response.finish_reason)
        step = Step(
            url=seen.url,
            observation=seen.text,
            messages=messages,
            response=response.text,
            screenshot=seen.screenshot,
            prompt_ids=response.prompt_ids,
            response_ids=response.response_ids,
        )
        trajectory.steps.append(step)
        if isinstance(action, FormatError):
            step.error = action.message
            recent = trajectory.steps[-self.limits.max_format_errors :]
            if len(recent) == self.limits.max_format_errors and all(each.action is None for each in recent):
                trajectory.exit_status = ExitStatus.FORMAT_ERROR
        elif action.name == "stop":
            step.action = action
            trajectory.answer = action.answer
            trajectory.exit_status = ExitStatus.ANSWERED
        else:
            step.action = action
            try:
                step.error = await page.act(action)
            except ActionFailed as error:
                step.error = str(error)
        if trajectory.exit_status is None and len(trajectory.steps) >= self.limits.max_steps:
            trajectory.exit_status = ExitStatus.STEP_LIMIT
