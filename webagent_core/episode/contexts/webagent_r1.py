"""WebAgent-R1: placeholders for old pages."""

from __future__ import annotations

from collections.abc import Sequence

from webagent_core.episode.contexts.base import ContextManager, answer, inert, task
from webagent_core.episode.trajectory import Step


class PlaceholderContext(ContextManager):
    """WebAgent-R1's rule (section 2.3): one growing conversation h_t = (s'_1, a_1, s'_2, a_2, ..., s_t).

    The newest observation stands in full. Each older one has become the literal placeholder, a few tokens; the policy's
    own responses all stay. The goal is part of the first user turn and never cut. Ours: what was wrong with a response,
    or what the page answered to an action, stands before the next observation.

    With less room the oldest turns go, page and response together.
    """

    placeholder = "Simplified HTML"

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        turns, feedback = [], None
        steps = steps[less:]
        for index in range(len(steps) + 1):
            lines = [task(goal)] if index == 0 else []
            lines += [f"Feedback: {inert(feedback)}"] if feedback else []
            lines.append(page if index == len(steps) else self.placeholder)
            turns.append({"role": "user", "content": "\n".join(lines)})
            if index < len(steps):
                turns.append(answer(steps[index].response))
                feedback = steps[index].error
        return self.chat(*turns)
