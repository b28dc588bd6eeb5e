"""The verdict in a reply that should have been JSON: fenced, in prose, Python's spelling, cut off, or all of these."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

_YES = {"true", "yes", "success", "successful", "pass", "passed", "1"}
_NO = {"false", "no", "failure", "fail", "failed", "not success", "not_success", "unsuccessful", "0"}
_ITEMS = ("criteria", "rubric", "items", "checks", "points")
_MET = ("met", "satisfied", "fulfilled", "pass", "passed", "ok", "holds", "success", "verdict")
_QUOTING = re.compile(
    r"(?i)\b(?:says?|reads?|states?|claims?|contains?|shows?|displays?|prints?|wrote|written|text|banner|page|"
    r"planted|injected|would|could|if|must|should|options?)\b"
)
_TAKEN_BACK = re.compile(
    r"(?i)(?:final|overall|verdict|conclusion|correction|wait|actually)\b[^{}\n]{0,80}\b(?:fail\w*|not|false|unsuccessful|wrong)\b"
)
_MOST_OBJECTS = 200  # looked at from the end; a reply with more is not one that was asked for


def read_json_verdict(text: str, *, keys: Sequence[str], cut: bool) -> bool | None:
    """Whether the last object that holds one of `keys` says success; None where none does so plainly.

    A list of criteria beside the key has to agree with it: success if and only if all are met.
    """
    starts = _openings(text)
    verdict: bool | None = None
    for start, end in starts:
        fields = _fields(text[start:end] if end else text[start:], cut)
        present = [key for key in keys if key in fields]
        if not present:
            nested = [
                value for value in fields.values() if isinstance(value, dict) and any(key in value for key in keys)
            ]
            if len(nested) != 1:
                continue
            fields, present = nested[0], [key for key in keys if key in nested[0]]
        line = text[text.rfind("\n", 0, start) + 1 : start].strip("`* \t")
        if line and (not line.endswith((":", "=", ">")) or _QUOTING.search(line)):
            continue  # part of a sentence: what a page or an instruction said
        said = [_truth(fields[key]) for key in present]
        verdict = said[0] if len(set(said)) == 1 else None
        met = _criteria(fields)
        if verdict is not None and met and all(met) != verdict:
            verdict = None
        if verdict and end and _TAKEN_BACK.search(text[end:]):
            verdict = None
    return verdict


def criteria_met(text: str) -> list[bool | None]:
    """The items of the last object that lists criteria, each whether it is met (None: not plainly said)."""
    found: list[bool | None] = []
    for start, end in _openings(text):
        found = _criteria(_fields(text[start:end] if end else text[start:], False)) or found
    return found


def _openings(text: str) -> list[tuple[int, int | None]]:
    """Spans of the outermost {...}; the end is None where it never closes. Linear in the length of the text."""
    spans: list[tuple[int, int | None]] = []
    begin, depth, quoted, escaped = 0, 0, False, False
    for found in re.finditer(r'[{}"\\]', text):
        mark, at = found.group(), found.start()
        if depth == 0:
            if mark == "{":
                begin, depth, quoted = at, 1, False
        elif mark == "\\":
            escaped = at + 1
        elif mark == '"':
            quoted = quoted if escaped == at else not quoted
        elif not quoted:
            depth += 1 if mark == "{" else -1
            if depth == 0:
                spans.append((begin, at + 1))
    if depth:
        spans.append((begin, None))
        inner = text.rfind("\n{", begin + 1)  # a stray brace in the prose must not hide an object further down
        if inner > 0:
            spans += [(start + inner + 1, end and end + inner + 1) for start, end in _closed(text[inner + 1 :])]
    return spans[-_MOST_OBJECTS:]


def _closed(text: str) -> list[tuple[int, int | None]]:
    found = re.match(r"\{[^{}]*\}", text)
    return [(0, found.end())] if found else []


def _fields(text: str, cut: bool) -> dict[str, Any]:
    """The object's fields. A key that is there twice with different values counts as unclear (None)."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            fields[key] = None if key in fields and fields[key] != value else value
        return fields

    try:
        value = json.loads(text, strict=False, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return _first_fields(text, cut)
    return {str(key).strip().lower(): field for key, field in value.items()} if isinstance(value, dict) else {}


_KEY = re.compile(r"""\s*,?\s*(?:"(?P<d>[^"\\\n]{1,60})"|'(?P<s>[^'\\\n]{1,60})'|(?P<b>\w{1,60}))\s*:\s*""")
_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)
_SCALAR = re.compile(r"(?:true|false|null|none|-?\d+(?:\.\d+)?)(?=\s*[,}\n])", re.IGNORECASE)


def _first_fields(text: str, cut: bool) -> dict[str, Any]:
    """Fields of an object that no parser takes, read one after the other for as long as they are plain."""
    fields: dict[str, Any] = {}
    at = 1
    while found := _KEY.match(text, at):
        key = (found["d"] or found["s"] or found["b"]).strip().lower()
        value = _STRING.match(text, found.end()) or _SCALAR.match(text, found.end())
        if value is None:
            break
        word = value.group()
        read = word[1:-1] if word[0] in "\"'" else word
        fields[key] = None if key in fields and fields[key] != read else read
        at = value.end()
    return fields


def _truth(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    word = " ".join(str(value).lower().split()).strip(" .!") if isinstance(value, str) else ""
    return True if word in _YES else False if word in _NO else None


def _criteria(fields: dict[str, Any]) -> list[bool | None]:
    for name in _ITEMS:
        items = fields.get(name)
        if isinstance(items, dict):
            items = list(items.values())
        if isinstance(items, list) and items:
            return [_met(item) for item in items]
    return []


def _met(item: Any) -> bool | None:
    if isinstance(item, dict):
        said = [_truth(item[key]) for key in _MET if key in item]
        return said[0] if len(set(said)) == 1 else None
    return _truth(item)
