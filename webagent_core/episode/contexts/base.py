"""What all contexts share: the protocol, how a chat is put together, and how the words of a page are made harmless."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

from webagent_core.episode.actions import COORDINATE_GRAMMAR, GRAMMAR, coordinate_thought_of, thought_of
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

CUT_HERE = "[page cut here]"  # as the observation itself ends where the page is too large for it
# Stands where a page was. For text, WebAgent-R1's own words: one token of the tiny policy.
LEFT_OUT = {"screenshot": "Screenshot left out", "text": "Simplified HTML"}

Seen = Literal["screenshot", "text"]


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
    """A context whose paper shows screenshots, and no text of the page. Contents are lists of parts: text, image.

    With `observation="text"`, for a policy without eyes, the page's text stands wherever the paper shows a picture, and
    the policy acts on elements. What stays and what goes is the same rule; contents are plain strings.

    Args:
        system: see `ContextManager`.
        history_screenshots: how many pages a chat shows, the newest included; None: the paper's number.
        max_pixels: a larger screenshot is made smaller.
        observation: "screenshot" or "text".
    """

    asks = ""  # what `prompt` says behind the grammar
    prompt = SCREENSHOT_PROMPT
    shows_page = False
    paper_screenshots = 1

    def __init__(
        self,
        system: str | None = None,
        history_screenshots: int | None = None,
        max_pixels: int | None = None,
        observation: Seen = "screenshot",
    ) -> None:
        super().__init__(system)
        self.history_screenshots = self.paper_screenshots if history_screenshots is None else history_screenshots
        if self.history_screenshots < 1:
            raise ValueError(f"history_screenshots = {self.history_screenshots} is not allowed: at least 1, the newest")
        if observation not in get_args(Seen):
            raise ValueError(f"observation = {observation!r} is not allowed: one of {', '.join(get_args(Seen))}")
        self.max_pixels = max_pixels
        self.observation = observation
        self.shows_page = observation == "text"
        if self.shows_page:
            self.prompt = SYSTEM_PROMPT + self.asks

    def now(self, page: str, screenshot: bytes | None) -> str | bytes | None:
        """What the policy sees of the page as it is."""
        return page if self.shows_page else screenshot

    def seen(self, step: Step) -> str | bytes | None:
        """What it saw at a step: a page that was cut to fit stays as it was shown."""
        return self.now(inert(step.observation) if step.shown is None else step.shown, step.screenshot)

    def thought(self, step: Step) -> str:
        """What the step's response says before its action."""
        return _thought(step.response, self.shows_page)

    def turn(self, *parts: str | bytes | None) -> dict:
        """A user turn: what there is to say and to see, in this order."""
        if None in parts:
            raise ValueError(f"screenshot = None is not allowed: {type(self).__name__} shows pictures of the page")
        if self.shows_page:
            return {"role": "user", "content": "\n".join(parts)}
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else picture_part(part, self.max_pixels)
            for part in parts
        ]
        return {"role": "user", "content": content}

    def conversation(self, head: str, steps: Sequence[Step], now: str | bytes | None, pages: int) -> list[dict]:
        """One turn a step, page and response, and the page as it is; `head` is said in the first turn.

        Of all pages the last `pages` are shown; a turn whose page has gone keeps its place, in a few words.
        """
        turns, gone = [], len(steps) + 1 - pages
        for index, step in enumerate(steps):
            shown = [] if index < gone else [self.seen(step)]
            said = [head] * (index == 0) + [LEFT_OUT[self.observation]] * (not shown)
            turns += [self.turn(*filter(None, ["\n".join(said)]), *shown), answer(step.response)]
        return self.chat(*turns, self.turn(*[head] * (not steps), now))


def task(goal: str) -> str:
    return f"Task: {inert(goal)}"


def answer(text: str) -> dict:
    """A response of the policy, as a turn of the chat."""
    return {"role": "assistant", "content": text}


@lru_cache(maxsize=4096)  # each later step asks for those of all before it
def _thought(response: str, on_elements: bool) -> str:
    return thought_of(response) if on_elements else coordinate_thought_of(response)


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
