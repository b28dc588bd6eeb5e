"""One episode, from a fresh page to a trajectory. The same for every trainer: the policy is an awaitable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from webagent_core.browser.errors import ActionFailed, BrowserError
from webagent_core.browser.page import Observation, WebPage
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import Action, CoordinateSpace, FormatError, parse_action, parse_coordinate_action
from webagent_core.episode.contexts import Budget, ContextManager, ContextOverflow, Fit
from webagent_core.episode.pictures import shown_size
from webagent_core.episode.trajectory import ExitStatus, FinalPage, Step, Trajectory
from webagent_core.tasks.task import Outcome, Task, TaskSet


@dataclass
class Response:
    """One answer of the policy. The token ids are those that were sampled, so that training needs no re-tokenising."""

    text: str
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "length": cut off at the token limit


Generate = Callable[[list[dict]], Awaitable[Response]]
Watch = Callable[[Observation], None]


class Context(Protocol):
    """What an episode asks of a context of your own; a `ContextManager` is shown the screenshot too."""

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
    budget: Budget | None = None  # cuts a `ContextManager`'s chats to what fits; None: `Generate` says what does not
    coordinates: CoordinateSpace | None = None  # the policy acts at points, in this space; None: on elements
    max_steps_of: Callable[[str], int] | None = None  # a task's own step limit, by its group; None: `limits.max_steps`
    final_screenshot: bool = True  # of `Trajectory.final` too; a picture takes many times as long as its text

    def __post_init__(self) -> None:
        if self.budget and not isinstance(self.context, ContextManager):
            raise ValueError(f"context = {self.context!r} is not allowed with a budget: a ContextManager")
        if self.coordinates and not self.screenshots:
            raise ValueError("screenshots = False is not allowed with coordinates: points are points of a screenshot")

    async def run(self, task: Task, generate: Generate, watch: Watch | None = None) -> Trajectory:
        """Play `task`. Whatever happens on the way is in the trajectory's exit status; errors of `generate` pass
        through.

        Args:
            watch: gets each page before the policy is asked, for one that acts on more than the chat: a demonstrator.
        """
        for attempt in range(self.limits.open_attempts):
            trajectory = Trajectory(task=task.name, seed=task.seed, group=task.group)
            started = time.monotonic()
            try:
                async with self.pool.page(self.task_set.hosts_of(task)) as page:
                    await self._play(page, task, trajectory, generate, watch)
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

    def prompt(self, trajectory: Trajectory, seen: Observation) -> Fit:
        """What the policy is asked at the page `seen`, after the steps of `trajectory`.

        Raises:
            ContextOverflow: there is no room for another step.
        """
        goal, steps = trajectory.goal, trajectory.steps
        if not isinstance(self.context, ContextManager):
            return Fit(self.context.messages(goal, steps, seen.text))
        if self.budget:
            return self.budget.fit(self.context, goal, steps, seen.text, seen.screenshot)
        return Fit(self.context.messages(goal, steps, seen.text, seen.screenshot))

    async def _play(
        self, page: WebPage, task: Task, trajectory: Trajectory, generate: Generate, watch: Watch | None
    ) -> None:
        trajectory.goal = await self.task_set.open(page, task)
        await page.settle()
        outcome = Outcome(done=False)
        try:
            async with asyncio.timeout(self.limits.seconds) as limit:
                while trajectory.exit_status is None:
                    await self._step(page, trajectory, generate, watch)
                    await page.settle()
                    outcome = await self.task_set.outcome(page, trajectory.answer)
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
        picture = self.screenshots and self.final_screenshot
        try:
            seen = await page.observe(skip=self.task_set.unread, screenshot=picture, html=True)
            trajectory.final = FinalPage(seen.url, seen.text, seen.html, seen.screenshot)
        except BrowserError as error:  # how the episode ended is known, and stands
            trajectory.detail = trajectory.detail or f"the last page cannot be read: {error}"

    async def _step(self, page: WebPage, trajectory: Trajectory, generate: Generate, watch: Watch | None) -> None:
        """One model call and the action that follows. Sets the exit status if the episode ends with it."""
        seen = await page.observe(skip=self.task_set.unread, screenshot=self.screenshots)
        if watch:
            watch(seen)
        messages, cut, shown = self.prompt(trajectory, seen)
        response = await generate(messages)
        action = self._parse(response, seen)
        step = Step(
            url=seen.url,
            observation=seen.text,
            messages=messages,
            response=response.text,
            screenshot=seen.screenshot,
            prompt_ids=response.prompt_ids,
            response_ids=response.response_ids,
            cut=cut,
            shown=shown,
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
                await page.act(self._on_page(action, seen, page))
            except ActionFailed as error:
                step.error = str(error)
        if trajectory.exit_status is None and len(trajectory.steps) >= self._most_steps(trajectory.group):
            trajectory.exit_status = ExitStatus.STEP_LIMIT

    def _most_steps(self, group: str) -> int:
        return self.max_steps_of(group) if self.max_steps_of else self.limits.max_steps

    def _parse(self, response: Response, seen: Observation) -> Action | FormatError:
        if self.coordinates is None:
            return parse_action(response.text, finish_reason=response.finish_reason)
        return parse_coordinate_action(
            response.text, space=self.coordinates, image=self._shown(seen), finish_reason=response.finish_reason
        )

    def _on_page(self, action: Action, seen: Observation, page: WebPage) -> Action:
        """The action as the page does it; the trajectory keeps the policy's own numbers."""
        return self.coordinates.on_page(action, self._shown(seen), page.viewport) if self.coordinates else action

    def _shown(self, seen: Observation) -> tuple[int, int]:
        """Size of the picture that the policy was shown, which may be smaller than the page."""
        max_pixels = self.context.max_pixels if isinstance(self.context, ContextManager) else None
        return shown_size(seen.screenshot, max_pixels)
