"""The action grammar: what a policy may answer in one turn, and how an answer is read.

An answer is prose with exactly one action in it. The action stands in an envelope; the first kind found wins:
`<action>...</action>`, a line `Action: ...`, a fenced block, or the whole answer. What comes before the winner is
thought and is not read for actions. A second action after it is an error: running one of two while the loss covers both
would credit tokens that never acted. Text in `<think>...</think>` is thought too.

The parser is tolerant about spelling (quotes, case, keyword arguments, comments, end-of-turn tokens) and strict about
meaning: what is not one unambiguous action comes back as a `FormatError`, never as a guess. Text inside the quotes of
an action is inert, whatever it looks like: a page cannot make the policy act by being quoted.

One pass from left to right finds the envelopes and reads the call in each, in time linear in the length of the answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

GRAMMAR = """\
click(id): click the element
type(id, "text"[, enter=true]): put the text into the field, "" clears it; enter=true presses Enter afterwards
select(id, "option"): choose the option with this label
scroll(["id",] "up|down|left|right"): scroll the page, or one element of it
goto("url"): open an http(s) address
back(): go back to the previous page
wait([seconds]): wait for the page
stop(["answer"]): end the task, with the answer if the task asks for one"""

Kind = Literal[
    "empty", "no_action", "unclosed_think", "multiple_actions", "unknown_action", "bad_arguments", "out_of_range",
    "truncated",
]  # fmt: skip


@dataclass(frozen=True)
class Action:
    """One action. `str()` gives its call form, one line that `parse_action` reads back as the same action."""

    name: str  # click, type, select, scroll, goto, back, wait or stop; the fields it does not take keep their default
    element: str | None = None  # id of an element as the observation spells it
    text: str | None = None
    enter: bool = False
    option: str | None = None
    direction: str | None = None  # up, down, left or right
    url: str | None = None  # begins with http:// or https://
    seconds: float | None = None  # what the policy asked for: the environment sets the upper limit
    answer: str | None = None  # of stop; "" if the policy gave none

    def __str__(self) -> str:
        given = {parameter: getattr(self, parameter) for parameter in _PARAMETERS[self.name]}
        spelled = [_spell(parameter, value) for parameter, value in given.items() if value is not None]
        return f"{self.name}({', '.join(filter(None, spelled))})"


@dataclass(frozen=True)
class FormatError:
    """Why an answer holds no action that can be run."""

    kind: Kind
    message: str  # one line, for the policy and for people: what is wrong and what is allowed


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
    if dialect not in _DIALECTS:
        raise ValueError(f"dialect must be one of {', '.join(_DIALECTS)}, got {dialect!r}")
    notation = _DIALECTS[dialect]
    try:
        if not text.strip(_INVISIBLE + " \t\r\n"):
            raise _Unreadable("empty", f"the answer is empty; write one action, such as {notation.example}")
        call = _choose(_find_calls(text, notation, think_prefilled), text, notation)
        return notation.build(call.name, call.arguments)
    except _Unreadable as problem:
        if problem.kind == "no_action" and finish_reason == "length":
            return FormatError("truncated", "the token limit cut the answer before its action; think more briefly")
        return FormatError(problem.kind, problem.message)


class _Unreadable(Exception):
    """No action, or none that can be read past `position`."""

    def __init__(self, kind: Kind, message: str, position: int = 0):
        self.kind, self.message, self.position = kind, message, position


def _show(text: str) -> str:
    """A piece of the answer for a message: short, on one line, printable."""
    return repr(text) if len(text) <= 40 else repr(text[:40]) + "..."


_Arguments = list[tuple[str | None, str]]  # of a call, as written: (keyword or None, value)


# --- Envelopes: where in an answer the action stands -----------------------------------------------------------------

# What may stand beside a call without meaning anything: blanks, markdown, end-of-turn tokens, comments. Repetitions in
# the patterns of this module are possessive (*+) or bounded, so that no input makes a match go back and try again.
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"
_COMMENT = "#(?:(?!</?think>|</action>|```)[^\n])*+"
_BESIDE = rf"[;.*{_INVISIBLE}]|`(?!``)|<\|[^|<>\n]{{1,40}}\|>|</s>|{_COMMENT}"
_NOISE = re.compile(rf"(?:\s|{_BESIDE})*+", re.IGNORECASE)

_ENVELOPES = {  # in order of preference, with what must follow the call
    "tag": re.compile(rf"(?:\s|{_BESIDE})*+(?:</action>|\Z)", re.IGNORECASE),
    "line": re.compile(rf"(?:[^\S\n]|{_BESIDE})*+(?:\n|\Z)", re.IGNORECASE),
    "fence": re.compile(rf"(?:\s|{_BESIDE})*+(?:```|\Z)", re.IGNORECASE),
    "whole": re.compile(rf"(?:\s|{_BESIDE})*+\Z", re.IGNORECASE),
}
_MARKERS = (  # of envelopes and thoughts; CALL is the beginning of a call
    "(?P<think><think>)|(?P<think_end></think>)|(?P<tag><action>)|(?P<fence>`{3,}+)"
    r"|(?P<line>(?:^|(?<=</think>))[ \t*>-]*+action\**+[ \t]*+[:\uff1a]\**+)|(?P<stray>^[ \t*>-]*+`?)(?=CALL)"
)
_THINK_END = re.compile("</think>", re.IGNORECASE)
_BEFORE_CALL = re.compile(r"\s*+[*`]{0,2}+\s*+")
_FENCE_LANGUAGE = re.compile(r"[a-z]*+\s*+", re.IGNORECASE)
_MOST_CALLS = 100  # an answer with more is no answer; reading on would only take time


class _Call(NamedTuple):
    """A call as it stands in the answer, its arguments not yet interpreted."""

    envelope: str  # a key of _ENVELOPES, or "stray": a line that begins with a call, in no envelope
    name: str
    arguments: _Arguments
    end: int
    problem: _Unreadable | None


def _find_calls(text: str, dialect: _Dialect, in_thought: bool) -> list[_Call]:
    """All calls outside thoughts, in the order of the text. Calls inside the quotes of another are not seen."""
    calls: list[_Call] = []
    position, fence_open, answer_begins = 0, False, True
    while True:
        envelope, head = "whole", None
        if in_thought:
            closing = _THINK_END.search(text, position)
            if closing is None:
                raise _Unreadable("unclosed_think", "the thought is not closed; write </think>, then the action")
            position, in_thought, answer_begins = closing.end(), False, True
        if answer_begins:
            head = dialect.call.match(text, _NOISE.match(text, position).end())
            answer_begins = False
        if head is None:
            marker = dialect.markers.search(text, position)
            if marker is None:
                return calls
            envelope, position = str(marker.lastgroup), marker.end()
            if envelope == "think":
                in_thought = True
            elif envelope == "think_end":  # no tag opened it here, so the template did: all before it was thought
                calls, fence_open, answer_begins = [], False, True
            elif envelope == "fence":
                fence_open = not fence_open
                if fence_open:
                    after_language = _FENCE_LANGUAGE.match(text, position).end()
                    head = dialect.call.match(text, position) or dialect.call.match(text, after_language)
            else:
                head = dialect.call.match(text, _BEFORE_CALL.match(text, position).end())
        if head is None:
            continue

        try:
            arguments, position = dialect.read(text, head.end())
            calls.append(_Call(envelope, head["name"], arguments, position, None))
        except _Unreadable as problem:
            position = problem.position
            calls.append(_Call(envelope, head["name"], [], position, problem))
        if position >= len(text):
            return calls
        if len(calls) > _MOST_CALLS:
            raise _Unreadable("multiple_actions", f"over {_MOST_CALLS} actions; write exactly one")


def _choose(calls: list[_Call], text: str, dialect: _Dialect) -> _Call:
    """The call in the preferred envelope, if it is the last call of the answer and alone in its envelope."""
    order = list(_ENVELOPES)
    enveloped = [call for call in calls if call.envelope in order]
    if not enveloped:
        raise _Unreadable("no_action", f"no action found; end the answer with a line such as Action: {dialect.example}")
    call = min(enveloped, key=lambda call: order.index(call.envelope))
    rest = text[call.end : call.end + 200].split("\n")[0].strip()
    alone = call is calls[-1]
    if alone and call.problem:
        raise call.problem
    if alone and _ENVELOPES[call.envelope].match(text, call.end):
        return call
    if not alone or dialect.own_call.search(rest):
        raise _Unreadable("multiple_actions", f"more than one action; write exactly one, such as {dialect.example}")
    if call.envelope == "whole":
        raise _Unreadable("no_action", f"the action stands in a sentence; write a line Action: {dialect.example}")
    raise _Unreadable("bad_arguments", f"{_show(rest)} follows the action; only a comment may")


# --- Calls: the scanners ---------------------------------------------------------------------------------------------


class _Bare(str):
    """A value written without quotes: a number or a word."""


_BLANK = re.compile(r"\s*+")
_WORD = re.compile(r"""[^\s,\uff0c()\uff08\uff09{}\[\]=:\uff1a"'\u2018-\u201d]++""")
_ASSIGN, _COMMA, _CLOSE = tuple("=:\uff1a"), tuple(",\uff0c"), tuple(")\uff09}")
_STRING_REST = {  # by opening quote: up to the closing one that is not escaped
    opening: re.compile(rf"((?:[^\\{closing}]++|\\.)*+){closing}", re.DOTALL)
    for opening, closing in ('""', "''", "\u201c\u201d", "\u2018\u2019")
}
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(  # in three ways a code point, else one character
    rf"\\(?:u([dD][89abAB]{_HEX}{{2}})\\u([dD][c-fC-F]{_HEX}{{2}})|u({_HEX}{{4}})|U({_HEX}{{8}})"
    r"""|([nrtbf"'\\/\u2019\u201d]))"""
)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_MOST_ARGUMENTS = 8


