"""Everything that playing on real pages takes, opened and closed as one: pages served, Chromium, runner, event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from webagent_core.browser.page import PageLimits
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.actions import CoordinateSpace
from webagent_core.episode.contexts import (
    Budget,
    ContextManager,
    CountTokens,
    PlaceholderContext,
    ScreenshotContext,
    context_for,
)
from webagent_core.episode.rollout import EventLoopThread, GenerateBatch, Progress, play
from webagent_core.episode.runner import Context, EpisodeLimits, EpisodeRunner
from webagent_core.episode.trajectory import Trajectory
from webagent_core.recipe import Recipe
from webagent_core.tasks.lookup import task_set_of
from webagent_core.tasks.miniwob import MiniWoB
from webagent_core.tasks.openenv import RemotePool, RemoteTasks
from webagent_core.tasks.task import Task, TaskSet


def settings_of(recipe: Recipe, count_tokens: CountTokens) -> dict[str, Any]:
    """The arguments of `open_runner` and `BrowserRollout` that a recipe states.

    Args:
        count_tokens: of a chat as the recipe's policy gets it: `chat_counter(tokenizer)`.
    """
    browser, rollout, context = recipe.browser, recipe.rollout, context_for(recipe)
    return {
        "task_set": task_set_of(recipe.tasks),
        "pages": browser.pages,
        "context": context,
        "budget": Budget(count_tokens, rollout.max_context_tokens, rollout.max_response_tokens),
        "final_screenshot": recipe.reward.manager != "page",  # the page's own word needs no picture
        "coordinates": CoordinateSpace(recipe.policy.coordinates) if sees_pictures(context) else None,
        "limits": EpisodeLimits(rollout.max_steps, browser.episode_timeout, rollout.max_format_errors),
        "page_limits": PageLimits(load_seconds=browser.navigation_timeout, action_seconds=browser.action_timeout),
        "viewport": tuple(browser.viewport),
    }


def sees_pictures(context: ContextManager) -> bool:
    """Whether the policy is shown screenshots, and acts at their points."""
    return isinstance(context, ScreenshotContext) and context.observation == "screenshot"


@asynccontextmanager
async def open_runner(
    *,
    task_set: TaskSet | RemoteTasks | None = None,
    pages: int = 8,
    context: Context | None = None,
    limits: EpisodeLimits | None = None,
    page_limits: PageLimits | None = None,
    viewport: tuple[int, int] | None = None,
    screenshots: bool = True,
    budget: Budget | None = None,
    coordinates: CoordinateSpace | None = None,
    final_screenshot: bool = True,
) -> AsyncIterator[EpisodeRunner]:
    """A runner on the calling event loop; call its `run` as often and as concurrently as you like.

    Args:
        task_set: whose pages are served while the runner is open; None: MiniWoB++.
        pages: episodes at a time; more of them wait for a page.
        viewport: width and height in pixels; None: what the task set asks for.
        screenshots: take them. A context that shows pictures needs them, others leave them to reports and judges.
        budget: cuts the context's chats to what fits.
        coordinates: the policy acts at points, in this space; None: on elements.
        final_screenshot: of the page at the end too, for a reward that looks at it.
    """
    with task_set or MiniWoB() as task_set:
        async with _pool(task_set, pages, page_limits or PageLimits(), viewport) as pool:
            context, limits = context or PlaceholderContext(), limits or EpisodeLimits()
            yield EpisodeRunner(
                pool,
                task_set,
                context,
                limits,
                screenshots,
                budget=budget,
                coordinates=coordinates,
                final_screenshot=final_screenshot,
            )


def _pool(
    task_set: TaskSet | RemoteTasks, pages: int, limits: PageLimits, viewport: tuple[int, int] | None
) -> BrowserPool | RemotePool:
    if isinstance(task_set, RemoteTasks):
        return task_set.pool(pages, limits)
    return BrowserPool(
        pages=pages,
        allowed_hosts=task_set.allowed_hosts,
        isolation=task_set.isolation,
        viewport=viewport or task_set.viewport,
        limits=limits,
        init_script=task_set.init_script,
    )


class BrowserRollout:
    """`with BrowserRollout(...) as rollout: rollout.play(tasks, generate)`; arguments as `open_runner` takes them."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    @property
    def pool(self) -> BrowserPool:
        return self.runner.pool

    def __enter__(self) -> BrowserRollout:
        self.loop = EventLoopThread()
        self._stack = AsyncExitStack()
        try:
            self.runner = self.loop.run(self._stack.enter_async_context(open_runner(**self.settings)))
        except BaseException:
            self.loop.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.loop.run(self._stack.aclose())
        finally:
            self.loop.close()

    def play(
        self, tasks: Sequence[Task], generate: GenerateBatch, progress: Progress | None = None
    ) -> list[Trajectory]:
        """One episode for each task, in order; see `rollout.play`."""
        return play(self.runner, tasks, generate, self.loop, progress)
