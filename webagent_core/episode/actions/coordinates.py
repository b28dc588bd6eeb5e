"""Actions at points of a screenshot, in the notations of UI-TARS and of Qwen's computer use."""

from __future__ import annotations

import json
import re
from typing import Any

from webagent_core.episode.actions.action import POINT_PARAMETERS, Action, FormatError, Unreadable, show
from webagent_core.episode.actions.calls import Arguments, Bare, read_arguments, read_text_or_word, skip_blank
from webagent_core.episode.actions.elements import NUMBER, ROUND, interpret
from webagent_core.episode.actions.envelopes import make_dialect, parse, thought
from webagent_core.episode.actions.spaces import CoordinateSpace, Point, Size

COORDINATE_GRAMMAR = """\
click(start_box='(x,y)'): click there
double_click(start_box='(x,y)'): click twice
right_click(start_box='(x,y)'): click with the right button
drag(start_box='(x1,y1)', end_box='(x2,y2)'): press at the first point, release at the second
type(content='text'): type into what has the focus; \\n at the end presses Enter
hotkey(key='ctrl c'): press these keys together
scroll(start_box='(x,y)', direction='up|down|left|right'): scroll what is there
goto(url='...'): open an http(s) address
back(): go back to the previous page
wait([seconds]): wait for the page
finished([content='answer']): end the task, with the answer if the task asks for one"""

_TAKES = {
    "click": ("point",),
    "double_click": ("point",),
    "right_click": ("point",),
    "drag": ("point", "end"),
    "type": ("text", "enter"),
    "hotkey": ("keys",),
    "scroll": ("point", "direction"),
    "goto": ("url",),
    "back": (),
    "wait": ("seconds",),
    "stop": ("answer",),
}
_OPTIONAL = {("type", "enter"), ("scroll", "point"), ("wait", "seconds"), ("stop", "answer")}
_OTHER_NAMES = {
    "finished": "stop",
    "answer": "stop",
    "left_click": "click",
    "left_single": "click",
    "left_double": "double_click",
    "right_single": "right_click",
    "go_back": "back",
}
_OTHER_PARAMETERS = {
    **dict.fromkeys(("start_box", "start_point", "box", "coordinate"), "point"),
    **dict.fromkeys(("end_box", "end_point"), "end"),
    **dict.fromkeys(("x1", "x"), "x"),
    **dict.fromkeys(("y1", "y"), "y"),
    **dict.fromkeys(("key", "hotkey"), "keys"),
    "time": "seconds",
}
_TOOL_NAMES = {"key": "hotkey", "terminate": "stop", "answer": "stop"}  # of Qwen's computer use, where they differ


def parse_coordinate_action(
    text: str,
    *,
    space: CoordinateSpace | str = "norm1000",
    image: Size | None = None,
    finish_reason: str | None = None,
    think_prefilled: bool = False,
) -> Action | FormatError:
    """Read the one action of an answer that acts at points (see `COORDINATE_GRAMMAR`).

    A point is `'(x,y)'` or two numbers, with or without box or point tags; four numbers are a box and mean its middle.
    An object in `<tool_call>` is read as Qwen's computer use. The action's numbers are the model's own:
    `CoordinateSpace.on_page` scales them. `finished` comes back as `stop`, the name that ends an episode in every
    grammar. A text that ends in a line break is typed without it and then entered, unless `enter=` says otherwise.

    Args:
        text: the decoded answer; any string is legal.
        space: what the numbers mean, or the name of a `CoordinateSpace` kind; numbers outside it are `out_of_range`.
        image: width and height of the screenshot that the model saw; the spaces that count pixels need it.
        finish_reason: "length" if the token limit cut the answer.
        think_prefilled: the chat template had already written the opening think tag.

    Raises:
        ValueError: an unknown space, or one that counts pixels without an image.
    """
    space = CoordinateSpace(space) if isinstance(space, str) else space
    space.limits(image)

    def build(name: str, arguments: Arguments) -> Action:
        return _build(name, arguments, space, image) if name else _build_tool_call(arguments, space, image)

    return parse(text, _NOTATION._replace(build=build), finish_reason, think_prefilled)


def coordinate_thought_of(text: str) -> str:
    """What an answer says before its action; all of it where it holds none. See `parse_coordinate_action`."""
    return thought(text, _NOTATION)


# --- Points ----------------------------------------------------------------------------------------------------------

# A point without quotes. Bounded, and nothing in it can be read in two ways.
_INSIDE = r"[^()\[\]<>\uff08\uff09\n]{1,100}+"
_UNQUOTED_POINT = re.compile(
    rf"(?:<\|box_start\|>)?(?:\({_INSIDE}\)|\[{_INSIDE}\]|\uff08{_INSIDE}\uff09)(?:<\|box_end\|>)?"
    rf"|<(point|bbox)>{_INSIDE}</\1>",
    re.IGNORECASE,
)
_TAGS = (("<|box_start|>", "<|box_end|>"), ("<point>", "</point>"), ("<bbox>", "</bbox>"))
_BRACKETS = (("(", ")"), ("[", "]"))
_TO_ASCII = {0xFF01 + offset: 0x21 + offset for offset in range(94)} | {0x3000: 0x20}  # full-width forms
_BETWEEN = re.compile(r"\s*+,\s*+|\s++")
_MOST_CHARACTERS = 200  # of a point