def _read_arguments(text: str, position: int) -> tuple[_Arguments, int]:
    """Read `[keyword =] value, ...` up to the closing bracket; returns the arguments and the position after it."""
    arguments: _Arguments = []
    while True:
        position = _skip_blank(text, position)
        if text.startswith(_CLOSE, position):
            return arguments, position + 1
        if len(arguments) == _MOST_ARGUMENTS:
            raise _Unreadable("bad_arguments", "too many arguments", position)
        keyword, (value, position) = None, _read_value(text, position)
        if text.startswith(_ASSIGN, position):
            keyword, (value, position) = value, _read_value(text, _skip_blank(text, position + 1))
        arguments.append((keyword, value))
        if text.startswith(_COMMA, position):
            position += 1
        elif not text.startswith(_CLOSE, position):
            raise _expected("a comma or the closing bracket", text, position)


def _read_value(text: str, position: int) -> tuple[str, int]:
    """Read one quoted string or bare word; returns its value and the position of what follows it."""
    rest_of_string = _STRING_REST.get(text[position : position + 1])
    if rest_of_string is None:
        word = _WORD.match(text, position)
        if word is None:
            raise _expected("a value", text, position)
        return _Bare(word[0]), _skip_blank(text, word.end())
    string = rest_of_string.match(text, position + 1)
    if string is None:
        raise _Unreadable("truncated", "the answer ends inside a quoted text; close the quotes", len(text))
    return _ESCAPE.sub(_unescape, string[1]), _skip_blank(text, string.end())


