"""Actions at points: the case corpus, its relatives, every space and back, and answers made to break a parser."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_actions import built
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as processor_resize

from webagent_core.episode.actions import (
    COORDINATE_GRAMMAR,
    Action,
    CoordinateSpace,
    FormatError,
    Kind,
    coordinate_thought_of,
    parse_action,
    parse_coordinate_action,
    smart_resize,
    thought_of,
    to_css,
)


def cases(name: str) -> list:
    found = json.loads((Path(__file__).parent / "cases" / f"{name}.json").read_text(encoding="ascii"))
    return [pytest.param(case, id=f"{case['id']}-{case['kind']}") for case in found]


def agrees(result: Action | FormatError, outcome: dict) -> bool:
    if "error" in outcome:
        return isinstance(result, FormatError) and outcome["error"] in ("*", result.kind)
    if isinstance(result, FormatError):
        return False
    fields = {key: value for key, value in asdict(result).items() if value is not None and value is not False}
    name = fields.pop("name")
    if name == "drag":  # the corpus counts the points of a drag
        fields["x1"], fields["y1"] = fields.pop("x"), fields.pop("y")
    if "keys" in fields:
        fields["keys"] = list(fields["keys"])
    fields["action"] = "finished" if name == "stop" else name
    return fields == {key: value for key, value in outcome.items() if value is not None}


@pytest.mark.parametrize("case", cases("actions_coord"))
def test_case_of_the_corpus(case):
    given_input = built(case["input"])
    result = parse_coordinate_action(**given_input | {"image": tuple(given_input["image"])})
    acceptable = [case["expected"], *(case.get("also_ok", []) if case["debatable"] else [])]
    assert any(agrees(result, outcome) for outcome in acceptable), f"{result!r}: {case['why']}"


def test_corpus_is_complete():
    assert len(cases("actions_coord")) == 71 and len(cases("coords_scaling")) == 16


# --- Relatives of the cases ---


@pytest.mark.parametrize(
    "call",
    [
        "click(start_box='(100,200)')",
        'click(start_box="(100, 200)")',
        "click(start_box=(100,200))",
        "click(start_box=[100, 200])",
        "click(start_box='<|box_start|>(100,200)<|box_end|>')",
        "click(start_box=<|box_start|>(100,200)<|box_end|>)",
        "click(<|box_start|>(100,200)<|box_end|>)",
        "click(start_box='<|box_start|>[90,190,110,210]<|box_end|>')",
        "click(start_box='[110,210,90,190]')",
        "click(point='<point>100 200</point>')",
        "click(point=<point>100 200</point>)",
        "click(point='<point>(100,200)</point>')",
        "click(start_box='<bbox>90 190 110 210</bbox>')",
        "click((100,200))",
        "click('(100,200)')",
        "click('100 200')",
        "click(100, 200)",
        "CLICK(y=200, x=100)",
        "click(coordinate=[100,200])",
        "left_click(x=1e2, y=200.0)",
        "click(start_box='\uff08\uff11\uff10\uff10\uff0c200\uff09')",
    ],
)
@pytest.mark.parametrize("envelope", ["Action: {}", "<think>no</think><action>{}</action>", "```\n{}\n```", "{}"])
def test_every_spelling_of_a_point_is_the_same_point(call, envelope):
    assert parse_coordinate_action(envelope.format(call)) == Action("click", x=100, y=200)


@pytest.mark.parametrize(
    ("arguments", "action"),
    [
        ('{"action": "left_click", "coordinate": [10, 20]}', Action("click", x=10, y=20)),
        ('{"action": "right_click", "coordinate": [10, 20.5]}', Action("right_click", x=10, y=20.5)),
        ('{"action": "type", "text": "a\\n"}', Action("type", text="a", enter=True)),
        ('{"action": "type", "text": "</tool_call> {"}', Action("type", text="</tool_call> {")),
        ('{"action": "key", "keys": ["ctrl", "c"]}', Action("hotkey", keys=("ctrl", "c"))),
        ('{"action": "scroll", "pixels": -300, "coordinate": null}', Action("scroll", direction="down")),
        ('{"action": "scroll", "pixels": 300, "coordinate": [1, 2]}', Action("scroll", x=1, y=2, direction="up")),
        ('{"action": "wait", "time": 2}', Action("wait", seconds=2)),
        ('{"action": "terminate", "status": "success"}', Action("stop", answer="")),
        ('{"action": "answer", "text": "42"}', Action("stop", answer="42")),
    ],
)
def test_a_tool_call_of_qwen_is_read(arguments, action):
    wrapped = f'<think>x</think>\n<tool_call>\n{{"name": "computer_use", "arguments": {arguments}}}\n</tool_call>'
    assert parse_coordinate_action(wrapped) == action
    assert parse_coordinate_action(f"Action: {arguments}") == action


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("Action: click(12)", "bad_arguments"),
        ("Action: click(1,2,3,4)", "bad_arguments"),
        ("Action: click(start_box='(1;2)')", "bad_arguments"),
        ("Action: click(start_box='(1,,2)')", "bad_arguments"),
        ("Action: click(start_box='(1 000,2)')", "bad_arguments"),
        ("Action: click(start_box='1\u00b2,5')", "bad_arguments"),
        ("Action: click(start_box='(0x10,5)')", "bad_arguments"),
        ("Action: click(start_box='(inf,5)')", "bad_arguments"),
        ("Action: click(start_box='(1,2)', x=1, y=2)", "bad_arguments"),
        ("Action: click(x=1)", "bad_arguments"),
        ("Action: click(x=1, x=2, y=3)", "bad_arguments"),
        ("Action: click(start_box='(1,2)', button='right')", "bad_arguments"),
        ("Action: click()", "bad_arguments"),
        ("Action: drag(end_box='(1,2)')", "bad_arguments"),
        ("Action: drag(1, 2, 3)", "bad_arguments"),
        ("Action: type()", "bad_arguments"),
        ("Action: type(content=hello)", "bad_arguments"),
        ("Action: hotkey(key='ctrl-c')", "bad_arguments"),
        ("Action: hotkey(key='a b c d e f')", "bad_arguments"),
        ("Action: hotkey(key='\u00f6')", "bad_arguments"),
        ("Action: scroll(direction='sideways')", "bad_arguments"),
        ("Action: scroll(start_box='(1,2)', direction='')", "bad_arguments"),
        ("Action: wait(-1)", "bad_arguments"),
        ("Action: goto(url='javascript:alert(1)')", "bad_arguments"),
        ("Action: click(start_box='[900,1,1100,5]')", "out_of_range"),  # its middle is inside, one corner is not
        ("Action: click(x=1e999, y=1)", "out_of_range"),
        ("Action: drag(start_box='(1,2)', end_box='(1,2000)')", "out_of_range"),
        ("Action: hover(start_box='(1,2)')", "unknown_action"),
        ("Action: click(start_box='(1,2)')\nAction: click(start_box='(3,4)')", "multiple_actions"),
        ("Action: click(start_box='(1,2)') finished()", "multiple_actions"),
        ('Action: click(start_box=\'(1,2)\')\n{"action": "wait"}', "multiple_actions"),
        ('<tool_call>{"action": "wait"}</tool_call><tool_call>{"action": "wait"}</tool_call>', "multiple_actions"),
        ('<tool_call>{"action": "wait", "action": "wait"}</tool_call>', "bad_arguments"),
        ('<tool_call>{"arguments": ["wait"]}</tool_call>', "bad_arguments"),
        ('<tool_call>{"action": "left_click", "coordinate": [[1], 2]}</tool_call>', "bad_arguments"),
        ('<tool_call>{"action": "left_click", "coordinate": {"x": 1}}</tool_call>', "bad_arguments"),
        ('<tool_call>{"action": "left_click", "coordinate": [1, 2', "truncated"),
        ('<tool_call>{"action": "type", "text": "abc', "truncated"),
        ('<tool_call>{"action": "scroll", "pixels": 0}</tool_call>', "bad_arguments"),
        ('<tool_call>{"action": "triple_click", "coordinate": [1, 2]}</tool_call>', "unknown_action"),
        ('<tool_call>{"action": ' + "[" * 100_000, "bad_arguments"),
        ("<tool_call>" + '{"action":' * 20_000, "bad_arguments"),
        ("I click(start_box='(1,2)') now.", "no_action"),
        ("Next I would click(start_box='(1,2)')", "no_action"),
        ("click(start_box='(1,2)') opens it.", "no_action"),
        ("<think>Action: click(start_box='(1,2)')", "unclosed_think"),
    ],
)
def test_what_is_not_one_clear_action_is_refused_with_its_kind(answer, kind):
    result = parse_coordinate_action(answer)
    assert isinstance(result, FormatError) and result.kind == kind, result
    assert len(result.message.splitlines()) == 1 and len(result.message) < 500


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        ("ctrl + c", ("ctrl", "c")),
        ("ctrl++", ("ctrl", "+")),
        ("+", ("+",)),
        ("Return", ("enter",)),
        ("Page_Down", ("pagedown",)),
        ("ArrowLeft", ("left",)),
        ("cmd shift F5", ("meta", "shift", "f5")),
        ("alt ?", ("alt", "?")),
    ],
)
def test_keys_are_read_by_any_of_their_names(keys, read):
    assert parse_coordinate_action(f"Action: hotkey(key='{keys}')") == Action("hotkey", keys=read)


@pytest.mark.parametrize(
    ("call", "text", "enter"),
    [
        ("type(content='a\\n')", "a", True),
        ("type(content='a\n')", "a", True),
        ("type(content='a\\n\\n')", "a\n", True),
        ("type(content='a\\nb')", "a\nb", False),
        ("type(content='a\\n', enter=false)", "a\n", False),
        ("type(content='a', enter=true)", "a", True),
        ("type(content='')", "", False),
        ("type(content='a\\\\n')", "a\\n", False),
    ],
)
def test_a_last_line_break_is_the_enter_key_unless_said_otherwise(call, text, enter):
    assert parse_coordinate_action(f"Action: {call}") == Action("type", text=text, enter=enter)


def test_the_two_grammars_do_not_read_one_another():
    assert isinstance(parse_coordinate_action("Action: click(12)"), FormatError)
    assert isinstance(parse_coordinate_action('Action: type(12, "x")'), FormatError)
    assert isinstance(parse_coordinate_action('Action: select(12, "x")'), FormatError)
    assert isinstance(parse_action("Action: click(start_box='(1,2)')"), FormatError)
    assert isinstance(parse_action("Action: click(1, 2)"), FormatError)


def test_the_grammar_names_what_can_be_done():
    examples = [line.split(": ")[0] for line in COORDINATE_GRAMMAR.splitlines()]
    names = [example.split("(")[0] for example in examples]
    assert names == "click double_click right_click drag type hotkey scroll goto back wait finished".split()
    for x, y in (("x", "y"), ("x1", "y1"), ("x2", "y2")):
        examples = [example.replace(f"({x},{y})", "(1,2)") for example in examples]
    for example in examples:
        example = example.replace("|down|left|right", "").replace("[", "").replace("]", "").replace("(seconds", "(1")
        assert isinstance(parse_coordinate_action(example.replace("...", "http://a.test")), Action), example


def test_thought_is_what_stands_before_the_action():
    click = "click(start_box='(1,2)')"
    for answer in (
        f"Thought: I see.\nAction: {click}",
        f"<think>I see.</think>\n<action>{click}</action>",
        f"I see.</think>\n{click}",
        f"**Thought:** I see.\n```\n{click}\n```",
        '<think>I see.</think><tool_call>{"action": "wait"}</tool_call>',
        "Thought: I see.",
    ):
        assert coordinate_thought_of(answer) == "I see."
    assert coordinate_thought_of(f"Action: {click}") == ""
    assert thought_of("Submit 7\nAction: click(7)") == "Submit 7"
    assert thought_of("# I see.\ndo(action='Click', element='1')", dialect="do") == "# I see."


# --- Spaces ---


@pytest.mark.parametrize("case", cases("coords_scaling"))
def test_scaling_case_of_the_corpus(case):
    given_input, expected = case["input"], case["expected"]
    settings_of_processor = {k: given_input[k] for k in ("factor", "min_pixels", "max_pixels") if k in given_input}
    space = CoordinateSpace(given_input["model_space"], **settings_of_processor)
    image = tuple(given_input["image"])
    if "resized" in expected:
        assert list(space.limits(image)) == expected["resized"]
    if "pixel_to_model" in given_input:
        assert space.to_model(given_input["pixel_to_model"], image) == pytest.approx(expected["point"], abs=0.01)
        return
    box = given_input.get("box") or given_input["point"] * 2
    call = f"Action: click(start_box='[{','.join(map(str, box))}]')"
    action = parse_coordinate_action(call, space=space, image=image)
    if expected.get("error") == "out_of_range":
        assert isinstance(action, FormatError) and action.kind == "out_of_range"
        with pytest.raises(ValueError, match=r"out of range: 0\.\.1000 and 0\.\.1000"):
            space.to_pixel(given_input["point"], image)
        return
    pixel = space.to_pixel((action.x, action.y), image)
    if "pixel" in expected:
        assert pixel == pytest.approx(expected["pixel"], abs=0.01)
        return
    options = {k: given_input[k] for k in ("device_pixel_ratio", "scroll", "full_page", "viewport") if k in given_input}
    if "error" in expected:
        with pytest.raises(ValueError, match="the viewport is"):
            to_css(pixel, image, **options)
    else:
        assert to_css(pixel, image, **options) == pytest.approx(expected["css"], abs=0.01)


sides = st.integers(28, 4000)
spaces = st.builds(
    CoordinateSpace,
    st.sampled_from(["norm1000", "norm999", "norm1", "pixel", "resized_abs"]),
    factor=st.sampled_from([28, 32]),
    max_pixels=st.sampled_from([401_408, 1_003_520, 12_845_056]),
)


@settings(max_examples=500, deadline=None)
@given(spaces, sides, sides, st.floats(0, 1), st.floats(0, 1))
def test_a_point_of_any_space_is_a_pixel_of_the_screenshot_and_back(space, width, height, right, down):
    image = (width, height)
    limits = space.limits(image)
    x, y = (math.nextafter(limits[0], 0) * right, math.nextafter(limits[1], 0) * down)
    pixel = space.to_pixel((x, y), image)
    assert all(0 <= value <= side - 1 for value, side in zip(pixel, image, strict=True))
    back = space.to_model(pixel, image)
    for value, wanted, limit, side in zip(back, (x, y), limits, image, strict=True):
        assert abs(value - wanted) <= limit / side + 1e-6  # within one pixel


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([28, 32]), st.sampled_from([50_176, 1_003_520]))
def test_the_resized_size_is_the_image_processors(width, height, factor, max_pixels):
    assume(max(width, height) / min(width, height) < 200)
    resized = processor_resize(height, width, factor=factor, min_pixels=3136, max_pixels=max_pixels)
    assert smart_resize((width, height), factor, 3136, max_pixels) == (resized[1], resized[0])


def test_a_wrong_space_is_named():
    with pytest.raises(
        ValueError, match="'norm100' is not allowed: one of norm1000, norm999, norm1, pixel, resized_abs"
    ):
        CoordinateSpace("norm100")
    with pytest.raises(ValueError, match="pixel coordinates need the size of the screenshot"):
        parse_coordinate_action("click(1, 2)", space="pixel")
    with pytest.raises(ValueError, match=r"image = \(0, 5\) is not allowed"):
        smart_resize((0, 5))
    with pytest.raises(ValueError, match="out of view"):
        to_css((5, 10), (100, 900), viewport=(100, 100), scroll=(0, 300), full_page=True)


def test_an_action_is_put_on_the_page_with_all_its_points():
    space, image = CoordinateSpace("norm1"), (200, 100)
    drag = Action("drag", x=0.5, y=0.5, x2=1.0, y2=0.0)
    assert space.on_page(drag, image, image) == Action("drag", x=100, y=50, x2=199, y2=0)
    assert space.on_page(Action("scroll", direction="up"), image, image) == Action(
        "scroll", x=100, y=50, direction="up"
    )
    typed = Action("type", text="x")
    assert space.on_page(typed, image, image) == typed
    with pytest.raises(ValueError, match="the viewport is"):
        space.on_page(drag, image, (200, 300))


# --- Any answer at all ---

text = st.text(st.characters() | st.sampled_from("\"'\\\n\r\u201c\u201du`<>(){}[],"))
tricky_text = st.lists(
    text
    | st.sampled_from(
        ["</think>", "<action>click(1,1)</action>", "\nAction: click(1,1)\n", "```", "')", "</tool_call>"]
    )
).map("".join)
number = st.integers(0, 1000).map(float) | st.floats(0, 1000)
point = {"x": number, "y": number}
keys = st.lists(st.sampled_from(["ctrl", "shift", "enter", "+", "a", "?", "f5", "'", '"']), min_size=1, max_size=5)
actions = st.one_of(
    st.builds(Action, st.sampled_from(["click", "double_click", "right_click"]), **point),
    st.builds(Action, st.just("drag"), **point, x2=number, y2=number),
    st.builds(Action, st.just("type"), text=tricky_text | tricky_text.map(lambda t: t + "\n"), enter=st.booleans()),
    st.builds(Action, st.just("hotkey"), keys=keys.map(tuple)),
    st.builds(Action, st.just("scroll"), **point, direction=st.sampled_from(["up", "down", "left", "right"])),
    st.builds(Action, st.just("scroll"), direction=st.sampled_from(["up", "down", "left", "right"])),
    st.builds(Action, st.just("wait"), seconds=st.none() | st.floats(0, 1e300)),
    st.builds(Action, st.just("stop"), answer=tricky_text),
    st.just(Action("back")),
)
ENVELOPES = ["{}", "<action>{}</action>", "Thought: so.\nAction: {}", "```\n{}\n```", "<think>a</think>{}"]


@settings(max_examples=1500, deadline=None)
@given(actions, st.sampled_from(ENVELOPES))
def test_canonical_form_is_one_writable_line_that_reads_back_as_the_same_action(action, envelope):
    written = str(action)
    assert len(written.splitlines()) == 1
    written.encode()
    assert parse_coordinate_action(envelope.format(written)) == action


@settings(max_examples=1000, deadline=None)
@given(st.text())
def test_quoted_text_survives_whoever_wrote_it(typed):
    spelled = str(Action("stop", answer=typed)).removeprefix("stop(").removesuffix(")")
    assert parse_coordinate_action(f"Action: finished(content={spelled})") == Action("stop", answer=typed)
    for ascii_only in (True, False):
        call = json.dumps({"name": "x", "arguments": {"action": "answer", "text": typed}}, ensure_ascii=ascii_only)
        assert parse_coordinate_action(f"<tool_call>{call}</tool_call>") == Action("stop", answer=typed)


fragments = st.sampled_from(
    "<think> </think> <action> </action> <tool_call> </tool_call> Action: ``` # ; ( ) [ ] { } , : = ' \\".split()
    + "click type hotkey drag scroll wait finished start_box= end_box= x= y= key= content= direction= 12 -3".split()
    + ["1e999", "nan", "(1,2)", "click(start_box='(1,2)')", "click(3, 4)", "type(content='a')", '{"action": "wait"}']
    + ["<|box_start|>", "<|box_end|>", "<point>1 2</point>", '"name":', '"arguments":', '"coordinate": [1, 2]']
    + ["\u201c", "\uff08", "\n", " ", "\x00", "\ud83d", "\\ud83d", "\u200b", "<|im_end|>"]
)


@pytest.mark.parametrize("space", ["norm1000", "norm1", "pixel", "resized_abs"])
@settings(max_examples=2500, deadline=None)
@given(
    answer=st.lists(fragments, max_size=30).map("".join) | text,
    finish_reason=st.sampled_from([None, "stop", "length"]),
    think_prefilled=st.booleans(),
)
def test_no_answer_raises_and_every_point_is_inside(space, answer, finish_reason, think_prefilled):
    space, image = CoordinateSpace(space), (300, 200)
    result = parse_coordinate_action(
        answer, space=space, image=image, finish_reason=finish_reason, think_prefilled=think_prefilled
    )
    if isinstance(result, FormatError):
        assert result.kind in get_args(Kind) and len(result.message.splitlines()) == 1
        result.message.encode()
    else:
        assert parse_coordinate_action(str(result), space=space, image=image) == result
        on_page = space.on_page(result, image, image)
        assert on_page.x is None or 0 <= on_page.x <= 299 and 0 <= on_page.y <= 199
        assert on_page.x2 is None or 0 <= on_page.x2 <= 299 and 0 <= on_page.y2 <= 199
    assert coordinate_thought_of(answer) in answer.replace("<think>", "").replace("</think>", "") or "think>" in answer


@settings(max_examples=2500, deadline=None)
@given(st.lists(fragments | text, max_size=20).map("".join))
def test_noise_without_a_call_is_no_action(answer):
    noise = answer.translate(dict.fromkeys(map(ord, "({\uff08"), " "))
    assert isinstance(parse_coordinate_action(noise), FormatError)
    assert isinstance(parse_action(noise), FormatError)


@settings(max_examples=1000, deadline=None)
@given(st.text(st.characters(categories=["L", "Nd"]), min_size=1), st.sampled_from(["click(1, 2)", "finished()"]))
def test_a_call_in_a_sentence_is_no_action(word, call):
    for sentence in (
        f"{word} {call}",
        f"{word} {call} {word}.",
        f"{call} {word}",
        f"{word}\n{call}",
        f"{call}\n{word}",
    ):
        assert isinstance(parse_coordinate_action(sentence), FormatError), sentence


@pytest.mark.parametrize(
    ("prefix", "unit"),
    [
        ("", "</think>"),
        ("", "<tool_call>{"),
        ("", '<tool_call>{"action":"'),
        ("", '<tool_call>{"action":'),
        ('<tool_call>{"action":', "["),
        ('<tool_call>{"action":', "1"),
        ("", '\n{"action":'),
        ("", "<action>click("),
        ("", "<action>click(("),
        ("", "<action>click(<|box_start|>(1"),
        ("click(", "<point>1"),
        ("click(start_box='", "1,"),
        ("hotkey(key='", "a "),
        ("click(x=", "1"),
        ("", "``` "),
    ],
)
def test_a_hostile_megabyte_takes_less_than_a_second(prefix, unit):
    answer = prefix + unit * (1_000_000 // len(unit))
    start = time.process_time()
    result = parse_coordinate_action(answer)
    coordinate_thought_of(answer)
    assert time.process_time() - start < 2.0
    assert isinstance(result, FormatError) and len(result.message) < 500
