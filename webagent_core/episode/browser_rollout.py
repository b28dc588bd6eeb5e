"""Everything that playing on real pages takes, opened and closed as one: pages served, Chromium, runner, event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from webagent_core.browser.page import PageLimits
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.contexts import SYSTEM_PROMPT, PlaceholderContext
from webagent_core.episode.rollout import EventLoopThread, GenerateBatch, Progress, play
from webagent_core.episode.runner import Context, EpisodeLimits, EpisodeRunner
from webagent_core.episode.trajectory import Trajectory
from webagent_core.recipe import Recipe
from webagent_core.tasks.miniwob import MiniWoB
from webagent_core.tasks.task import Task


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The arguments of `open_runner` and `BrowserRollout` that a recipe states."""
    browser, rollout = recipe.browser, recipe.rollout
    return {
        "pages": browser.pages,
        "context": PlaceholderContext(SYSTEM_PROMPT if recipe.policy.system_prompt else None),
        "limits": EpisodeLimits(rollout.max_steps, browser.episode_timeout, rollout.max_format_errors),
        "page_limits": PageLimits(load_seconds=browser.navigation_timeout, action_seconds=browser.action_timeout),
        "viewport": tuple(browser.viewport),
    }


@asynccontextmanager
async def open_runner(
    *,
    pages: int = 8,
    context: Context | None = None,
    limits: EpisodeLimits | None = None,
    page_limits: PageLimits | None = None,
    viewport: tuple[int, int] | None = None,
    screenshots: bool = True,
) -> AsyncIterator[EpisodeRunner]:
    """A runner on the calling event loop; call its `run` as often and as concurrently as you like.

    Args:
        pages: episodes at a time; more of them wait for a page.
        viewport: width and height in pixels; None: what the task set asks for.
    """
    with MiniWoB() as task_set:
        pool = BrowserPool(
            pages=pages,
            allowed_hosts=task_set.allowed_hosts,
            isolation=task_set.isolation,
            viewport=viewport or task_set.viewport,
            limits=page_limits or PageLimits(),
            init_script=task_set.init_script,
        )
        async with pool:
            yield EpisodeRunner(pool, task_set, context or PlaceholderContext(), limits or EpisodeLimits(), screenshots)


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
