"""Everything that playing on real pages takes, opened and closed as one: pages served, Chromium, runner, event loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from webagent_core.browser.page import PageLimits
from webagent_core.browser.pool import BrowserPool
from webagent_core.episode.contexts import PlaceholderContext
from webagent_core.episode.rollout import EventLoopThread, GenerateBatch, Progress, play
from webagent_core.episode.runner import Context, EpisodeLimits, EpisodeRunner
from webagent_core.episode.trajectory import Trajectory
from webagent_core.tasks.miniwob import MiniWoB
from webagent_core.tasks.task import Task


class BrowserRollout:
    """`with BrowserRollout(...) as rollout: rollout.play(tasks, generate)`.

    Args:
        pages: episodes at a time.
        viewport: width and height in pixels; None: what the task set asks for.
    """

    def __init__(
        self,
        *,
        pages: int = 8,
        context: Context | None = None,
        limits: EpisodeLimits | None = None,
        page_limits: PageLimits | None = None,
        viewport: tuple[int, int] | None = None,
        screenshots: bool = True,
    ) -> None:
        self.pages = pages
        self.context = context or PlaceholderContext()
        self.limits = limits or EpisodeLimits()
        self.page_limits = page_limits or PageLimits()
        self.viewport = viewport
        self.screenshots = screenshots

    def __enter__(self) -> BrowserRollout:
        with ExitStack() as stack:
            task_set = stack.enter_context(MiniWoB())
            self.loop = EventLoopThread()
            stack.callback(self.loop.close)
            self.pool = BrowserPool(
                pages=self.pages,
                allowed_hosts=task_set.allowed_hosts,
                isolation=task_set.isolation,
                viewport=self.viewport or task_set.viewport,
                limits=self.page_limits,
                init_script=task_set.init_script,
            )
            self.loop.run(self.pool.__aenter__())
            stack.callback(lambda: self.loop.run(self.pool.__aexit__()))
            self.runner = EpisodeRunner(self.pool, task_set, self.context, self.limits, self.screenshots)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def play(
        self, tasks: Sequence[Task], generate: GenerateBatch, progress: Progress | None = None
    ) -> list[Trajectory]:
        """One episode for each task, in order; see `rollout.play`."""
        return play(self.runner, tasks, generate, self.loop, progress)
