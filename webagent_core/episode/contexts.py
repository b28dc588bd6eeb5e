"""What the policy is shown at each step: a rule of what is kept of the past, as chat messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from webagent_core.episode.actions import GRAMMAR
from webagent_core.episode.trajectory import Step

# For a model that has not been warmed up on this notation. The words are ours: the paper's prompt is for another one.
SYSTEM_PROMPT = f"""\
You carry out a task on a web page, one action at a time. The page is given as text. A line such as
Submit 7 <button>
is an element: its name, its id and its kind, with its value or state behind. Other lines are plain text. Older pages of
the conversation are left out.
Think briefly, then end your answer with one line `Action: ...` that holds exactly one of these actions:
{GRAMMAR}"""


class PlaceholderContext:
    """WebAgent-R1's rule (section 2.3): one growing conversation h_t = (s'_1, a_1, s'_2, a_2, ..., s_t).

    The newest observation stands in full. Each older one has become the literal placeholder, a few tokens; the policy's
    own responses all stay. The goal is part of the first user turn and never cut.

    Args:
        system: system prompt, or None for none.
    """

    placeholder = "Simplified HTML"

    def __init__(self, system: str | None = None) -> None:
        self.system = system

    def messages(self, goal: str, steps: Sequence[Step], observation: str) -> list[dict]:
        """The chat before the next response; `steps` are those done, `observation` is what is on the page now."""
        chat = [{"role": "system", "content": self.system}] if self.system else []
        for index, step in enumerate(steps):
            chat.append({"role": "user", "content": self._turn(goal, index, self.placeholder, steps)})
            chat.append({"role": "assistant", "content": step.response})
        chat.append({"role": "user", "content": self._turn(goal, len(steps), observation, steps)})
        return chat

    @staticmethod
    def _turn(goal: str, index: int, page: str, steps: Sequence[Step]) -> str:
        lines = [f"Task: {goal}"] if index == 0 else []
        if index and steps[index - 1].error:
            lines.append(f"Feedback: {steps[index - 1].error}")
        return "\n".join([*lines, page])


def goal_of(messages: list[dict]) -> str:
    """The goal as a chat states it."""
    for message in messages:
        found = re.match(r"Task: (.*)", message["content"]) if message["role"] == "user" else None
        if found:
            return found.group(1)
    raise ValueError("the chat states no task")
