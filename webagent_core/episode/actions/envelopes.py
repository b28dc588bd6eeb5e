"""Where in an answer the action stands: its envelope, and what of the answer is thought."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from webagent_core.episode.actions.action import Action, FormatError, Unreadable, show
from webagent_core.episode.actions.calls import Arguments

# What may stand beside a call without meaning anything: blanks, markdown, end-of-turn tokens, comments. Repetitions in
# the patterns of this module are possessive (*+) or bounded, so that no input makes a match go back and try again.
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"
_COMMENT = "#(?:(?!</?think>|</action>|```)[^\n])*+"
_BESIDE = rf"[;.*{_INVISIBLE}]|`(?!``)|<\|[^|<>\n]{{1,40}}\|>|</s>|{_COMMENT}"
_NOISE = re.compile(rf"(?:\s|{_BESIDE})*+", re.IGNORECASE)

_ENVELOPES = {  # in order of preference, with what must follow the call
    "tag": re.compile(rf"(?:\s|{_BESIDE})*+(?:</(?:action|tool_call)>|\Z)", re.IGNORECASE),
    "line": re.compile(rf"(?:[^\S\n]|{_BESIDE})*+(?:\n|\Z)", re.IGNORECASE),
    "fence": re.compile(rf"(?:\s|{_BESIDE})*+(?:```|\Z)", re.IGNORECASE),
    "whole": re.compile(rf"(?:\s|{_BESIDE})*+\Z", re.IGNORECASE),
}
_MARKERS = (  # of envelopes and thoughts; CALL is the beginning of a call
    "(?P<think><think>)|(?P<think_end></think>)|(?P<tag><(?:TAGS)>)|(?P<fence>`{3,}+)"
    r"|(?P<line>(?:^|(?<=</think>))[ \t*>-]*+action\**+[ \t]*+[:\uff1a]\**+)|(?P<stray>^[ \t*>-]*+`?)(?=CALL)"
)
_THINK_END = re.compile("</think>", re.IGNORECASE)
_THINK_TAG = re.compile("</?think>", re.IGNORECASE)
_THOUGHT_WORD = re.compile(r"[ \t*]*+thought\**+[ \t]*+[:\uff1a]\**+", re.IGNORECASE)
_BEFORE_CALL = re.compile(r"\s*+[*`]{0,2}+\s*+")
_FENCE_LANGUAGE = re.compile(r"[a-z]*+\s*+", re.IGNORECASE)
_MOST_CALLS = 100  # an answer with more is no answer; reading on would only take time


class Call(NamedTuple):
    """A call as it stands in the answer, its arguments not yet interpreted."""

    envelope: str  # a key of _ENVELOPES, or "stray": a line that begins with a call, in no envelope
    name: str  # "" for an object of JSON in a grammar that has other calls too
    arguments: Arguments
    start: int  # of the envelope
    end: int  # of the call
    problem: Unreadable | None


class Dialect(NamedTuple):
    """A notation of calls."""

    call: re.Pattern  # the beginning of a call by any name
    own_call: re.Pattern  # the same by a name that the dialect knows
    markers: re.Pattern
    read: Callable[[str, int], tuple[Arguments, int]]
    build: Callable[[str, Arguments], Action]
    example: str


def make_dialect(
    call: str, names: list[str], read: Callable, build: Callable, example: str, tags: str = "action"
) -> Dialect:
    own_call = call.replace("NAME", "|".join(names))
    markers = _MARKERS.replace("CALL", own_call.replace("?P<name>", "?:")).replace("TAGS", tags)
    patterns = [call.replace("NAME", r"[a-z_]\w*+"), own_call, markers]
    return Dialect(*(re.compile(pattern, re.IGNORECASE | re.MULTILINE) for pattern in patterns), read, build, example)


def parse(text: str, dialect: Dialect, finish_reason: str | None, think_prefilled: bool) -> Action | FormatError:
    """Read the one action of an answer; see `parse_action`."""
    try:
        if not text.strip(_INVISIBLE + " \t\r\n"):
            raise Unreadable("empty", f"the answer is empty; write one action, such as {dialect.example}")
        call = choose(find_calls(text, dialect, think_prefilled), text, dialect)
        return dialect.build(call.name, call.arguments)
    except Unreadable as problem:
        if problem.kind == "no_action" and finish_reason == "length":
            return FormatError("truncated", "the token limit cut the answer before its action; think more briefly")
        return FormatError(problem.kind, problem.message)


def thought(text: str, dialect: Dialect) -> str:
    """What an answer says before its action, without the tags and words that mark it as thought. An answer that holds
    no action is thought from end to end."""
    try:
        said = text[: choose(find_calls(text, dialect, False), text, dialect).start]
    except Unreadable:
        said = text
    said = _THINK_TAG.sub("", said).strip()
    marked = _THOUGHT_WORD.match(said)
    return said[marked.end() :].strip() if marked else said


def find_calls(text: str, dialect: Dialect, in_thought: bool) -> list[Call]:
    """All calls outside thoughts, in the order of the text. Calls inside the quotes of another are not seen."""
    calls: list[Call] = []
    position, start, fence_open, answer_begins = 0, 0, False, True
    while True:
        envelope, head = "whole", None
        if in_thought:
            closing = _THINK_END.search(text, position)
            if closing is None:
                raise Unreadable("unclosed_think", "the thought is not closed; write </think>, then the action")
            position, in_thought, answer_begins = closing.end(), False, True
        if answer_begins:
            head = dialect.call.match(text, _NOISE.match(text, position).end())
            start, answer_begins = head.start() if head else position, False
        if head is None:
            marker = dialect.markers.search(text, position)
            if marker is None:
                return calls
            envelope, start, position = str(marker.lastgroup), marker.start(), marker.end()
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
            calls.append(Call(envelope, head["name"] or "", arguments, start, position, None))
        except Unreadable as problem:
            position = problem.position
            calls.append(Call(envelope, head["name"] or "", [], start, position, problem))
        if position >= len(text):
            return calls
        if len(calls) > _MOST_CALLS:
            raise Unreadable("multiple_actions", f"over {_MOST_CALLS} actions; write exactly one")


def choose(calls: list[Call], text: str, dialect: Dialect) -> Call:
    """The call in the preferred envelope, if it is the last call of the answer and alone in its envelope."""
    order = list(_ENVELOPES)
    enveloped = [call for call in calls if call.envelope in order]
    if not enveloped:
        raise Unreadable("no_action", f"no action found; end the answer with a line such as Action: {dialect.example}")
    call = min(enveloped, key=lambda call: order.index(call.envelope))
    rest = text[call.end : call.end + 200].split("\n")[0].strip()
    alone = call is calls[-1]
    if alone and call.problem:
        raise call.problem
    if alone and _ENVELOPES[call.envelope].match(text, call.end):
        return call
    if not alone or dialect.own_call.search(rest):
        raise Unreadable("multiple_actions", f"more than one action; write exactly one, such as {dialect.example}")
    if call.envelope == "whole":
        raise Unreadable("no_action", f"the action stands in a sentence; write a line Action: {dialect.example}")
    raise Unreadable("bad_arguments", f"{show(rest)} follows the action; only a comment may")
