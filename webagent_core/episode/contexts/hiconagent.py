"""HiconAgent: a step with its history, in full or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from webagent_core.episode.contexts.base import ScreenshotContext, Seen, action_of, inert, task
from webagent_core.episode.trajectory import Step

History = Literal["full", "compressed"]


class HiconAgentContext(ScreenshotContext):
    """HiconAgent's rule (q of Eq. 1): q = (I, H_t, s_t), instruction, history and current screenshot, here in one turn.

    In the full history a step is its screenshot and its action; in the compressed one the screenshots are gone and the
    actions stay. The method (Eqs. 3 to 6) has a branch for each: HCPO's second one is `history="compressed"`.

    With less room the oldest screenshots of the history go, until it is the compressed one; then the oldest actions.

    Args:
        history_screenshots: None: all of the history's.
        history: "full" or "compressed".
    """

    paper_screenshots = 10_000

    def __init__(
        self,
        system: str | None = None,
        history_screenshots: int | None = None,
        max_pixels: int | None = None,
        observation: Seen = "screenshot",
        history: History = "full",
    ) -> None:
        super().__init__(system, history_screenshots, max_pixels, observation)
        if history not in get_args(History):
            raise ValueError(f"history = {history!r} is not allowed: one of {', '.join(get_args(History))}")
        self.history = history

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        fewer = min(less, self._pictures(steps))
        first_shown = len(steps) - self._pictures(steps) + fewer
        first_said = less - fewer
        parts: list[str | bytes | None] = [task(goal)]
        for index, step in enumerate(steps[first_said:], first_said):
            parts += [self.seen(step)] * (index >= first_shown)
            parts.append(f"{index + 1}. {inert(action_of(step))}")
        return self.chat(self.turn(*parts, self.now(page, screenshot)))

    def most_less(self, steps: Sequence[Step]) -> int:
        return self._pictures(steps) + max(0, len(steps) - 1)

    def lost(self, steps: Sequence[Step], less: int) -> str:
        fewer = min(less, self._pictures(steps))
        lost = [f"the oldest {fewer} screenshots of the history"] * (fewer > 0)
        return " and ".join(lost + [f"the oldest {less - fewer} of {len(steps)} actions"] * (less > fewer))

    def _pictures(self, steps: Sequence[Step]) -> int:
        return min(self.history_screenshots - 1, len(steps)) if self.history == "full" else 0
