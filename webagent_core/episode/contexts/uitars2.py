"""UI-TARS-2: the last steps in full, the others summed up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from webagent_core.episode.contexts.base import ScreenshotContext, Seen, action_of, inert, task
from webagent_core.episode.trajectory import Step


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
        observation: Seen = "screenshot",
        summarise: Callable[[Sequence[Step]], str] | None = None,
    ) -> None:
        super().__init__(system, history_screenshots, max_pixels, observation)
        self.summarise = summarise or self._one_line_each

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        fewer = min(less, max(0, self._window(steps) - 1))
        kept = self._window(steps) - fewer
        earlier = steps[less - fewer : len(steps) - kept]
        head = f"{task(goal)}\nEarlier:\n{self.summarise(earlier)}" if earlier else task(goal)
        return self.conversation(head, steps[len(steps) - kept :], self.now(page, screenshot), kept + 1)

    def most_less(self, steps: Sequence[Step]) -> int:
        return max(0, self._window(steps) - 1) + max(0, len(steps) - 1)

    def lost(self, steps: Sequence[Step], less: int) -> str:
        fewer = min(less, max(0, self._window(steps) - 1))
        lost = [f"{fewer} of {self._window(steps)} steps of working memory, summed up"] * (fewer > 0)
        return " and ".join(lost + [f"the summary of the oldest {less - fewer} steps"] * (less > fewer))

    def _window(self, steps: Sequence[Step]) -> int:
        return min(self.history_screenshots - 1, len(steps))

    def _one_line_each(self, steps: Sequence[Step]) -> str:
        lines = []
        for step in steps:
            thought = self.thought(step).split("\n")[0][:160]
            lines.append(inert(f"- {thought} -> {action_of(step)[:160]}"))
        return "\n".join(lines)