def _read_value(text: str, position: int) -> tuple[str, int]:
    point = _UNQUOTED_POINT.match(text, position)
    if point is None:
        return read_text_or_word(text, position)
    return Bare(point[0]), skip_blank(text, point.end())


def _point(value: str, space: CoordinateSpace, image: Size | None) -> Point:
    """The point that a value stands for, in the model's numbers; of a box its middle."""
    inner = value.translate(_TO_ASCII).strip() if len(value) <= _MOST_CHARACTERS else ""
    for pairs in (_TAGS, _BRACKETS):
        for opening, closing in pairs:
            if inner.lower().startswith(opening) and inner.lower().endswith(closing):
                inner = inner[len(opening) : -len(closing)].strip()
                break
    pieces = _BETWEEN.split(inner)
    if len(pieces) not in (2, 4) or not all(NUMBER.fullmatch(piece) for piece in pieces):
        raise Unreadable("bad_arguments", f"a point must be '(x,y)', got {show(value)}")
    numbers = [float(piece) for piece in pieces]
    # The edge of a box may be the edge of the image; a point has to lie inside.
    limits = (space.limits(image) * 2)[: len(numbers)]
    point = tuple((a + b) / 2 for a, b in zip(numbers[:2], numbers[-2:], strict=True))
    inside = all(0 <= number <= limit for number, limit in zip(numbers, limits, strict=True))
    if not inside or not space.holds(point, image):
        allowed = ", ".join(f"0 to {limit:g}" for limit in limits[:2])
        raise Unreadable("out_of_range", f"x and y must lie in {allowed}, got {show(value)}")
    return point


# --- Keys ------------------------------------------------------------------------------------------------------------

_KEYS = {  # names that are read, with the one that comes back
    **{name: name for name in "ctrl shift alt meta enter esc tab space backspace delete insert home end".split()},
    **{name: name for name in "pageup pagedown up down left right capslock".split()},
    **{f"f{number}": f"f{number}" for number in range(1, 13)},
    **{"control": "ctrl", "return": "enter", "escape": "esc", "del": "delete", "option": "alt"},
    **dict.fromkeys(("cmd", "command", "super", "win", "windows"), "meta"),
    **{"page_up": "pageup", "page_down": "pagedown"},
    **{f"arrow{separator}{way}": way for separator in ("", "_") for way in ("up", "down", "left", "right")},
}
_MOST_KEYS = 5


def _keys(value: str) -> tuple[str, ...]:
    """The keys of `ctrl c`, `ctrl+c` or `ctrl + c`. A plus that no key follows is the key itself."""
    pieces = re.findall(r"[^\s+]+|\+", value.lower()) if len(value) <= _MOST_CHARACTERS else []
    names: list[str] = []
    while pieces:
        names.append(pieces.pop(0))
        if len(pieces) > 1 and pieces[0] == "+":
            del pieces[0]
    if not 1 <= len(names) <= _MOST_KEYS:
        raise Unreadable("bad_arguments", f"keys must be 1 to {_MOST_KEYS} names such as 'ctrl c', got {show(value)}")
    for name in names:
        if name not in _KEYS and not (len(name) == 1 and "!" <= name <= "~"):
            raise Unreadable("bad_arguments", f"{show(name)} is no key; allowed: a character, {', '.join(_KEYS)}")
    return tuple(_KEYS.get(name, name) for name in names)


# --- Meaning ---------------------------------------------------------------------------------------------------------


def _build(name: str, arguments: Arguments, space: CoordinateSpace, image: Size | None) -> Action:
    name = _OTHER_NAMES.get(name.lower(), name.lower())
    if name not in _TAKES:
        raise Unreadable("unknown_action", f"unknown action {show(name)}; allowed: {', '.join(_TAKES)}")
    given = _by_parameter(name, arguments)
    for part, x, y in (("point", "x", "y"), ("end", "x2", "y2")):
        if x in given or y in given:
            if x not in given or y not in given or part in given:
                raise Unreadable("bad_arguments", f"{name}: a point is {x} and {y}, or a box, and given once")
            given[part] = f"({given.pop(x)},{given.pop(y)})"
    if unknown := [parameter for parameter in given if parameter not in _TAKES[name]]:
        raise Unreadable("bad_arguments", f"{name} takes {_listed(name)}, got {show(unknown[0])}")
    if missing := [p for p in _TAKES[name] if p not in given and (name, p) not in _OPTIONAL]:
        raise Unreadable("bad_arguments", f"{name}: {missing[0]} is missing; it takes {_listed(name)}")

    fields: dict[str, Any] = {}
    for parameter, value in given.items():
        if parameter == "point":
            fields["x"], fields["y"] = _point(value, space, image)
        elif parameter == "end":
            fields["x2"], fields["y2"] = _point(value, space, image)
        elif parameter == "keys":
            fields["keys"] = _keys(value)
        else:
            fields[parameter] = interpret(parameter, value)
    if name == "type" and "enter" not in fields and fields["text"].endswith("\n"):
        fields |= {"text": fields["text"][:-1], "enter": True}
    if name == "stop":
        fields = {"answer": ""} | fields
    return Action(name, **fields)


