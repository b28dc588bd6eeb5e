"""A whole trajectory as one row: what is trained on, what is cut, and when one row becomes two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from webagent_core.episode.sequence import extend_prompt, lay_out, sequences_of
from webagent_core.episode.trajectory import Step, Trajectory
from webagent_core.policy.tokenizer import build_tokenizer

FOLDER = Path(__file__).parent / "cases"
PAD = 9  # the token that stands for a piece of a picture


def cases(name: str) -> list:
    found = json.loads((FOLDER / f"{name}.json").read_text(encoding="ascii"))
    return [pytest.param(case, id=f"{case['id']}-{case['kind']}") for case in found]


def trajectory_of(*steps: tuple[list[int], list[int]], screenshots: bool = False) -> Trajectory:
    made = [
        Step(
            "", "", [], prompt_ids=prompt, response_ids=response, screenshot=b"jpeg %d" % index if screenshots else None
        )
        for index, (prompt, response) in enumerate(steps)
    ]
    return Trajectory("task", 0, "group", steps=made)


@pytest.mark.parametrize("case", cases("mask_layout"))
def test_case_of_the_corpus(case):
    ids = iter(range(100, 10_000))
    segments = [(each["role"], [next(ids) for _ in range(each["tokens"])]) for each in case["input"]["segments"]]
    expected = case["expected"]["response_mask"]
    row = lay_out([], segments, max_tokens=case["input"].get("max_len"))
    everything = [token for _, tokens in segments for token in tokens]
    assert row.response_mask == expected
    assert row.response_ids == everything[: len(expected)] and row.truncated == (len(expected) < len(everything))
    # The same behind a prompt, which is in the row but not in the response.
    behind = lay_out([1, 2], segments, max_tokens=case["input"].get("max_len") and case["input"]["max_len"] + 2)
    assert (behind.prompt_ids, behind.response_ids, behind.response_mask) == ([1, 2], row.response_ids, expected)


def test_corpus_is_complete():
    assert len(cases("mask_layout")) == 8


def test_a_context_that_only_grows_is_one_row_of_the_sampled_tokens():
    first, second, third = [1, 2, 3], [1, 2, 3, 10, 11, 4, 5], [1, 2, 3, 10, 11, 4, 5, 12, 6]
    (row,) = sequences_of(trajectory_of((first, [10, 11]), (second, [12]), (third, [13, 14])))
    assert row.prompt_ids == first and row.response_ids == [10, 11, 4, 5, 12, 6, 13, 14]
    assert row.response_mask == [1, 1, 0, 0, 1, 0, 1, 1] and row.steps == range(3) and not row.truncated


def test_a_prompt_that_renders_the_past_anew_begins_another_row():
    # The second prompt leaves the sampled thought 10 out; the third goes on from the second.
    trajectory = trajectory_of(([1], [10, 11]), ([1, 11, 4], [12]), ([1, 11, 4, 12, 5], [13]))
    rows = sequences_of(trajectory)
    assert [row.steps for row in rows] == [range(1), range(1, 3)]
    assert [row.prompt_ids for row in rows] == [[1], [1, 11, 4]]
    assert [row.response_ids for row in rows] == [[10, 11], [12, 5, 13]]
    assert [row.response_mask for row in rows] == [[1, 1], [1, 0, 1]]


def test_no_steps_are_no_rows_and_steps_without_tokens_are_refused():
    assert sequences_of(trajectory_of()) == []
    with pytest.raises(ValueError, match=r"steps\[1\].prompt_ids and response_ids"):
        sequences_of(trajectory_of(([1], [2]), ([], [])))


def test_the_prompt_is_never_cut():
    assert lay_out([1, 2, 3], [("model", [4])], max_tokens=3).response_ids == []
    with pytest.raises(ValueError, match="max_tokens = 2 is not allowed: the prompt alone has 3 tokens"):
        lay_out([1, 2, 3], [("model", [4])], max_tokens=2)


# --- Pictures ---


def test_a_picture_that_does_not_fit_goes_as_a_whole():
    # The case of the corpus: text, picture, text, picture, text, cut to 80 tokens.
    case = next(case.values[0] for case in cases("context") if case.values[0]["id"] == "ctx-s-005")
    size = case["expected"]["pads_left_for_images"]
    picture = [PAD] * size
    first, second = [1, *picture, 2], [1, *picture, 2, 10, 3, *picture, 4]
    trajectory = trajectory_of((first, [10]), (second, [11]), screenshots=True)
    (row,) = sequences_of(trajectory, max_tokens=case["input"]["cut_to_tokens"], picture_token=PAD)
    assert (row.prompt_ids + row.response_ids).count(PAD) == size
    assert row.pictures == [b"jpeg 0"] and len(row.pictures) == case["expected"]["images_left"]
    assert row.response_ids == [10, 3] and row.truncated and sum(row.response_mask) == 1
    (whole,) = sequences_of(trajectory, picture_token=PAD)
    assert whole.pictures == [b"jpeg 0", b"jpeg 1"] and not whole.truncated


def test_a_row_that_begins_later_has_the_pictures_its_prompt_shows():
    # Only the newest picture is shown, so every step begins a row.
    trajectory = trajectory_of(([1, PAD, 2], [10]), ([1, 10, PAD, 2], [11]), screenshots=True)
    assert [row.pictures for row in sequences_of(trajectory, picture_token=PAD)] == [[b"jpeg 0"], [b"jpeg 1"]]


def test_more_pictures_in_the_tokens_than_screenshots_are_refused():
    with pytest.raises(ValueError, match="got 2 pictures"):
        sequences_of(trajectory_of(([PAD, 1, PAD], [10]), screenshots=True), picture_token=PAD)
    with pytest.raises(ValueError, match="got 1 pictures"):
        sequences_of(trajectory_of(([PAD], [10])), picture_token=PAD)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["model", "observation"]), st.lists(st.integers(0, PAD), max_size=6)), max_size=8
    ),
    st.integers(0, 40),
)
def test_every_row_is_a_beginning_that_breaks_no_picture(segments, limit):
    everything = [token for _, tokens in segments for token in tokens]
    row = lay_out([], segments, max_tokens=limit, picture_token=PAD)
    kept = len(row.response_ids)
    assert row.response_ids == everything[:kept] and len(row.response_mask) == kept <= limit
    if row.truncated:
        assert kept < len(everything) and not (kept and everything[kept - 1] == PAD and everything[kept] == PAD)
        assert all(token == PAD for token in everything[kept:limit])  # and not a token more than that is lost
    else:
        assert kept == len(everything)


# --- Token in, token out ---


def test_the_next_prompt_keeps_the_sampled_tokens():
    tokenizer = build_tokenizer(["word " * 3] * 5)

    def render(messages: list[dict], more: bool) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=more, tokenize=True, return_dict=True)[
            "input_ids"
        ]

    chat = [{"role": "user", "content": "Task: word"}]
    prompt = render(chat, True)
    # The same word in other pieces than the tokenizer would make of it.
    sampled = tokenizer("w")["input_ids"] + tokenizer("ord")["input_ids"]
    assert tokenizer.decode(sampled) == "word" and sampled != tokenizer("word")["input_ids"]
    dummy = [*chat, {"role": "assistant", "content": "x"}]
    new = {"role": "user", "content": "Simplified HTML"}
    end = tokenizer.eos_token_id
    for response in (sampled, [*sampled, end]):  # cut at the token limit, or ended by the model
        following = extend_prompt(prompt, response, render(dummy, False), render([*dummy, new], True), end)
        (row, *rest) = sequences_of(trajectory_of((prompt, response), (following, [*sampled, end])))
        assert not rest and row.response_ids[: len(sampled)] == sampled
        assert sum(row.response_mask) == len(response) + len(sampled) + 1
        wanted = render([*chat, {"role": "assistant", "content": "word"}, new], True)
        assert tokenizer.decode(following) == tokenizer.decode(wanted)
    with pytest.raises(ValueError, match="does not begin with"):
        extend_prompt(prompt, sampled, [5, end], [6, end, 7], end)


def test_tokens_grow_with_the_steps_not_with_their_square():
    steps, so_far = [], [1]
    for _ in range(200):
        steps.append((so_far, [2] * 50))
        so_far = so_far + [2] * 50 + [3] * 50
    (row,) = sequences_of(trajectory_of(*steps))
    assert len(row.response_ids) == 200 * 100 - 50 and sum(row.response_mask) == 200 * 50
