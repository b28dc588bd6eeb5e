"""How a call is written: the scanners that read its arguments, without knowing what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable

from webagent_core.episode.actions.action import Unreadable, show

Arguments = list[tuple[str | None, str]]  # of a call, as written: (keyword or None, value)


class Bare(str):
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


def read_arguments(
    text: str, position: int, read_value: Callable[[str, int], tuple[str, int]] | None = None
) -> tuple[Arguments, int]:
    """Read `[keyword =] value, ...` up to the closing bracket; returns the arguments and the position after it.

    `read_value` stands in for this module's own, where a grammar has more than quoted texts, numbers and words.
    """
    read_value = read_value or read_text_or_word
    arguments: Arguments = []
    while True:
        position = skip_blank(text, position)
        if text.startswith(_CLOSE, position):
            return arguments, position + 1
        if len(arguments) == _MOST_ARGUMENTS:
            raise Unreadable("bad_arguments", "too many arguments", position)
        keyword, (value, position) = None, read_value(text, position)
        if text.startswith(_ASSIGN, position):
            keyword, (value, position) = value, read_value(text, skip_blank(text, position + 1))
        arguments.append((keyword, value))
        if text.startswith(_COMMA, position):
            position += 1
        elif not text.startswith(_CLOSE, position):
            raise _expected("a comma or the closing bracket", text, position)


def read_text_or_word(text: str, position: int) -> tuple[str, int]:
    """Read one quoted string or bare word; returns its value and the position of what follows it."""
    rest_of_string = _STRING_REST.get(text[position : position + 1])
    if rest_of_string is None:
        word = _WORD.match(text, position)
        if word is None:
            raise _expected("a value", text, position)
        return Bare(word[0]), skip_blank(text, word.end())
    string = rest_of_string.match(text, position + 1)
    if string is None:
        raise Unreadable("truncated", "the answer ends inside a quoted text; close the quotes", len(text))
    return _ESCAPE.sub(_unescape, string[1]), skip_blank(text, string.end())


def skip_blank(text: str, position: int) -> int:
    return _BLANK.match(text, position).end()


def _expected(what: str, text: str, position: int) -> Unreadable:
    if position >= len(text):
        return Unreadable("truncated", "the answer ends inside the action; close its bracket", position)
    found = show(text[position : position + 20])
    return Unreadable("bad_arguments", f'expected {what} at {found}; text goes in quotes, " inside as \\"', position)


def _unescape(escape: re.Match) -> str:
    high, low, four, eight, character = escape.groups()
    if character:
        return _CONTROL.get(character, character)
    if high:  # the two halves of one character, as JSON writes it
        return chr(0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF))
    code = int(four or eight, 16)
    return chr(code) if code <= 0x10FFFF else escape[0]


def read_brackets(text: str, position: int) -> tuple[Arguments, int]:
    """Read WebArena's `[value] [value]`. Brackets inside a value must balance; a backslash there is a backslash."""
    arguments: Arguments = []
    while opening := re.compile(r"[ \t]*+\[").match(text, position):
        depth = 1
        for bracket in re.compile(r"[\[\]]").finditer(text, opening.end()):
            depth += 1 if bracket[0] == "[" else -1
            if depth == 0:
                break
        else:
            raise Unreadable("truncated", "the answer ends inside the action; close its bracket", len(text))
        if len(arguments) == _MOST_ARGUMENTS:
            raise Unreadable("bad_arguments", "too many arguments", position)
        arguments.append((None, text[opening.end() : bracket.start()]))
        position = bracket.end()
    return arguments, position