def _skip_blank(text: str, position: int) -> int:
    return _BLANK.match(text, position).end()


def _expected(what: str, text: str, position: int) -> _Unreadable:
    if position >= len(text):
        return _Unreadable("truncated", "the answer ends inside the action; close its bracket", position)
    found = _show(text[position : position + 20])
    return _Unreadable("bad_arguments", f'expected {what} at {found}; text goes in quotes, " inside as \\"', position)


def _unescape(escape: re.Match) -> str:
    high, low, four, eight, character = escape.groups()
    if character:
        return _CONTROL.get(character, character)
    if high:  # the two halves of one character, as JSON writes it
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    code = int(four or eight, 16)
    return chr(code) if code <= 0x10FFFF else escape[0]


def _read_brackets(text: str, position: int) -> tuple[_Arguments, int]:
    """Read WebArena's `[value] [value]`. Brackets inside a value must balance; a backslash there is a backslash."""
    arguments: _Arguments = []
    while opening := re.compile(r"[ \t]*+\[").match(text, position):
        depth = 1
        for bracket in re.compile(r"[\[\]]").finditer(text, opening.end()):
            depth += 1 if bracket[0] == "[" else -1
            if depth == 0:
                break
        else:
            raise _Unreadable("truncated", "the answer ends inside the action; close its bracket", len(text))
        if len(arguments) == _MOST_ARGUMENTS:
            raise _Unreadable("bad_arguments", "too many arguments", position)
        value = text[opening.end() : bracket.start()]
        arguments.append((None, value.removeprefix("press_enter_after=").removeprefix("direction=")))
        position = bracket.end()
    return arguments, position


