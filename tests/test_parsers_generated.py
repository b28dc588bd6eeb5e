"""Ten thousand generated answers for each parser: nothing raises, noise is no action, and what is quoted comes back.

Each example that hypothesis draws is put into ten frames (envelopes, thoughts, other answers around it), so a thousand
examples are ten thousand answers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from webagent_core.episode.actions import (
    Action,
    FormatError,
    Kind,
    coordinate_thought_of,
    parse_action,
    parse_coordinate_action,
    thought_of,
)
from webagent_core.episode.contexts.webgym import memory_of

FRAMES = [
    "{}",
    "<action>{}</action>",
    "I see.\nAction: {}",
    "So.\n```python\n{}\n```",
    "<think>{}</think>\nAction: click(3)",
    "Thought: {}\nMemory: none\nAction: {}",
    "<think>no</think><action>\n```\n{}\n```</action>",
    "Memory: {}\n<tool_call>{}</tool_call>",
    "**Action:** `{}`<|im_end|>\n",
    'type(3, "{}")\n# {}',
]
assert len(FRAMES) == 10
A_THOUSAND = settings(max_examples=1000, deadline=None)
DIALECTS = ("call", "json", "bracket", "do")

# Pieces of both grammars, of what stands around them, and of what pages and models put in between.
envelopes = (
    "<think> </think> <action> </action> <tool_call> </tool_call> Action: Thought: Memory: action\uff1a ``` ```json"
)
names = "click type select scroll goto back wait stop finished drag hotkey double_click do exit go_back hover"
marks = "( ) [ ] { } , : = \" ' \\ # ; ` ** . \u201c \u201d \uff08 \uff09 \uff0c <|im_end|> <|box_start|> </s>"
values = "12 -3 1e999 0x1 true null element text enter=true start_box='(1,2)' (500,300) [1,2,3,4] https://a.test 1e5"
calls = ["click(3)", 'type(3, "a")', "click [3]", "type [3] [a] [1]", '{"action": "back"}', 'do("Click", element=1)']
points = ["click(start_box='(1,2)')", "drag(1, 2, 3, 4)", "type(content='a\\n')", "hotkey(key='ctrl c')", "finished()"]
odd = [
    "\n",
    "\r\n",
    " ",
    "\t",
    "\x00",
    "\x1b",
    "\u2028",
    "\ufeff",
    "\u200b",
    "\u202e",
    "\ud83d",
    "\\ud83d",
    "\\u0000",
    "\u0130",
]
pieces = st.sampled_from([*" ".join([envelopes, names, marks, values]).split(), *calls, *points, *odd])
answers = st.lists(pieces | st.text(max_size=8), max_size=16).map("".join) | st.text(max_size=60)


def framed(piece: str) -> list[str]:
    return [frame.replace("{}", piece) for frame in FRAMES]


def check(result: Action | FormatError, again: Callable[[str], Action | FormatError]) -> None:
    """An action that its own writing gives back, or a short reason on one line that can be written to a file."""
    if isinstance(result, Action):
        assert again(str(result)) == result and len(str(result).splitlines()) == 1
        return
    assert isinstance(result, FormatError) and result.kind in get_args(Kind)
    assert len(result.message.splitlines()) == 1 and len(result.message) < 500
    result.message.encode()


# --- Anything at all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
@A_THOUSAND
@given(answers)
def test_no_answer_breaks_the_grammar_of_elements(dialect, piece):
    for answer in framed(piece):
        check(parse_action(answer, dialect=dialect), parse_action)


@A_THOUSAND
@given(answers, st.sampled_from(["norm1000", "norm1", "pixel", "resized_abs"]))
def test_no_answer_breaks_the_grammar_of_points(piece, space):
    def parse(answer: str) -> Action | FormatError:
        return parse_coordinate_action(answer, space=space, image=(640, 480))

    for answer in framed(piece):
        result = parse(answer)
        check(result, parse)
        if isinstance(result, Action) and result.x is not None:
            widest = {"norm1000": 1000, "norm1": 1, "pixel": 639.999, "resized_abs": 700}[space]
            assert 0 <= result.x <= widest and 0 <= (result.x2 or 0) <= widest


@A_THOUSAND
@given(answers)
@example("Thought: <think>Thought: a</think>")
def test_no_answer_breaks_the_readers_of_thoughts(piece):
    for answer in framed(piece):
        for parse, thought in ((parse_action, thought_of), (parse_coordinate_action, coordinate_thought_of)):
            said = thought(answer)
            bare = re.sub("</?think>", "", answer, flags=re.IGNORECASE)
            assert said == said.strip() and said in bare
            if isinstance(parse(answer), FormatError):
                continue
            assert len(said) < len(answer)  # the action itself is no thought


@A_THOUSAND
@given(answers)
def test_no_answer_breaks_the_reader_of_memories(piece):
    for answer in framed(piece):
        memory = memory_of(answer)
        if memory is None:
            assert not re.search(r"^memory:", answer, re.IGNORECASE | re.MULTILINE)
            continue
        assert memory == memory.strip() and memory in answer
        assert not re.search(r"\n(action|thought):", memory, re.IGNORECASE) and "<action>" not in memory


# --- Noise ------------------------------------------------------------------------------------------------------------

# Words of pages and of models, names of actions among them, and every envelope, but no name with a bracket behind it.
words = [
    "click the",
    "I click it",
    "type,",
    "Submit 7 <button>",
    "(3)",
    "[7]",
    "{3}",
    '"back"',
    "Price: 12",
    "clicked (3)",
]
words += ["stop it", "wait,", 'say "click"', "typewriter(4)", "xclick(4)", "click_here(4)", "\u043elick(4)", "{'a': 1}"]
noise = st.lists(st.sampled_from([*envelopes.split(), *words, *odd, "1", "-", "."]), max_size=14).map(" ".join)


@A_THOUSAND
@given(noise)
def test_noise_is_no_action(piece):
    frames = [frame for frame in FRAMES if "(3" not in frame]
    assert len(frames) == 8
    for answer in [piece, piece + "\n", *(frame.replace("{}", piece) for frame in frames)]:
        assert isinstance(parse_action(answer), FormatError), answer
        assert isinstance(parse_coordinate_action(answer), FormatError), answer
        for dialect in ("json", "do"):
            assert isinstance(parse_action(answer, dialect=dialect), FormatError), answer


# --- Quoted text ------------------------------------------------------------------------------------------------------

ENVELOPES = [
    "{}", "<action>{}</action>", "Look.\nAction: {}", "Look.\n```\n{}\n```", "<think>click(1)</think>{}",
    "<think>\nAction: click(1)\n</think>\n<action>{}</action>", "**Action:** {}", "Action: {} # done",
    "Thought: a\nMemory: b\nAction: {}", "<action>```{}```</action>",
]  # fmt: skip
quoted = st.lists(pieces | st.text(max_size=8), max_size=10).map("".join)


@A_THOUSAND
@given(quoted)
def test_quoted_text_comes_back_as_it_was(text):
    actions = [Action("type", element="3", text=text), Action("select", element="a4", option=text)]
    actions.append(Action("stop", answer=text))
    for number, envelope in enumerate(ENVELOPES):
        action = actions[number % 3]
        assert parse_action(envelope.replace("{}", str(action))) == action
        typed = Action("type", text=text, enter=bool(number % 2))
        assert parse_coordinate_action(envelope.replace("{}", str(typed))) == typed


@A_THOUSAND
@given(
    st.lists(
        st.sampled_from("I see the red (blue) button: press it. Price 12, \"so\" 'be' [it] - yes\n".split()), min_size=1
    )
)
def test_a_thought_and_a_memory_come_back_as_they_were(said):
    text = " ".join(said)
    calls = [("Action: click(3)", thought_of), ("Action: click(1, 2)", coordinate_thought_of)]
    for call, thought in calls:
        for before in ("", "Thought: ", "**Thought:** ", "thought\uff1a"):
            assert thought(f"{before}{text}\n{call}") == text
        assert thought(f"<think>{text}</think>{call}") == text
    for call in ("Action: click(3)", "<action>click(3)</action>", "**Action:** click(3)", ""):
        assert memory_of(f"Thought: hm\nMemory: {text}\n{call}") == text
        assert memory_of(f"{text}\n{call}") is None


# --- Length -----------------------------------------------------------------------------------------------------------

PARSERS: dict[str, Callable[[str], object]] = {
    **{
        f"elements, {dialect}": lambda text, dialect=dialect: parse_action(text, dialect=dialect)
        for dialect in DIALECTS
    },
    "points": parse_coordinate_action,
    "thoughts": thought_of,
    "thoughts at points": coordinate_thought_of,
    "memories": memory_of,
}


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=60, deadline=None)
@given(st.lists(pieces, max_size=3).map("".join), st.lists(pieces, min_size=1, max_size=3).map("".join))
def test_long_answers_take_time_in_proportion(parser, start, unit):
    """A fifth of a megabyte of any unit: what went back and tried again at every place would take minutes."""
    answer = start + unit * (200_000 // len(unit))
    began = time.process_time()
    PARSERS[parser](answer)
    assert time.process_time() - began < 0.8


@pytest.mark.parametrize(
    "unit", ["Memory:", "\nMemory:", "\nMemory: a\nThought:", "* ", "\n\t*", "memory*", "\n<action>"]
)
def test_a_hostile_megabyte_of_memories_takes_less_than_a_second(unit):
    for answer in (unit * (1_000_000 // len(unit)), "Memory:" + unit * (1_000_000 // len(unit))):
        began = time.process_time()
        memory_of(answer)
        thought_of(answer)
        assert time.process_time() - began < 2.0
