"""ARPO: one growing conversation."""

from __future__ import annotations

from collections.abc import Sequence

from webagent_core.episode.contexts.base import ContextOverflow, ScreenshotContext, task
from webagent_core.episode.trajectory import Step


class ARPOContext(ScreenshotContext):
    """ARPO's rule: every screenshot and every response stay, nothing is ever cut; the whole trajectory is one growing
    sequence (o_i of section 3.1), which `webagent_core.episode.sequence` lays out for training. 15 screenshots fit, so
    an episode has at most 15 steps; one that would need more has overflowed.
    """

    paper_screenshots = 15

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        if len(steps) >= self.history_screenshots:
            raise ContextOverflow(f"step {len(steps) + 1} would show more than {self.history_screenshots} screenshots")
        return self.conversation(task(goal), steps, self.now(page, screenshot), len(steps) + 1)

    def most_less(self, steps: Sequence[Step]) -> int:
        return 0
