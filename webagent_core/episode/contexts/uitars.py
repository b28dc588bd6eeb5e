"""UI-TARS: a conversation in which old screenshots age out."""

from __future__ import annotations

from collections.abc import Sequence

from webagent_core.episode.contexts.base import ScreenshotContext, task
from webagent_core.episode.trajectory import Step


class UITarsContext(ScreenshotContext):
    """UI-TARS's rule (Eq. 3): the instruction, all thoughts and actions, and the last N = 5 screenshots, the current
    one among them.

    With less room the oldest screenshots go first, the current one never; then the oldest turns.
    """

    paper_screenshots = 5

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        fewer = min(less, self._pictures(steps) - 1)
        shown = self._pictures(steps) - fewer
        return self.conversation(task(goal), steps[less - fewer :], self.now(page, screenshot), shown)

    def most_less(self, steps: Sequence[Step]) -> int:
        return self._pictures(steps) - 1 + max(0, len(steps) - 1)

    def lost(self, steps: Sequence[Step], less: int) -> str:
        fewer = min(less, self._pictures(steps) - 1)
        lost = [f"the oldest {fewer} of {self._pictures(steps)} screenshots"] * (fewer > 0)
        return " and ".join(lost + [f"the oldest {less - fewer} of {len(steps)} steps"] * (less > fewer))

    def _pictures(self, steps: Sequence[Step]) -> int:
        return min(self.history_screenshots, len(steps) + 1)
