"""WebGym: one screenshot, and the memory that the policy wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

from webagent_core.episode.contexts.base import SCREENSHOT_PROMPT, ScreenshotContext, inert, task
from webagent_core.episode.trajectory import Step

_MEMORY = re.compile(
    r"^[ \t*]*+memory\**+[ \t]*+[:\uff1a]\**+(.*?)(?=^[ \t*]*+(?:action|thought)\**+[ \t]*+[:\uff1a]|<action>|\Z)",
    re.IGNORECASE | re.MULTILINE | re.DOTALL,
)


def memory_of(response: str) -> str | None:
    """The memory that a response writes: the last line that begins with `Memory:`, up to the action. None: none."""
    written = _MEMORY.findall(response)
    return written[-1].strip() if written else None


class WebGymContext(ScreenshotContext):
    """WebGym's rule (input of a step): the current screenshot, the task and the memory that the model wrote at the step
    before; the response is thought, new memory and action. Screenshots of the past are gone.

    Ours: a response without a memory leaves the one before in place. With `history_screenshots` above 1, as the
    authors' code has it, the last rounds of screenshot and response come first.

    With less room the oldest rounds go, never the memory.
    """

    asks = (
        "\nBefore the action write a line `Memory: ...` with all that you will need later: you will see nothing else of"
        " what you did."
    )
    prompt = SCREENSHOT_PROMPT + asks

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        memory = next(filter(None, (memory_of(step.response) for step in reversed(steps))), "")
        rounds = self._rounds(steps)
        head = task(goal) + (f"\nMemory: {inert(memory)}" if memory else "")
        return self.conversation(head, rounds[less:], self.now(page, screenshot), self.history_screenshots)

    def most_less(self, steps: Sequence[Step]) -> int:
        return len(self._rounds(steps))

    def lost(self, steps: Sequence[Step], less: int) -> str:
        return f"the oldest {less} of {len(self._rounds(steps))} rounds"

    def _rounds(self, steps: Sequence[Step]) -> Sequence[Step]:
        return steps[max(0, len(steps) - self.history_screenshots + 1) :]
