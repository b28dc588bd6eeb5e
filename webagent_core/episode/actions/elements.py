"""Actions on elements: four notations that name an element of the observation by its id."""

from __future__ import annotations

import math
import re

from webagent_core.episode.actions.action import PARAMETERS, Action, FormatError, Unreadable, show
from webagent_core.episode.actions.calls import Arguments, Bare, read_arguments, read_brackets
from webagent_core.episode.actions.envelopes import Dialect, make_dialect, parse, thought

GRAMMAR = """\
click(id): click the element
type(id, "text"[, enter=true]): put the text into the field, "" clears it; enter=true presses Enter afterwards
select(id, "option"): choose the option with this label
scroll(["id",] "up|down|left|right"): scroll the page, or one element of it
goto("url"): open an http(s) address
back(): go back to the previous page
wait([seconds]): wait for the page
stop(["answer"]): end the task, with the answer if the task asks for one"""


def parse_action(
    text: str, *, dialect: str = "call", finish_reason: str | None = None, think_prefilled: bool = False
) -> Action | FormatError:
    """Read the one action of an answer.

    Args:
        text: the decoded answer; any string is legal.
        dialect: the notation that the prompt asked for: `call` (see `GRAMMAR`), `json` (an object whose key "action"
            holds the name and whose other keys are the arguments; a key "thought" is left unread), `bracket` (WebArena:
            Enter follows a typed text unless a third bracket says 0) or `do` (WebRL).
        finish_reason: "length" if the token limit cut the answer.
        think_prefilled: the chat template had already written the opening think tag.

    Raises:
        ValueError: `dialect` is none of the four.
    """
    return parse(text, _dialect(dialect), finish_reason, think_prefilled)


def thought_of(text: str, *, dialect: str = "call") -> str:
    """What an answer says before its action; all of it where it holds none. See `parse_action`."""
    return thought(text, _dialect(dialect))


_OPTIONAL = {("type", "enter"), ("scroll", "element"), ("wait", "seconds"), ("stop", "answer")}
# Near synonyms that are accepted in every dialect; any other name is an unknown action.
_OTHER_NAMES = {"go_back": "back", "go_backward": "back", "answer": "stop", "exit": "stop"}
_OTHER_PARAMETERS = {"id": "element", "message": "answer"}
_WEBRL_OPERATIONS = {  # do(action=...): our action, what it calls the argument, and what the operation implies
    "click": ("click", "argument", {}),
    "type": ("type", "text", {}),
    "search": ("type", "text", {"enter": "true"}),
    "select dropdown option": ("select", "option", {}),
    "scroll up": ("scroll", "argument", {"direction": "up"}),
    "scroll down": ("scroll", "argument", {"direction": "down"}),
    "wait": ("wait", "argument", {}),
}
_ELEMENT = re.compile("[a-z]*[0-9]+", re.IGNORECASE)  # letters in front name a nested frame
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*+:(?![0-9])", re.IGNORECASE)  # not the port of shop.test:8080


def _build_call(name: str, arguments: Arguments) -> Action:
    name = _OTHER_NAMES.get(name.lower(), name.lower())
    if name not in PARAMETERS:
        raise Unreadable("unknown_action", f"unknown action {show(name)}; allowed: {', '.join(PARAMETERS)}")
    parameters = PARAMETERS[name]
    if name == "scroll" and [keyword for keyword, _ in arguments if keyword in (None, "direction")] == [None]:
        parameters = ("direction", "element")  # the only unnamed argument, and no other is the direction
    return _action(name, _by_parameter(name, parameters, arguments))


def _build_json(_: str, arguments: Arguments) -> Action:
    names = [value for keyword, value in arguments if keyword == "action"]
    if len(names) != 1 or any(keyword is None for keyword, _ in arguments):
        raise Unreadable("bad_arguments", 'the object needs the key "action" once, and a key for every value')
    given = [(k, v) for k, v in arguments if not (isinstance(v, Bare) and v in ("null", "None"))]
    return _build_call(names[0], [(k, v) for k, v in given if k not in ("action", "thought")])


def _build_bracket(name: str, arguments: Arguments) -> Action:
    if name.lower() == "type" and len(arguments) >= 2:
        enter = [(None, value.removeprefix("press_enter_after=")) for _, value in arguments[2:]]
        arguments = arguments[:2] + (enter or [(None, "1")])
    elif name.lower() == "scroll":
        arguments = [(None, value.removeprefix("direction=")) for _, value in arguments]
    return _build_call(name, arguments)


