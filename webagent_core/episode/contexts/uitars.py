"""UI-TARS and what is built on it: a conversation in which old screenshots age out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from webagent_core.episode.contexts.base import (
    ContextOverflow,
    ScreenshotContext,
    action_of,
    inert,
    task,
    thought_at_point,
)
from webagent_core.episode.trajectory import Step


class UITarsContext(ScreenshotContext):
    """UI-TARS's rule (Eq. 3): the instruction, all thoughts and actions, and the last N = 5 screenshots, the current
    one among them.

    With less room the oldest screenshots go first, the current one never; then the oldest turns.
    """

    paper_screenshots = 5

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        fewer = min(less, self._pictures(steps) - 1)
        return self.conversation(task(goal), steps[less - fewer :], screenshot, self._pictures(steps) - fewer)

    def most_less(self, steps: Sequence[Step]) -> int:
        return self._pictures(steps) - 1 + max(0, len(steps) - 1)

    def lost(self, steps: Sequence[Step], less: int) -> str:
        fewer = min(less, self._pictures(steps) - 1)
        lost = [f"the oldest {fewer} of {self._pictures(steps)} screenshots"] * (fewer > 0)
        return " and ".join(lost + [f"the oldest {less - fewer} of {len(steps)} steps"] * (less > fewer))

    def _pictures(self, steps: Sequence[Step]) -> int:
        return min(self.history_screenshots, len(steps) + 1)


class ZeroGUIContext(UITarsContext):
    """ZeroGUI trains UI-TARS models and says nothing of its own on the prompt; the authors' code keeps the last five
    screenshots, which is UI-TARS's rule."""


class ARPOContext(ScreenshotContext):
    """ARPO's rule: every screenshot and every response stay, nothing is ever cut; the whole trajectory is one growing
    sequence (o_i of section 3.1), which `webagent_core.episode.sequence` lays out for training. 15 screenshots fit, so
    an episode has at most 15 steps; one that would need more has overflowed.
    """

    paper_screenshots = 15

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        if len(steps) >= self.history_screenshots:
            raise ContextOverflow(f"step {len(steps) + 1} would show more than {self.history_screenshots} screenshots")
        return self.conversation(task(goal), steps, screenshot, len(steps) + 1)

    def most_less(self, steps: Sequence[Step]) -> int:
        return 0


class UITars2Context(ScreenshotContext):
    """UI-TARS-2's rule (Eqs. 2 and 3): the instruction, working memory W, which is the last N steps in full
    (screenshot, thought, action), the current screenshot, and episodic memory E, a summary of the steps before.

    Ours: N = 5 (undisclosed), and the summary, which by default is the first line of a step's thought and its action.

    With less room steps go from working to episodic memory, the last one never; then the oldest summaries go.

    Args:
        history_screenshots: N + 1, as the current one counts.
        summarise: the text of episodic memory for the steps that have left working memory.
    """

    paper_screenshots = 6

    def __init__(
        self,
        system: str | None = None,
        history_screenshots: int | None = None,
        max_pixels: int | None = None,
        summarise: Callable[[Sequence[Step]], str] | None = None,
    ) -> None:
        super().__init__(system, history_screenshots, max_pixels)
        self.summarise = summarise or one_line_each

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        fewer = min(less, max(0, self._window(steps) - 1))
        kept = self._window(steps) - fewer
        earlier = steps[less - fewer : len(steps) - kept]
        head = f"{task(goal)}\nEarlier:\n{self.summarise(earlier)}" if earlier else task(goal)
        return self.conversation(head, steps[len(steps) - kept :], screenshot, kept + 1)

    def most_less(self, steps: Sequence[Step]) -> int:
        return max(0, self._window(steps) - 1) + max(0, len(steps) - 1)

    def lost(self, steps: Sequence[Step], less: int) -> str:
        fewer = min(less, max(0, self._window(steps) - 1))
        lost = [f"{fewer} of {self._window(steps)} steps of working memory, summed up"] * (fewer > 0)
        return " and ".join(lost + [f"the summary of the oldest {less - fewer} steps"] * (less > fewer))

    def _window(self, steps: Sequence[Step]) -> int:
        return min(self.history_screenshots - 1, len(steps))


def one_line_each(steps: Sequence[Step]) -> str:
    lines = []
    for step in steps:
        thought = thought_at_point(step.response).split("\n")[0][:160]
        lines.append(inert(f"- {thought} -> {action_of(step)[:160]}"))
    return "\n".join(lines)
