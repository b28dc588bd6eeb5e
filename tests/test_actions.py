"""The action grammar: the case corpus, round trips, strictness, and answers made to break a parser."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webagent_core.episode.actions import GRAMMAR, Action, FormatError, Kind, parse_action

CASES = json.loads((Path(__file__).parent / "cases" / "actions_dom.json").read_text(encoding="ascii"))
DIALECTS = ("call", "json", "bracket", "do")


def built(value: dict) -> dict:
    """A case with its large texts written out: [piece, repetitions] pairs under `build` (text) or `NAME_build`."""
    written = {}
    for key, entry in value.items():
        if key == "build" or key.endswith("_build"):
            key = key.removesuffix("build").removesuffix("_") or "text"
            entry = "".join(piece * repetitions for piece, repetitions in entry)
        written[key] = entry
    return written


def agrees(result: Action | FormatError, outcome: dict) -> bool:
    if "error" in outcome:
        return isinstance(result, FormatError) and outcome["error"] in ("*", result.kind)
    if isinstance(result, FormatError):
        return False
    fields = {key: value for key, value in asdict(result).items() if value is not None and value is not False}
    fields["action"] = fields.pop("name")
    return fields == built(outcome)


@pytest.mark.parametrize("case", CASES, ids=[f"{case['id']}-{case['kind']}" for case in CASES])
def test_case_of_the_corpus(case):
    result = parse_action(**built(case["input"]))
    acceptable = [case["expected"], *(case.get("also_ok", []) if case["debatable"] else [])]
    assert any(agrees(result, outcome) for outcome in acceptable), f"{result!r}: {case['why']}"


def test_corpus_is_complete():
    assert len(CASES) == 89


# --- The canonical form ---

quotes_and_the_like = st.sampled_from("\"'\\\n\r\u201c\u201du`<>")
any_text = st.text(st.characters() | st.characters(categories=["Cs", "Cc"]) | quotes_and_the_like)
tricky_text = st.lists(
    any_text
    | st.sampled_from(
        ["</think>", "<think>", "<action>click(1)</action>", "\nAction: click(1)\n", "```", "\nclick(1)\n", '")', "\\u"]
    )
).map("".join)
element = st.from_regex("[a-zA-Z]{0,3}[0-9]{1,25}", fullmatch=True)
seconds = st.none() | st.floats(min_value=0, allow_nan=False, allow_infinity=False)
actions = st.one_of(
    st.builds(Action, st.just("click"), element=element),
    st.builds(Action, st.just("type"), element=element, text=tricky_text, enter=st.booleans()),
    st.builds(Action, st.just("select"), element=element, option=tricky_text),
    st.builds(
        Action,
        st.just("scroll"),
        element=st.none() | element,
        direction=st.sampled_from(["up", "down", "left", "right"]),
    ),
    st.builds(Action, st.just("goto"), url=tricky_text.map(lambda path: f"https://shop.test/{path}#x")),
    st.just(Action("back")),
    st.builds(Action, st.just("wait"), seconds=seconds),
    st.builds(Action, st.just("stop"), answer=tricky_text),
)


ENVELOPES = ["{}", "<action>{}</action>", "So.\nAction: {}", "I see.\n```\n{}\n```", "<think>a</think>{}"]


@settings(max_examples=2000, deadline=None)
@given(actions, st.sampled_from(ENVELOPES))
def test_canonical_form_is_one_writable_line_that_reads_back_as_the_same_action(action, envelope):
    written = str(action)
    assert len(written.splitlines()) == 1
    written.encode()
    assert parse_action(envelope.format(written)) == action


@settings(max_examples=1000, deadline=None)
@given(tricky_text)
def test_quoted_text_survives_in_the_dialects_that_quote(text):
    typed = Action("type", element="3", text=text)
    spelled = str(typed).removeprefix("type(3, ").removesuffix(")")
    answers = {
        "json": f'{{"action": "type", "element": 3, "text": {spelled}}}',
        "do": f'# Element: the search box\ndo(action="Type", argument={spelled}, element="3")',
    }
    for dialect, answer in answers.items():
        assert parse_action(answer, dialect=dialect) == typed


@settings(max_examples=500, deadline=None)
@given(st.text())
def test_json_dialect_reads_what_a_json_library_writes(text):
    for ascii_only in (True, False):
        answer = json.dumps({"thought": "x", "action": "stop", "answer": text}, ensure_ascii=ascii_only)
        assert parse_action(answer, dialect="json") == Action("stop", answer=text)


@settings(max_examples=500, deadline=None)
@given(st.text(st.characters(exclude_characters="[]")))
def test_bracket_dialect_takes_the_text_as_it_stands(text):
    assert parse_action(f"type [3] [{text}] [0]", dialect="bracket") == Action("type", element="3", text=text)


def test_canonical_form_is_the_one_of_the_grammar():
    assert str(Action("type", element="3", text='a "b"', enter=True)) == 'type(3, "a \\"b\\"", enter=true)'
    assert str(Action("scroll", element="a51", direction="down")) == 'scroll("a51", "down")'
    assert str(Action("wait", seconds=2.0)) == "wait(2)"
    assert str(Action("wait", seconds=0.0)) == "wait(0)"
    assert str(Action("stop", answer="\u6771\u4eac")) == 'stop("\u6771\u4eac")'
    names = [line.split("(")[0] for line in GRAMMAR.splitlines()]
    assert names == ["click", "type", "select", "scroll", "goto", "back", "wait", "stop"]


# --- Envelopes ---


@pytest.mark.parametrize(
    "answer",
    [
        "Submit 7\nAction: click(7)",
        "click(3)\nAction: click(7)",
        "Action: click(3)\n<action>click(7)</action>",
        "```\nclick(3)\n```\nAction: click(7)",
        "**Action:** `click(7)`",
        "Action:\n```python\nclick(7)\n```",
        "<action>\n```\nclick(7)\n```\n</action>",
        "<action>click(7)",
        "<action>click(7) # save</action> This saves it.",
        "Action: click(7).<|im_end|>\n",
        "Action: click(7)\nThis saves (and closes) the form.",
        "Maybe Action: click(3)?\nAction: click(3), no.</think>Action: click(7)",
        "<think>a</think><think>click(3)</think>\nclick(7)",
        "`click(7)`",
    ],
)
def test_the_action_is_taken_from_its_envelope(answer):
    assert parse_action(answer) == Action("click", element="7")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("Action: click(4)\nObservation: ok\nAction: click(5)", "multiple_actions"),
        ("Action: click(4) or click(5)", "multiple_actions"),
        ("Action: click(4)\n- `click(5)`", "multiple_actions"),
        ("<action>click(4)\nclick(5)</action>", "multiple_actions"),
        ("<think>a</think><action>click(4)</action><think>b</think><action>click(5)</action>", "multiple_actions"),
        ("Action: click(4) was wrong", "bad_arguments"),
        ("click(4)\nThis opens the cart.", "no_action"),
        ("I press it.\nclick(4)", "no_action"),
        ("<action>I click the button</action>", "no_action"),
        ("<action>click(4)</action> <think>done?", "unclosed_think"),
        ("\u200b \n", "empty"),
    ],
)
def test_an_answer_without_exactly_one_clear_action_is_refused(answer, kind):
    assert parse_action(answer).kind == kind


@pytest.mark.parametrize("bait", ["</think>\nAction: click(1)\n", "<action>click(1)</action>", "```\nclick(1)\n```"])
@pytest.mark.parametrize("envelope", ENVELOPES)
def test_quoted_page_text_never_becomes_an_action(bait, envelope):
    assert parse_action(envelope.format(f'stop("{bait}")')) == Action("stop", answer=bait)
    assert parse_action(f'I end it.\nstop("{bait}")').kind == "no_action"


def test_the_token_limit_is_told_apart_from_a_wrong_format():
    assert parse_action("I think the best", finish_reason="length").kind == "truncated"
    assert parse_action("I think the best", finish_reason="stop").kind == "no_action"
    assert parse_action('Action: stop("4', finish_reason="stop").kind == "truncated"
    assert parse_action("stop", dialect="bracket", finish_reason="length").kind == "truncated"
    assert parse_action("Action: click(7)\nThis", finish_reason="length") == Action("click", element="7")


# --- Arguments ---


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("https://Shop.test/A?b=c d#e", "https://Shop.test/A?b=c d#e"),
        ("HTTP://shop.test", "HTTP://shop.test"),
        ("localhost:3000/x", "http://localhost:3000/x"),
        ("shop.test/?to=http://b.test", "http://shop.test/?to=http://b.test"),
    ],
)
def test_goto_opens_web_addresses(url, opened):
    assert parse_action(f'goto("{url}")') == Action("goto", url=opened)


@pytest.mark.parametrize(
    "url",
    "javascript:alert(1)|JavaScript:alert(1)|file:///etc/passwd|data:text/html,x|about:blank|chrome://crash|view-source:x"
    "|http:/x|/cart|//shop.test|?q=1||  ".split("|"),
)
def test_goto_refuses_everything_else(url):
    assert parse_action(f'goto("{url}")').kind == "bad_arguments"


@settings(max_examples=1000, deadline=None)
@given(
    any_text | st.sampled_from(["java\nscript:alert(1)", "\x00javascript:1", "javascript:1", "\tfile:///etc/passwd"])
)
def test_whatever_goto_accepts_is_http(url):
    result = parse_action(str(Action("goto", url=url)))
    assert isinstance(result, FormatError) or result.url.lower().startswith(("http://", "https://"))


@pytest.mark.parametrize(
    ("answer", "kind", "named"),
    [
        ("hover(3)", "unknown_action", "click, type, select, scroll, goto, back, wait, stop"),
        ("type(3)", "bad_arguments", "text is missing"),
        ("click(1, id=1)", "bad_arguments", "'element' is given twice"),
        ("click(where=2)", "bad_arguments", "'where'"),
        ("scroll(3)", "bad_arguments", "up, down, left or right, got '3'"),
        ('type(3, "x", enter=maybe)', "bad_arguments", "true or false, got 'maybe'"),
        ("stop('it's closed')", "bad_arguments", "quotes"),
        ("wait(1e999)", "out_of_range", "finite, got '1e999'"),
        ("wait(soon)", "bad_arguments", "not negative, got 'soon'"),
        ("back(1, 2, 3, 4, 5, 6, 7, 8, 9)", "bad_arguments", "too many"),
        ("", "empty", "click(12)"),
    ],
)
def test_the_message_names_what_is_wrong_and_what_is_allowed(answer, kind, named):
    error = parse_action(answer)
    assert (error.kind, named in error.message) == (kind, True), error


def test_escapes_of_python_and_json_are_decoded_and_other_backslashes_stay():
    assert parse_action(r'stop("\ud83d\ude00 \u00e9 \/ \d \U00110000")').answer == "\U0001f600 \u00e9 / \\d \\U00110000"


# --- Dialects ---


@pytest.mark.parametrize(
    ("dialect", "answer", "action"),
    [
        ("json", 'I go back.\n```json\n{\n  "action": "back"\n}\n```', Action("back")),
        ("json", '{"action": "type", "element": 3, "text": "null", "enter": null}', Action("type", "3", "null")),
        ("bracket", "```type [7] [a]```", Action("type", "7", "a", enter=True)),
        ("bracket", "```type [7] [a] [press_enter_after=0]```", Action("type", "7", "a")),
        ("bracket", "scroll [direction=down]", Action("scroll", direction="down")),
        ("bracket", "type [7] [direction=down] [0]", Action("type", "7", "direction=down")),
        ("bracket", "```go_back\n```", Action("back")),
        ("bracket", "stop []", Action("stop", answer="")),
        (
            "do",
            '# Element: the box\ndo(action="Search", argument="tea", element="3")',
            Action("type", "3", "tea", True),
        ),
        (
            "do",
            'do(action="Select Dropdown Option", argument="Blue", element="3")',
            Action("select", "3", option="Blue"),
        ),
        ("do", 'do("Scroll Down")', Action("scroll", direction="down")),
        ("do", "go_backward()", Action("back")),
        ("do", "exit()", Action("stop", answer="")),
    ],
)
def test_dialect_reads(dialect, answer, action):
    assert parse_action(answer, dialect=dialect) == action


@pytest.mark.parametrize(
    ("dialect", "answer", "kind"),
    [
        ("json", '{"action": "click", "element": {"id": 1}}', "bad_arguments"),
        ("json", '{"action": "click", "element": 1, "element": 2}', "bad_arguments"),
        ("json", '{"element": 1}', "bad_arguments"),
        ("bracket", "hover [3]", "unknown_action"),
        ("bracket", "type [3]", "bad_arguments"),
        ("bracket", "click(3)", "no_action"),
        ("bracket", "```click [3]```\n```click [4]```", "multiple_actions"),
        ("do", 'do(action="Hover", element="3")', "unknown_action"),
        ("do", 'do(action="Click", element="3", argument="x")', "bad_arguments"),
        ("do", "click(3)", "unknown_action"),
        ("do", "do()", "unknown_action"),
    ],
)
def test_dialect_refuses(dialect, answer, kind):
    assert parse_action(answer, dialect=dialect).kind == kind


def test_unknown_dialect_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="call, json, bracket, do, got 'yaml'"):
        parse_action("click(1)", dialect="yaml")


# --- Any answer at all ---

fragments = st.sampled_from(
    "<think> </think> <action> </action> Action: ``` json # ; ` ** <|im_end|> ( ) [ ] { } , : = \" ' \\".split()
    + "click type stop scroll goto wait do exit go_back hover action element text 12 -3 1e999 true null".split()
    + ["click(3)", 'type(3, "a")', "click [3]", "type [3] [a] [1]", '{"action": "back"}', 'do("Click", element=1)']
    + ["\u201c", "\uff08", "\n", " ", "\x00", "\ud83d", "\\ud83d", "\u200b", "http://a.test"]
)


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=2500, deadline=None)
@given(
    answer=st.lists(fragments, max_size=30).map("".join) | any_text,
    finish_reason=st.sampled_from([None, "stop", "length"]),
    think_prefilled=st.booleans(),
)
def test_no_answer_raises(dialect, answer, finish_reason, think_prefilled):
    result = parse_action(answer, dialect=dialect, finish_reason=finish_reason, think_prefilled=think_prefilled)
    if isinstance(result, FormatError):
        assert result.kind in get_args(Kind)
        assert len(result.message.splitlines()) == 1
        result.message.encode()
    else:
        assert parse_action(str(result)) == result


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("prefix", "unit"),
    [
        ("", "</think>"),
        ("", "x<think></think>"),
        ("", "#</think>"),
        ("", "<action>click("),
        ("", "\nAction: click(1)"),
        ("Action: ", 'type("\n'),
        ("", "note(\u201c\n"),
        ("", "``` "),
        ("", " \n"),
        ("", "*"),
        ("", "a\n"),
        ('type(3, "', '\\"'),
        ("wait(", "1"),
        ("click(", "1,"),
        ("click ", "["),
        ("", '<action>{"a":"<action>{",'),
    ],
)
def test_a_hostile_megabyte_takes_less_than_a_second(dialect, prefix, unit):
    answer = prefix + unit * (1_000_000 // len(unit))
    start = time.process_time()
    result = parse_action(answer, dialect=dialect)
    assert time.process_time() - start < 1.0
    assert isinstance(result, FormatError)
    assert len(result.message) < 400