def _build_do(name: str, arguments: Arguments) -> Action:
    if name.lower() in _OTHER_NAMES:
        return _build_call(name, arguments)
    given = _by_parameter(name, ("action", "argument", "element"), arguments) if name.lower() == "do" else {}
    operation = given.pop("action", name).lower()
    if operation not in _WEBRL_OPERATIONS or name.lower() != "do":
        allowed = f"do with action {', '.join(_WEBRL_OPERATIONS)}; exit; go_backward"
        raise Unreadable("unknown_action", f"unknown action {show(operation)}; allowed: {allowed}")
    action, argument, implied = _WEBRL_OPERATIONS[operation]
    return _action(action, {argument if key == "argument" else key: value for key, value in given.items()} | implied)


def _by_parameter(name: str, parameters: tuple[str, ...], arguments: Arguments) -> dict[str, str]:
    """The arguments of a call, keyed; those without a keyword go to the parameter at the same place."""
    given: dict[str, str] = {}
    for place, (keyword, value) in enumerate(arguments):
        if keyword is None and place >= len(parameters):
            raise Unreadable("bad_arguments", f"{name} takes {_list(parameters)}, got {len(arguments)} arguments")
        parameter = parameters[place] if keyword is None else _OTHER_PARAMETERS.get(keyword, keyword)
        if parameter in given:
            raise Unreadable("bad_arguments", f"{name}: {show(parameter)} is given twice")
        given[parameter] = value
    return given


def _action(name: str, given: dict[str, str]) -> Action:
    """The action with these arguments, each checked and turned into what it stands for."""
    parameters = PARAMETERS[name]
    if unknown := [parameter for parameter in given if parameter not in parameters]:
        raise Unreadable("bad_arguments", f"{name} takes {_list(parameters)}, got {show(unknown[0])}")
    if missing := [p for p in parameters if p not in given and (name, p) not in _OPTIONAL]:
        raise Unreadable("bad_arguments", f"{name}: {missing[0]} is missing; it takes {_list(parameters)}")
    if name == "stop":
        given = {"answer": ""} | given
    return Action(name, **{parameter: interpret(parameter, value) for parameter, value in given.items()})


def _list(parameters: tuple[str, ...]) -> str:
    return ", ".join(parameters) or "no arguments"


def interpret(parameter: str, value: str) -> str | bool | float:
    """What the value of a parameter stands for. An address without a scheme gets its http:// here and nowhere else."""
    word = value.strip().lower()
    unquoted = isinstance(value, Bare) and not NUMBER.fullmatch(value)
    allowed = "in quotes"
    if parameter == "element":
        allowed = "the id of an element, such as 12 or a51"
        if _ELEMENT.fullmatch(word):
            return value.strip()
    elif parameter == "direction":
        allowed = "up, down, left or right"
        if word in ("up", "down", "left", "right"):
            return word
    elif parameter == "enter":
        allowed = "true or false"
        if word in ("true", "1", "false", "0"):
            return word in ("true", "1")
    elif parameter == "seconds":
        allowed = "a number that is not negative"
        if NUMBER.fullmatch(word) and math.isinf(float(word)):
            raise Unreadable("out_of_range", f"{parameter} must be finite, got {show(value)}")
        if NUMBER.fullmatch(word) and not word.startswith("-"):
            return float(word)
    elif parameter == "url" and not unquoted:
        allowed = "a full http:// or https:// address"
        if word.startswith(("http://", "https://")):
            return value.strip()
        if word and word[0] not in "/?#.\\" and not _SCHEME.match(word):
            return "http://" + value.strip()
    elif not unquoted:
        return str(value)
    raise Unreadable("bad_arguments", f"{parameter} must be {allowed}, got {show(value)}")


_NAMES = [*PARAMETERS, *_OTHER_NAMES]
ROUND = r"\b(?P<name>NAME)[ \t]*+[(\uff08]"
_SQUARE = r"\b(?P<name>(?:NAME)(?=[ \t]*+\[)|(?:go_back|back|wait)(?=[ \t]*+(?:\r?$|`|;|</)))"

_DIALECTS = {
    "call": make_dialect(ROUND, _NAMES, read_arguments, _build_call, "click(12)"),
    "json": make_dialect(r"(?P<name>\{)", [], read_arguments, _build_json, '{"action": "click", "element": "12"}'),
    "bracket": make_dialect(_SQUARE, _NAMES, read_brackets, _build_bracket, "click [12]"),
    "do": make_dialect(ROUND, ["do", *_OTHER_NAMES], read_arguments, _build_do, 'do(action="Click", element="12")'),
}


def _dialect(name: str) -> Dialect:
    if name not in _DIALECTS:
        raise ValueError(f"dialect must be one of {', '.join(_DIALECTS)}, got {name!r}")
    return _DIALECTS[name]