def _by_parameter(name: str, arguments: Arguments) -> dict[str, str]:
    """The arguments of a call, keyed; those without a keyword go to the parameter at the same place."""
    places = _TAKES[name]
    plain = [value for keyword, value in arguments if keyword is None]
    if plain and all(isinstance(value, Bare) and NUMBER.fullmatch(value) for value in plain):
        numbers = POINT_PARAMETERS.get(name, ())  # click(300, 45)
        places = tuple(p for p in numbers if p in ("x", "y", "x2", "y2")) or places
    elif name == "scroll" and len(plain) == 1 and "direction" not in [keyword for keyword, _ in arguments]:
        places = ("direction",)  # the only unnamed argument, and no other is the direction
    given: dict[str, str] = {}
    for place, (keyword, value) in enumerate(arguments):
        if keyword is None and place >= len(places):
            raise Unreadable("bad_arguments", f"{name} takes {_listed(name)}, got {len(arguments)} arguments")
        parameter = places[place] if keyword is None else _parameter(name, keyword.lower())
        if parameter in given:
            raise Unreadable("bad_arguments", f"{name}: {show(parameter)} is given twice")
        given[parameter] = value
    return given


def _parameter(name: str, keyword: str) -> str:
    if keyword in ("content", "message"):
        return "answer" if name == "stop" else "text"
    return _OTHER_PARAMETERS.get(keyword, keyword)


def _listed(name: str) -> str:
    return ", ".join(_TAKES[name]) or "no arguments"


# --- Tool calls ------------------------------------------------------------------------------------------------------


class _TwiceTheSameKey(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _TwiceTheSameKey
    return found


# Whole numbers as floats too: Python refuses to read one of many thousand digits.
_JSON = json.JSONDecoder(object_pairs_hook=_object, parse_int=float)


def _read(text: str, position: int) -> tuple[Arguments, int]:
    """What stands behind the bracket that opens a call, or an object of JSON."""
    if text[position - 1] != "{":
        return read_arguments(text, position, _read_value)
    try:
        found, end = _JSON.raw_decode(text, position - 1)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
            raise Unreadable("truncated", "the answer ends inside the object; close it", len(text)) from None
        problem = f"not readable as JSON: {error.msg} at {show(text[error.pos : error.pos + 20])}"
        raise Unreadable("bad_arguments", problem, max(position, error.pos)) from None
    except _TwiceTheSameKey:
        raise Unreadable("bad_arguments", "the object has the same key twice", position) from None
    except RecursionError:
        raise Unreadable("bad_arguments", "the object is nested too deeply", position) from None
    inner = found.get("arguments", found)
    if not isinstance(inner, dict) or not isinstance(inner.get("action"), str):
        raise Unreadable("bad_arguments", 'the object needs the key "action" with the name of one', end)
    return [(str(key), _flat(value)) for key, value in inner.items() if value is not None and key != "thought"], end


def _flat(value: Any) -> str:
    """A value of JSON as a call would write it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if all(isinstance(each, str) for each in value):
            return " ".join(value)
        if all(isinstance(each, float) for each in value):
            return Bare(json.dumps(value))
    if isinstance(value, list | dict):
        return Bare("nested")
    return Bare(str(value).lower() if isinstance(value, bool) else json.dumps(value))


def _build_tool_call(arguments: Arguments, space: CoordinateSpace, image: Size | None) -> Action:
    given = dict(arguments)
    name = given.pop("action").lower()
    if name == "scroll" and "pixels" in given:
        amount = given.pop("pixels")
        if not NUMBER.fullmatch(amount) or float(amount) == 0 or "direction" in given:
            raise Unreadable("bad_arguments", f"pixels must be above 0 (up) or below (down), got {show(amount)}")
        given["direction"] = "up" if float(amount) > 0 else "down"
    if name == "terminate":
        given.pop("status", None)
    if name == "answer" and "text" in given:
        given["answer"] = given.pop("text")
    return _build(_TOOL_NAMES.get(name, name), list(given.items()), space, image)


_TOOL_CALL = r'\{(?=\s*+"(?:name|arguments|action|thought)")'
_NOTATION = make_dialect(
    rf"(?:{ROUND}|{_TOOL_CALL})", [*_TAKES, *_OTHER_NAMES], _read, _build_tool_call, "click(start_box='(120,340)')",
    tags="action|tool_call",
)  # fmt: skip
