"""The attempts that the outcome model's base practised on: what a right one did, and that a wrong one did not."""

from __future__ import annotations

import re

import pytest
from transformers import AutoTokenizer

from webagent_core.policy.made_up_pages import words_of
from webagent_core.policy.tiny import BASE
from webagent_core.rewards.made_up_attempts import MadeUpAttempts
from webagent_core.tasks.demonstrations import elements


@pytest.fixture(scope="module")
def words() -> list[str]:
    return words_of(AutoTokenizer.from_pretrained(BASE))


def test_the_same_seed_gives_the_same_attempts_half_of_them_right(words):
    one, other = ([made.attempt() for _ in range(300)] for made in (MadeUpAttempts(words, 4), MadeUpAttempts(words, 4)))
    assert one == other
    assert 120 < sum(each.success for each in one) < 180


def done(attempt) -> bool:
    """Whether the final page and the last click are what the instruction asks for, read off their texts."""
    goal, page = attempt.goal, {element.id: element for element in elements(attempt.final.text)}
    last = page[attempt.steps[-1].action.element].name
    if found := re.fullmatch(r"Tick (.*), then (.*)\.", goal):
        ticked = ", ".join(element.name for element in page.values() if element.checked) or "none"
        return ticked == found[1] and last in (found[2], found[2].strip('"'))
    if found := re.fullmatch(r"Fill in (.*), then (.*)\.", goal):
        typed = [f'"{element.value}"' for element in page.values() if element.kind != "button"]
        return ", then ".join(typed) == found[1] and last in (found[2], found[2].strip('"'))
    if found := re.fullmatch(r'Put "(.*)" in (.*)\.|(.*) is (.*)\.|Write "(.*)" as the (.*)\.', goal):
        text, name = found[1] or found[4] or found[5], found[2] or found[3] or found[6]
        return [(e.name, e.value) for e in page.values() if e.value] == [(name.strip('"'), text.strip('"'))]
    around = "Press {}.|Open {} now.|Go for {} here.|Use the one called {}.|Follow {}.|Go to {} in the text."
    return goal in [words.format(said) for words in around.split("|") for said in (last, f'"{last}"')]


@pytest.mark.parametrize("largest", [2, 5, 9])
def test_the_right_ones_did_what_was_asked_and_the_wrong_ones_did_not(words, largest):
    made = MadeUpAttempts(words, seed=6, largest=largest)
    for attempt in (made.attempt() for _ in range(400)):
        assert done(attempt) == attempt.success, (attempt.goal, attempt.final.text, attempt.steps[-1].action)
