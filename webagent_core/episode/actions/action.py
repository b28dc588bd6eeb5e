"""What a parser gives back: an action, in its canonical form one line, or why there is none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "empty", "no_action", "unclosed_think", "multiple_actions", "unknown_action", "bad_arguments", "out_of_range",
    "truncated",
]  # fmt: skip

PARAMETERS = {  # of the actions on elements, in the order in which they are written
    "click": ("element",),
    "type": ("element", "text", "enter"),
    "select": ("element", "option"),
    "scroll": ("element", "direction"),
    "goto": ("url",),
    "back": (),
    "wait": ("seconds",),
    "stop": ("answer",),
}
POINT_PARAMETERS = {  # of the actions at points
    "click": ("x", "y"),
    "double_click": ("x", "y"),
    "right_click": ("x", "y"),
    "drag": ("x", "y", "x2", "y2"),
    "type": ("text", "enter"),
    "hotkey": ("keys",),
    "scroll": ("x", "y", "direction"),
}


@dataclass(frozen=True)
class Action:
    """One action. `str()` gives its call form, one line that the parser of its grammar reads back as the same action.

    Fields that an action does not take keep their default. An action names either an element of the observation or a
    point; `type` without an element types into what has the focus.
    """

    name: str  # one of `PARAMETERS` or `POINT_PARAMETERS`
    element: str | None = None  # id of an element as the observation spells it
    text: str | None = None
    enter: bool = False
    option: str | None = None
    direction: str | None = None  # up, down, left or right
    url: str | None = None  # begins with http:// or https://
    seconds: float | None = None  # what the policy asked for: the environment sets the upper limit
    answer: str | None = None  # of stop; "" if the policy gave none
    x: float | None = None  # in the coordinate space of whoever made the action: the policy's, or the page's CSS pixels
    y: float | None = None
    x2: float | None = None  # where a drag that begins at (x, y) ends
    y2: float | None = None
    keys: tuple[str, ...] | None = None  # of hotkey, lower case, held down together: ("ctrl", "c")

    @property
    def at_point(self) -> bool:
        """Whether this action is one of those that only the grammar of coordinates has."""
        return self.x is not None or self.name not in PARAMETERS or self.name == "type" and self.element is None

    def __str__(self) -> str:
        parameters = POINT_PARAMETERS[self.name] if self.at_point else PARAMETERS[self.name]
        given = {parameter: getattr(self, parameter) for parameter in parameters}
        if self.at_point and self.name == "type" and self.text and self.text.endswith("\n") and not self.enter:
            return f"type({_spell('text', self.text)}, enter=false)"  # a last line break alone would press Enter
        if self.at_point and self.name == "scroll":
            return f'scroll({_spell("x", self.x)}, {_spell("y", self.y)}, direction="{self.direction}")'
        spelled = [_spell(parameter, value) for parameter, value in given.items() if value is not None]
        return f"{self.name}({', '.join(filter(None, spelled))})"


@dataclass(frozen=True)
class FormatError:
    """Why an answer holds no action that can be run."""

    kind: Kind
    message: str  # one line, for the policy and for people: what is wrong and what is allowed


class Unreadable(Exception):
    """No action, or none that can be read past `position`."""

    def __init__(self, kind: Kind, message: str, position: int = 0):
        self.kind, self.message, self.position = kind, message, position


def show(text: str) -> str:
    """A piece of the answer for a message: short, on one line, printable."""
    return repr(text) if len(text) <= 40 else repr(text[:40]) + "..."


# --- The canonical form ----------------------------------------------------------------------------------------------

_TO_ESCAPE = re.compile(r'["\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')


def _spell(parameter: str, value: str | bool | float | tuple[str, ...]) -> str:
    """An argument in the canonical form, "" if it need not be written."""
    if parameter == "enter":
        return "enter=true" if value else ""
    if parameter in ("x", "y", "x2", "y2"):
        return f"{parameter}={_number(value)}"
    if parameter == "seconds":
        return _number(value)
    if parameter == "keys":
        value = "+".join(value)
    if parameter == "element" and value.isdecimal():
        return value
    return '"' + _TO_ESCAPE.sub(_escape, value) + '"'


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)


def _escape(match: re.Match) -> str:
    character = match[0]
    if "\ud800" <= character <= "\udfff":  # the long form is never joined with its neighbour to one character
        return f"\\U{ord(character):08x}"
    simple = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return simple.get(character, f"\\u{ord(character):04x}")
