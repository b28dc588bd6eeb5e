"""WebRL: the current page and the list of actions."""

from __future__ import annotations

from collections.abc import Sequence

from webagent_core.episode.contexts.base import ContextManager, action_of, inert, task
from webagent_core.episode.trajectory import Step


class WebRLContext(ContextManager):
    """WebRL's rule (input of a step): the instruction, the actions so far as a list, and the simplified HTML of the
    current page; the HTML of earlier pages and the policy's own words are gone.

    With less room the oldest actions go.
    """

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        actions = [f"{number}. {inert(action_of(step))}" for number, step in enumerate(steps, 1)][less:]
        history = ["Actions so far:", *actions] if actions else []
        return self.chat({"role": "user", "content": "\n".join([task(goal), *history, "Page:", page])})
