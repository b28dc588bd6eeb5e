"""A judge's reply, ready to be read: thoughts, markup and quotations gone, and each label one character."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

# Labels are replaced by one character each, so that "NOT SUCCESS" never looks like "SUCCESS" again. Upper case labels
# and others are kept apart: in front of a reason ("SUCCESS because ..."), only the label as it was asked for counts.
YES, LOWER_YES, NO, LOWER_NO, DOUBT = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
LABEL = f"[{YES}{LOWER_YES}{NO}{LOWER_NO}{DOUBT}]"

# Other ways to say that something is no success, understood whatever the label's words are.
_FAILURES = ("not success", "no success", "non success", "failure", "fail", "failed")

_INVISIBLE = re.compile("[\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe00-\ufe0f\ufeff]")
_ACCENTS = re.compile("[\u0300-\u036f]")
_THOUGHT = r"(?:think|thinking|thought|thoughts|reasoning|scratchpad)"
_NO_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")


def visible(text: str) -> str:
    """One kind of line break, plain letters for full-width ones, and nothing that cannot be seen."""
    text = unicodedata.normalize("NFKC", re.sub("\r\n?|[\u2028\u2029\u0085\x0b\x0c]", "\n", text))
    return _INVISIBLE.sub("", text)


def without_thoughts(text: str) -> str:
    """Drop think blocks: whole ones, what a template opened before the text, what the token limit left open."""
    text = re.sub(rf"(?is)<{_THOUGHT}>(?:(?!<{_THOUGHT}>).)*?</{_THOUGHT}>", "\n", text)
    *_, text = re.split(rf"(?i)</{_THOUGHT}>", text)
    return re.split(rf"(?i)<{_THOUGHT}>", text)[0]


def _folded(text: str) -> str:
    """Comparable across case, accents and the two Turkish i's."""
    text = _ACCENTS.sub("", unicodedata.normalize("NFD", text.casefold()))
    return unicodedata.normalize("NFC", text.replace("\u0131", "i"))


def marked(text: str, words: Mapping[str, Sequence[str]], *, english: bool) -> str:
    """The folded text with quotations and markup gone and each label one character.

    Args:
        words: {"success": [...], "failure": [...]}.
        english: understand other English words for a failure too.
    """
    text = re.sub(r"\\(?:boxed|text(?:bf)?|mathbf)\{([^{}\n]{0,40})\}", r"verdict: \1", text)
    text = re.sub(r"(?m)^[ \t]*(?:```|~~~).*$", "", text)  # fences; what is inside stays
    text = re.sub(r"(?m)^[ \t]*>.*$", "", text)  # quoted lines
    text = _without_tags(text)
    text = re.sub(r"[*`~]+|(?<![^\W_])_+|_+(?![^\W_])|(?m:^[ \t]*#+)", "", text)

    tokens: dict[str, tuple[str, str]] = {}
    for label in (*words["failure"], *(_FAILURES if english else ())):
        tokens[_folded(label)] = (NO, LOWER_NO)
    for label in words["success"]:
        tokens.setdefault(_folded(label), (YES, LOWER_YES))
    longest_first = sorted(tokens, key=len, reverse=True)
    patterns = []
    for label in longest_first:
        body = r"[\s_-]*".join(map(re.escape, label.split())) if " " in label else re.escape(label)
        body = body.replace(r"not[\s_-]*", r"not[\s_-]*(?:(?:a|an|yet|really|quite|fully|entirely|considered)\s+)*")
        spaced = not _NO_SPACES.search(label)
        # An underscore binds to the word: NOT_SUCCESS is one label, SUCCESS_PAGE is none.
        patterns.append(rf"(?<!\w){body}(?!\w)" if spaced else body)
    finder = re.compile("|".join(f"({pattern})" for pattern in patterns))
    kinds = [tokens[label] for label in longest_first]

    folded = _folded(text)
    same_length = len(folded) == len(text)

    def token(found: re.Match[str]) -> str:
        upper, lower = kinds[found.lastindex - 1]
        before = folded[max(0, found.start() - 1) : found.start()]
        if upper == YES and before and before in "不未没沒非無无":
            return DOUBT
        spelled = text[found.start() : found.end()] if same_length else ""
        return upper if spelled and spelled == spelled.upper() else lower

    return _without_quotations(finder.sub(token, folded))


_PLAIN_TAG = r"(?:b|i|u|p|em|strong|span|div|br|li|ul|ol|h[1-6]|code|pre|center|font|mark)"
_VERDICT_TAG = r"(?:final[_-]?)?(?:verdict|answer|result|label|judge?ment|decision|status|evaluation|conclusion|output)"


def _without_tags(text: str) -> str:
    text = re.sub(rf"(?i)</?{_PLAIN_TAG}(?:\s[^<>]{{0,80}})?/?>", " ", text)
    text = re.sub(rf"(?i)</?(?:{_VERDICT_TAG})>", "\n", text)
    return re.sub(r"<([A-Za-z][\w-]{0,30})(?:\s[^<>]{0,80})?>[^<]*</\1>", " ", text)  # any other tag: a quotation


_LONGEST_QUOTATION = 4000  # a mark that is closed no sooner was no opening one
_PAIRS = {
    '"': '"',
    "'": "'",
    "\u201c": "\u201d",
    "\u2018": "\u2019",
    "\u201e": "\u201c\u201d",
    "\u00ab": "\u00bb",
    "\u300c": "\u300d",
    "\u300e": "\u300f",
}


def _without_quotations(text: str) -> str:
    """Drop quoted spans, but for those that hold a label and nothing else: judges do put their verdict in quotes."""
    kept: list[str] = []
    position = 0
    none_before: dict[str, int] = {}  # by closing mark, up to where there is none: keeps this linear
    opening = re.compile(r"(?<![^\W_])[\"'\u2018](?=\S)|[\u201c\u201e\u00ab\u300c\u300e]")
    while found := opening.search(text, position):
        closes = _PAIRS[found.group()]
        straight = closes in "\"'\u2019"
        after = r"(?![^\W_])" if straight else ""
        before = r"(?<=\S)" if straight else ""
        end = found.end() + _LONGEST_QUOTATION
        start = max(found.end(), none_before.get(closes, 0))
        closing = re.compile(rf"{before}[{closes}]{after}").search(text, start, end) if start < end else None
        if closing is None:
            none_before[closes] = max(end - 1, start)
            kept.append(text[position : found.end()])
            position = found.end()
            continue
        inside = text[found.end() : closing.start()]
        only_label = re.fullmatch(rf"\W*{LABEL}\W*", inside)
        kept.append(text[position : found.start()])
        kept.append(f" {inside.strip()} " if only_label else "\ue010")  # a stand-in: the sentence goes on around it
        position = closing.end()
    return "".join(kept) + text[position:]