# --- Meaning: from a call to an action -------------------------------------------------------------------------------

_PARAMETERS = {
    "click": ("element",),
    "type": ("element", "text", "enter"),
    "select": ("element", "option"),
    "scroll": ("element", "direction"),
    "goto": ("url",),
    "back": (),
    "wait": ("seconds",),
    "stop": ("answer",),
}
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
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*+:(?![0-9])", re.IGNORECASE)  # not the port of shop.test:8080


def _build_call(name: str, arguments: _Arguments) -> Action:
    name = _OTHER_NAMES.get(name.lower(), name.lower())
    if name not in _PARAMETERS:
        raise _Unreadable("unknown_action", f"unknown action {_show(name)}; allowed: {', '.join(_PARAMETERS)}")
    parameters = _PARAMETERS[name]
    if name == "scroll" and [keyword for keyword, _ in arguments if keyword in (None, "direction")] == [None]:
        parameters = ("direction", "element")  # the only unnamed argument, and no other is the direction
    return _action(name, _by_parameter(name, parameters, arguments))


def _build_json(_: str, arguments: _Arguments) -> Action:
    names = [value for keyword, value in arguments if keyword == "action"]
    if len(names) != 1 or any(keyword is None for keyword, _ in arguments):
        raise _Unreadable("bad_arguments", 'the object needs the key "action" once, and a key for every value')
    given = [(k, v) for k, v in arguments if not (isinstance(v, _Bare) and v in ("null", "None"))]
    return _build_call(names[0], [(k, v) for k, v in given if k not in ("action", "thought")])


def _build_bracket(name: str, arguments: _Arguments) -> Action:
    if name.lower() == "type" and len(arguments) == 2:
        arguments = [*arguments, (None, "1")]
    return _build_call(name, arguments)


def _build_do(name: str, arguments: _Arguments) -> Action:
    if name.lower() in _OTHER_NAMES:
        return _build_call(name, arguments)
    given = _by_parameter(name, ("action", "argument", "element"), arguments) if name.lower() == "do" else {}
    operation = given.pop("action", name).lower()
    if operation not in _WEBRL_OPERATIONS or name.lower() != "do":
        allowed = f"do with action {', '.join(_WEBRL_OPERATIONS)}; exit; go_backward"
        raise _Unreadable("unknown_action", f"unknown action {_show(operation)}; allowed: {allowed}")
    action, argument, implied = _WEBRL_OPERATIONS[operation]
    return _action(action, {argument if key == "argument" else key: value for key, value in given.items()} | implied)


def _by_parameter(name: str, parameters: tuple[str, ...], arguments: _Arguments) -> dict[str, str]:
    """The arguments of a call, keyed; those without a keyword go to the parameter at the same place."""
    given: dict[str, str] = {}
    for place, (keyword, value) in enumerate(arguments):
        if keyword is None and place >= len(parameters):
            raise _Unreadable("bad_arguments", f"{name} takes {_list(parameters)}, got {len(arguments)} arguments")
        parameter = parameters[place] if keyword is None else _OTHER_PARAMETERS.get(keyword, keyword)
        if parameter in given:
            raise _Unreadable("bad_arguments", f"{name}: {_show(parameter)} is given twice")
        given[parameter] = value
    return given


