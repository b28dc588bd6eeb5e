"""AsyncWebRL: one screenshot, and the policy's own last response."""

from __future__ import annotations

from collections.abc import Sequence

from webagent_core.episode.contexts.base import SCREENSHOT_PROMPT, ScreenshotContext, answer, task
from webagent_core.episode.trajectory import Step


class AsyncWebRLContext(ScreenshotContext):
    """AsyncWebRL's rule (input of a step): only the last screenshot that was taken and the model's own last full
    response, which holds the memory.

    The last screenshot is the one of the page as it is now. With `history_screenshots` above 1 the rounds before come
    first, each a screenshot and a response.

    With less room the oldest rounds go, never the last response.
    """

    asks = (
        "\nBefore the action write a line `Memory: ...` with all that you will need later: of what you did you will see"
        " nothing but your last answer."
    )
    prompt = SCREENSHOT_PROMPT + asks

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        rounds = steps[max(0, len(steps) - self._kept) :][less:]
        now = self.now(page, screenshot)
        if self.history_screenshots > 1 or not rounds:
            return self.conversation(task(goal), rounds, now, self.history_screenshots)
        return self.chat(self.turn(task(goal)), answer(rounds[-1].response), self.turn(now))

    def most_less(self, steps: Sequence[Step]) -> int:
        return max(0, min(len(steps), self._kept) - 1)

    def lost(self, steps: Sequence[Step], less: int) -> str:
        return f"the oldest {less} of {min(len(steps), self._kept)} rounds"

    @property
    def _kept(self) -> int:
        return max(1, self.history_screenshots - 1)
