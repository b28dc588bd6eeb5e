"""What all contexts share: the protocol, how a chat is put together, and how the words of a page are made harmless."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from webagent_core.episode.actions import COORDINATE_GRAMMAR, GRAMMAR, coordinate_thought_of
from webagent_core.episode.pictures import picture_part
from webagent_core.episode.trajectory import Step

# For a model that has not been warmed up on this notation. The words are ours: the papers' prompts are for others.
SYSTEM_PROMPT = f"""\
You carry out a task on a web page, one action at a time. The page is given as text. A line such as
Submit 7 <button>
is an element: its name, its id and its kind, with its value or state behind. Other lines are plain text. Older pages of
the conversation are left out.
Think briefly, then end your answer with one line `Action: ...` that holds exactly one of these actions:
{GRAMMAR}"""
SCREENSHOT_PROMPT = f"""\
You carry out a task on a web page, one action at a time. The page is given as a screenshot. A point is given as (x,y),
from its left upper corner.
Think briefly, then end your answer with one line `Action: ...` that holds exactly one of these actions:
{COORDINATE_GRAMMAR}"""


class ContextOverflow(Exception):
    """The messages do not fit the policy's context. The policy's own doing: reward stands."""


class ContextManager:
    """One paper's rule of what the policy is shown at a step, as chat messages.

    `messages` is what a rollout calls. A paper's class says in `render` how the chat looks, and how with `less` of the
    past: 0 is the paper's rule, `most_less` the least there can be, which keeps the task, the newest observation and
    the last step. `Budget` uses that where the chat would not fit.

    Args:
        system: system prompt, or None for none; `prompt` is one for a model that was not warmed up on our notation.
    """

    prompt = SYSTEM_PROMPT
    shows_page = True  # the page's text is part of the chat, and may be cut from its end
    max_pixels: int | None = None  # of a screenshot; None: as it is

    def __init__(self, system: str | None = None) -> None:
        self.system = system

    def messages(
        self, goal: str, steps: Sequence[Step], observation: str, screenshot: bytes | None = None
    ) -> list[dict]:
        """The chat before the next response; `steps` are those done, the rest is what is on the page now.

        Raises:
            ContextOverflow: the paper's rule has no room for another step.
            ValueError: the rule shows screenshots and there is none.
        """
        return self.render(goal, steps, inert(observation), screenshot, 0)

    def render(self, goal: str, steps: Sequence[Step], page: str, screenshot: bytes | None, less: int) -> list[dict]:
        """The chat with `less` of the past; `page` is the observation, made harmless, perhaps cut."""
        raise NotImplementedError

    def most_less(self, steps: Sequence[Step]) -> int:
        return max(0, len(steps) - 1)

    def lost(self, steps: Sequence[Step], less: int) -> str:
        """What a chat with `less` lacks, in words."""
        return f"the oldest {less} of {len(steps)} steps"

    def chat(self, *turns: dict) -> list[dict]:
        return [{"role": "system", "content": self.system}, *turns] if self.system else list(turns)


class ScreenshotContext(ContextManager):
    """A context that shows pictures and no text of the page. Message contents are lists of parts: text, image.

    Args:
        system: see `ContextManager`.
        history_screenshots: how many screenshots a chat shows, the newest included; None: the paper's number.
        max_pixels: a larger screenshot is made smaller.
    """

    prompt = SCREENSHOT_PROMPT
    shows_page = False
    paper_screenshots = 1

    def __init__(
        self, system: str | None = None, history_screenshots: int | None = None, max_pixels: int | None = None
    ) -> None:
        super().__init__(system)
        self.history_screenshots = self.paper_screenshots if history_screenshots is None else history_screenshots
        if self.history_screenshots < 1:
            raise ValueError(f"history_screenshots = {self.history_screenshots} is not allowed: at least 1, the newest")
        self.max_pixels = max_pixels

    def turn(self, text: str, *screenshots: bytes | None) -> dict:
        """A user turn: what there is to say, then what there is to see."""
        if any(screenshot is None for screenshot in screenshots):
            raise ValueError(f"screenshot = None is not allowed: {type(self).__name__} shows pictures of the page")
        parts = [picture_part(screenshot, self.max_pixels) for screenshot in screenshots]
        return {"role": "user", "content": [{"type": "text", "text": text}] * bool(text) + parts}

    def conversation(self, head: str, steps: Sequence[Step], screenshot: bytes | None, pictures: int) -> list[dict]:
        """One turn a step, screenshot and response, and the newest screenshot; `head` is said in the first turn.

        Of all screenshots the last `pictures` are shown; a turn whose picture has gone keeps its place, in a few words.
        """
        turns = []
        for index, seen in enumerate([*(step.screenshot for step in steps), screenshot]):
            shown = [seen] if index >= len(steps) + 1 - pictures else []
            said = [head] * (index == 0) + [LEFT_OUT] * (not shown)
            turns.append(self.turn("\n".join(said), *shown))
            if index < len(steps):
                turns.append(answer(steps[index].response))
        return self.chat(*turns)


LEFT_OUT = "Screenshot left out"


def task(goal: str) -> str:
    return f"Task: {inert(goal)}"


def answer(text: str) -> dict:
    """A response of the policy, as a turn of the chat."""
    return {"role": "assistant", "content": text}


@lru_cache(maxsize=4096)  # each later step asks for those of all before it
def thought_at_point(response: str) -> str:
    """The thought of a response that acts at points."""
    return coordinate_thought_of(response)


def action_of(step: Step) -> str:
    """The action of a step in one line."""
    return "no action" if step.action is None else str(step.action)


# Special tokens of the models that are in use, and what our own notations mark with tags. Kinds of elements, such as
# <button>, are none of these.
_CONTROL = re.compile(
    r"<(?=[|\uff5c]|/?(?:think|action|memory|image|video|s|pad|bos|eos|unk|mask|[a-z]++(?:_[a-z]++)++)>)", re.IGNORECASE
)
_SURROGATE = re.compile("[\ud800-\udfff]")


def inert(text: str) -> str:
    """The words of a page or a task, in which nothing is a chat turn, an image slot, a thought or an action to a model.

    The text stays as it is but for a space behind the "<" of such a mark, and for halves of surrogate pairs, which
    cannot be written to a file.
    """
    return _SURROGATE.sub("\ufffd", _CONTROL.sub("< ", text))


def goal_of(messages: list[dict]) -> str:
    """The goal as a chat states it."""
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        found = re.match(r"Task: (.*)", parts[0]) if message["role"] == "user" and parts else None
        if found:
            return found.group(1)
    raise ValueError("the chat states no task")
