"""What an episode needs to know of a task set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from webagent_core.browser.page import WebPage
from webagent_core.browser.pool import Isolation


@dataclass(frozen=True)
class Task:
    """One task as one seed makes it. Equal tasks give equal pages, and so one group."""

    name: str  # e.g. "miniwob/click-button"
    seed: int

    @property
    def group(self) -> str:
        return f"{self.name}#{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What the environment says after an action."""

    done: bool
    reward: float | None = None  # 1.0 success, 0.0 failure; None while the task is open
    detail: str = ""


class TaskSet(Protocol):
    """A source of tasks, entered as a context manager: inside, its pages are served.

    `open` and `outcome` raise BrowserError for what no policy can have caused.
    """

    allowed_hosts: Sequence[str]  # of all tasks together
    unread: str | None  # CSS selector of what is not part of the page an agent may read (a score display, say)
    isolation: Isolation  # what an episode needs to begin in a fresh state
    viewport: tuple[int, int]  # where a recipe does not say
    init_script: str | None  # run in every document before its own scripts

    def hosts_of(self, task: Task) -> Sequence[str] | None:
        """All that a page may reach while it plays this task; None: all of `allowed_hosts`."""

    async def open(self, page: WebPage, task: Task) -> str:
        """Bring the page to the task's start and return the goal in words."""

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        """How the task stands now.

        Args:
            answer: what the policy ended the episode with, "" if without words; None: it has not ended it.
        """
