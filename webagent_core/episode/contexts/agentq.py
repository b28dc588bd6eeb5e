"""Agent Q: the policy's own actions and the current page."""

from __future__ import annotations

from collections.abc import Sequence

from webagent_core.episode.contexts.base import ContextManager, answer, task
from webagent_core.episode.trajectory import Step


class AgentQContext(ContextManager):
    """Agent Q's rule (h_t of Eq. 5): h_t = (a_1, ..., a_{t-1}, o_t), all earlier actions and only the current page.

    An action of the paper is composite: a thought, the command for the page and its explanation are generated together.
    So the policy's responses stay as the turns they were, with nothing in between.

    With less room the oldest responses go.
    """

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        turns: list[dict] = []
        for step in steps[less:]:
            # A user turn for each: many chat templates take no two assistant turns in a row.
            turns += [{"role": "user", "content": "Next."}, answer(step.response)]
        if turns:
            turns[0] = {"role": "user", "content": task(goal)}
        head = "Page:" if turns else f"{task(goal)}\nPage:"
        return self.chat(*turns, {"role": "user", "content": f"{head}\n{page}"})