def _action(name: str, given: dict[str, str]) -> Action:
    """The action with these arguments, each checked and turned into what it stands for."""
    parameters = _PARAMETERS[name]
    if unknown := [parameter for parameter in given if parameter not in parameters]:
        raise _Unreadable("bad_arguments", f"{name} takes {_list(parameters)}, got {_show(unknown[0])}")
    if missing := [p for p in parameters if p not in given and (name, p) not in _OPTIONAL]:
        raise _Unreadable("bad_arguments", f"{name}: {missing[0]} is missing; it takes {_list(parameters)}")
    if name == "stop":
        given = {"answer": ""} | given
    return Action(name, **{parameter: _interpret(parameter, value) for parameter, value in given.items()})


def _list(parameters: tuple[str, ...]) -> str:
    return ", ".join(parameters) or "no arguments"


def _interpret(parameter: str, value: str) -> str | bool | float:
    """What the value of a parameter stands for. An address without a scheme gets its http:// here and nowhere else."""
    word = value.strip().lower()
    unquoted = isinstance(value, _Bare) and not _NUMBER.fullmatch(value)
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
        if _NUMBER.fullmatch(word) and math.isinf(float(word)):
            raise _Unreadable("out_of_range", f"{parameter} must be finite, got {_show(value)}")
        if _NUMBER.fullmatch(word) and not word.startswith("-"):
            return float(word)
    elif parameter == "url" and not unquoted:
        allowed = "a full http:// or https:// address"
        if word.startswith(("http://", "https://")):
            return value.strip()
        if word and word[0] not in "/?#.\\" and not _SCHEME.match(word):
            return "http://" + value.strip()
    elif not unquoted:
        return str(value)
    raise _Unreadable("bad_arguments", f"{parameter} must be {allowed}, got {_show(value)}")


# --- The canonical form ----------------------------------------------------------------------------------------------

_TO_ESCAPE = re.compile(r'["\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')


def _spell(parameter: str, value: str | bool | float) -> str:
    """An argument in the canonical form, "" if it need not be written."""
    if parameter == "enter":
        return "enter=true" if value else ""
    if parameter == "seconds":
        return str(int(value)) if float(value).is_integer() else repr(value)
    if parameter == "element" and value.isdecimal():
        return value
    return '"' + _TO_ESCAPE.sub(_escape, value) + '"'


def _escape(match: re.Match) -> str:
    character = match[0]
    if "\ud800" <= character <= "\udfff":  # the long form is never joined with its neighbour to one character
        return f"\\U{ord(character):08x}"
    simple = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return simple.get(character, f"\\u{ord(character):04x}")


# --- Dialects --------------------------------------------------------------------------------------------------------


class _Dialect(NamedTuple):
    """A notation of calls."""

    call: re.Pattern  # the beginning of a call by any name
    own_call: re.Pattern  # the same by a name that the dialect knows
    markers: re.Pattern
    read: Callable[[str, int], tuple[_Arguments, int]]
    build: Callable[[str, _Arguments], Action]
    example: str


def _dialect(call: str, names: list[str], read: Callable, build: Callable, example: str) -> _Dialect:
    own_call = call.replace("NAME", "|".join(names))
    markers = _MARKERS.replace("CALL", own_call.replace("?P<name>", "?:"))
    patterns = [call.replace("NAME", r"[a-z_]\w*+"), own_call, markers]
    return _Dialect(*(re.compile(pattern, re.IGNORECASE | re.MULTILINE) for pattern in patterns), read, build, example)


_NAMES = [*_PARAMETERS, *_OTHER_NAMES]
_ROUND = r"\b(?P<name>NAME)[ \t]*+[(\uff08]"
_SQUARE = r"\b(?P<name>(?:NAME)(?=[ \t]*+\[)|(?:go_back|back|wait)(?=[ \t]*+(?:\r?$|`|;|</)))"

_DIALECTS = {
    "call": _dialect(_ROUND, _NAMES, _read_arguments, _build_call, "click(12)"),
    "json": _dialect(r"(?P<name>\{)", [], _read_arguments, _build_json, '{"action": "click", "element": "12"}'),
    "bracket": _dialect(_SQUARE, _NAMES, _read_brackets, _build_bracket, "click [12]"),
    "do": _dialect(_ROUND, ["do", *_OTHER_NAMES], _read_arguments, _build_do, 'do(action="Click", element="12")'),
}
