"""Tasks that a model worded, on the pages that they were made from."""

from __future__ import annotations

from collections.abc import Sequence

from webagent_core.browser.errors import BrowserError
from webagent_core.browser.page import WebPage
from webagent_core.episode.runner import EpisodeRunner
from webagent_core.sampling.task_generation import GENERATED, ModelGenerator, NewTask
from webagent_core.tasks.task import Outcome, Task, TaskSet

# MiniWoB++ pages show their own goal; a screenshot must not show another one than the agent has.
_SHOW = """goal => { const shown = document.querySelector("#query"); if (shown) shown.textContent = goal; }"""


class GeneratedGoals:
    """A task set with a generator's tasks in it: such a task opens the page that it starts at, and has its own goal.

    When the page ends an episode it ends; whether the goal is reached is for a judge to say.
    """

    def __init__(self, pages: TaskSet, generator: ModelGenerator) -> None:
        self.pages, self.generator = pages, generator
        self.allowed_hosts, self.unread = pages.allowed_hosts, pages.unread

    def hosts_of(self, task: Task) -> Sequence[str] | None:
        return self.pages.hosts_of(self.generator.starts[task.seed][0] if task.name == GENERATED else task)

    async def open(self, page: WebPage, task: Task) -> str:
        if task.name != GENERATED:
            return await self.pages.open(page, task)
        start, goal = self.generator.starts[task.seed]
        await self.pages.open(page, start)
        await page.evaluate(_SHOW, goal)
        return goal

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        return await self.pages.outcome(page, answer)


async def look_at(runner: EpisodeRunner, tasks: Sequence[Task]) -> list[NewTask]:
    """The tasks with their goals and screenshots of their starts, for a generator; without those that did not open."""
    seen = []
    for task in tasks:
        try:
            async with runner.pool.page(runner.task_set.hosts_of(task)) as page:
                goal = await runner.task_set.open(page, task)
                await page.settle()
                seen.append(NewTask(task, goal, screenshot=await page.screenshot()))
        except BrowserError:
            continue
    return seen
