"""WebArena's string evaluators: does the agent's answer say what the reference says?

`paper` is what a reader of the answer would say; `released` is the published rule as it is, loopholes included
(a number inside another number matches, " |OR| " is not understood).
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Literal

Preset = Literal["paper", "released"]
KINDS = ("exact_match", "must_include", "fuzzy_match")
UNACHIEVABLE = "N/A"

_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")
_TOKEN = re.compile(rf"(?P<number>{_NUMBER.pattern})|(?P<word>[^\W\d_]+)")
_QUANTITY = re.compile(rf"(?:[$€£¥]|[a-z]{{3}} )?\s?(?P<number>{_NUMBER.pattern})\s?(?P<unit>[^\W\d_]{{1,12}}|%)?")
# Behind a number these are part of it, not a unit that may be left out.
_SCALES = {"k", "hundred", "thousand", "million", "billion", "dozen", "mn", "bn", "th", "st", "nd", "rd"}
_GUESSES = re.compile(r"\d[\d,.]*(?:\s*(?:,|/|\bor\b|,\s*or\b)\s*\d[\d,.]*)+")
_OR = re.compile(r"\s*\|or\|\s*", re.IGNORECASE)


def check_references(references: Any) -> dict[str, Any]:
    """Return the reference answers of a task, or raise ValueError naming what is wrong with them."""
    if not isinstance(references, Mapping) or not references:
        raise ValueError(f"reference_answers = {references!r} is not allowed: a mapping from {', '.join(KINDS)}")
    for kind, wanted in references.items():
        if kind not in KINDS:
            raise ValueError(f"reference_answers: unknown key {kind!r}; allowed: {', '.join(KINDS)}")
        text = isinstance(wanted, str) and bool(wanted.strip())
        texts = isinstance(wanted, list) and bool(wanted) and all(isinstance(w, str) and w.strip() for w in wanted)
        if not (text and kind != "must_include" or texts and kind != "exact_match"):
            allowed = {"exact_match": "a text", "must_include": "a list of texts", "fuzzy_match": "a text or a list of"}
            raise ValueError(f"reference_answers.{kind} = {wanted!r} is not allowed: {allowed[kind]}, none of it empty")
    return dict(references)


def string_match(references: Any, answer: str | None, preset: Preset = "paper") -> float | None:
    """1.0 if the answer meets all of the references, 0.0 if not, None if only a judge can tell.

    Args:
        references: {"exact_match": text, "must_include": [text, ...], "fuzzy_match": text or list}, any of them.
            " |OR| " in a phrase of must_include lists alternatives.
        answer: what the agent answered; None (it never did) and "" are a plain failure.

    Raises:
        ValueError: the references are no such mapping, or a text in them is empty.
    """
    references = check_references(references)
    if preset not in ("paper", "released"):
        raise ValueError(f"preset = {preset!r} is not allowed: paper or released")
    if preset == "released":
        return None if answer is None else _released(references, answer)
    if answer is None or not answer.strip():
        return 0.0
    rules = []
    for kind, wanted in references.items():
        if kind == "exact_match":
            rules.append(exact_match(wanted, answer))
        elif kind == "must_include":
            rules.append(all(must_include(phrase, answer, beside=wanted) for phrase in wanted))
        else:
            rules.append(True if _is_unachievable(wanted, answer) else None)
    return 0.0 if False in rules else None if None in rules else 1.0


def exact_match(reference: str, answer: str) -> bool:
    """Equal but for case, white space, one pair of quotes, closing punctuation, and how one number is written."""
    one, other = _plain(reference), _plain(answer)
    if one == other:
        return bool(one)
    first, second = _QUANTITY.fullmatch(one), _QUANTITY.fullmatch(other)
    if not first or not second or _value(first["number"]) != _value(second["number"]):
        return False
    units = {first["unit"], second["unit"]} - {None}
    return len(units) <= 1 and not units & _SCALES


def must_include(phrase: str, answer: str, beside: list[str] | tuple[str, ...] = ()) -> bool:
    """Whether the phrase, or one of its " |OR| " alternatives, stands in the answer as whole words and numbers.

    A number that the answer only offers among several ("41, 42 or 43") is a guess, unless `beside`, the other phrases
    that are asked for, call for the others too.
    """
    words = list(_tokens(answer))
    if list(_tokens(phrase)) == words and words:
        return True
    for alternative in _OR.split(phrase):
        wanted = list(_tokens(alternative))
        if not wanted:  # no word, no number: a sign
            if _plain(alternative) in _plain(answer):
                return True
            continue
        places = (words[at : at + len(wanted)] for at in range(len(words) - len(wanted) + 1))
        if wanted in places and not (len(wanted) == 1 and _is_guessed(wanted[0], answer, beside)):
            return True
    return False


def _is_guessed(wanted: str | Decimal, answer: str, beside: list[str] | tuple[str, ...]) -> bool:
    asked = {token for phrase in beside for token in _tokens(phrase)}
    for found in _GUESSES.finditer(answer.lower()):
        offered = set(_tokens(found.group()))
        if "or" in offered and wanted in offered and not offered - {"or"} <= asked:
            return True
    return False


def _is_unachievable(wanted: str | list[str], answer: str) -> bool:
    return wanted in (UNACHIEVABLE, [UNACHIEVABLE]) and _plain(answer) == _plain(UNACHIEVABLE)


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", html.unescape(text)).casefold()
    text = " ".join(text.split())
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    return text.rstrip(" .!;,") or text


def _tokens(text: str) -> Iterator[str | Decimal]:
    """Words in lower case and numbers by value; "12kg" is a number and a word."""
    for found in _TOKEN.finditer(unicodedata.normalize("NFKC", html.unescape(text)).casefold()):
        yield _value(found["number"]) if found["number"] else found["word"]


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "")).normalize()


def _released(references: dict[str, Any], answer: str) -> float | None:
    given = _released_clean(answer)
    for kind, wanted in references.items():
        if kind == "exact_match":
            met = given == _released_clean(wanted)
        elif kind == "must_include":
            # One reference of one character has to be a token of its own; any other may stand inside a word.
            lone = len(wanted) == 1 and len(_released_clean(wanted[0])) == 1
            text = re.findall(r"\d+(?:[.,]\d+)*|\w+|[^\w\s]", given) if lone else given
            met = all(_released_clean(phrase) in text for phrase in wanted)
        elif wanted in (UNACHIEVABLE, [UNACHIEVABLE]) and given == _released_clean(UNACHIEVABLE):
            met = True
        else:
            return None
        if not met:
            return 0.0
    return 1.0


def _released_clean(text: str) -> str:
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return text.lower()
