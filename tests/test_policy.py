"""The tiny policy: its tokenizer, its base, the pages it practised on and the demonstrators it imitates."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from webagent_core.episode.actions import Action, parse_action
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.policy.demonstrations import gather
from webagent_core.policy.made_up_pages import MadeUpPages, words_of
from webagent_core.policy.tiny import BASE, build_policy
from webagent_core.policy.tokenizer import UNKNOWN, build_tokenizer
from webagent_core.tasks.demonstrations import DEMONSTRATORS, Move, check_demonstrated, demonstrate, elements
from webagent_core.tasks.task import Task

PAGE = 'Submit 7 <button>\nann 12 <input text> = "x"\nZq9 3 <checkbox> checked'


@pytest.fixture(scope="module")
def base_tokenizer():
    return AutoTokenizer.from_pretrained(BASE)


def test_a_number_is_one_token_with_and_without_the_space_before_it(base_tokenizer):
    for number in (0, 7, 42, 199):
        assert len(base_tokenizer(str(number))["input_ids"]) == 1
        assert len(base_tokenizer(f" {number}")["input_ids"]) == 1


def test_a_word_is_the_same_token_wherever_it_stands():
    tokenizer = build_tokenizer(["Submit the form"] * 3)
    token = tokenizer.convert_tokens_to_ids("Submit")
    for text in ("Submit", '"Submit"', "press Submit.", "\nSubmit 7"):
        assert tokenizer(text)["input_ids"].count(token) == 1


def test_a_word_of_too_few_texts_is_spelled_and_comes_back_the_same():
    tokenizer = build_tokenizer(["common rare", "common", "common"])
    assert len(tokenizer("common")["input_ids"]) == 1
    assert len(tokenizer("rare")["input_ids"]) == 4
    assert tokenizer.decode(tokenizer(PAGE)["input_ids"]) == PAGE


def test_what_the_tokenizer_does_not_know_is_marked_and_harms_nothing_else(base_tokenizer):
    text = base_tokenizer.decode(base_tokenizer("Submit \u4e2d 7")["input_ids"])
    assert text == f"Submit {UNKNOWN} 7"


def test_the_same_corpus_gives_the_same_tokenizer_and_the_same_seed_the_same_weights():
    one, other = (build_tokenizer(["b a b", "a b", "a b c"]) for _ in range(2))
    assert one.get_vocab() == other.get_vocab()
    first, second = (build_policy(one, hidden=16, layers=1, heads=2, seed=3) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_shipped_base_is_small_loads_offline_and_its_log_is_beside_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 3_000_000
    model = AutoModelForCausalLM.from_pretrained(BASE)
    assert model.num_parameters() < 1_000_000
    assert "right 0." in (BASE / "pretraining.log").read_text()


def test_the_base_looks_names_up_on_pages_it_has_not_seen(base_tokenizer):
    import torch

    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    pages, right = MadeUpPages(words_of(base_tokenizer), seed=77), 0
    for _ in range(60):
        messages, response = pages.sample()
        prompt = base_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].size(1) :]
        right += base_tokenizer.decode(answer, skip_special_tokens=True) == response
    assert right >= 45, f"{right} of 60 right"


def test_made_up_pages_repeat_for_a_seed_and_every_answer_is_an_action_on_the_page():
    words = ["alpha", "beta", "gamma", "delta"]
    one, other = MadeUpPages(words, seed=5), MadeUpPages(words, seed=5)
    for _ in range(300):
        messages, response = one.sample()
        assert (messages, response) == other.sample()
        action = parse_action(response)
        assert isinstance(action, Action), response
        assert action.element in {element.id for element in elements(messages[-1]["content"])}


def test_a_demonstrator_goes_on_from_somebody_elses_mistake():
    page = 'Username 1 <input text> = "wrong"\nPassword 2 <input password>\nLogin 3 <button>'
    goal = 'Enter the username "ann" and the password "x7" into the text fields and press login.'
    import random

    assert demonstrate("miniwob/login-user", goal, page, 0.0, random.Random(0)) == 'Username 1\nAction: type(1, "ann")'


def test_mistakes_come_as_often_as_asked_and_press_what_stands_last():
    import random

    rng, page = random.Random(0), "ONE 1 <button>\nTWO 2 <button>\nthree 3 <button>"
    answers = [demonstrate("miniwob/click-test-2", "Click button ONE.", page, 0.3, rng) for _ in range(2000)]
    wrong = [answer for answer in answers if answer != "ONE 1\nAction: click(1)"]
    assert 0.27 < len(wrong) / len(answers) < 0.33
    assert set(wrong) == {"three 3\nAction: click(3)"}


def test_only_a_click_goes_astray():
    import random

    page, goal = "unnamed 1 <input text>\nSubmit 2 <button>", 'Enter "ann" into the text field and press Submit.'
    answers = {demonstrate("miniwob/enter-text", goal, page, 0.9, random.Random(seed)) for seed in range(20)}
    assert answers == {'unnamed 1\nAction: type(1, "ann")'}


def test_boxes_are_ticked_in_the_order_of_the_goal_after_wrong_ticks_are_taken_back():
    import random

    def answer(page: str) -> str:
        goal = "Select bb, aa and click Submit."
        return demonstrate("miniwob/click-checkboxes", goal, page, 0.0, random.Random(0)).split("\n")[0]

    page = "aa 1 <checkbox>{}\nbb 2 <checkbox>{}\ncc 3 <checkbox>{}\nSubmit 4 <button>"
    assert answer(page.format("", "", "")) == "bb 2"
    assert answer(page.format("", " checked", "")) == "aa 1"
    assert answer(page.format("", " checked", " checked")) == "cc 3"
    assert answer(page.format(" checked", " checked", "")) == "Submit 4"


def test_a_response_restates_its_target_and_parses_as_its_action():
    target = elements(PAGE)[1]
    move = Move(target, Action("type", element=target.id, text='a "b"'))
    assert move.response().startswith("ann 12\n")
    assert parse_action(move.response()) == move.action


def test_a_task_without_a_demonstrator_is_named_with_those_that_have_one():
    with pytest.raises(ValueError, match="miniwob/click-pie.*no demonstrator.*miniwob/click-button"):
        check_demonstrated("miniwob/click-pie")


def test_every_demonstrator_succeeds_on_real_pages():
    tasks = [Task(name, seed) for name in sorted(DEMONSTRATORS) for seed in (11, 12)]
    with BrowserRollout(pages=4, screenshots=False) as rollout:
        episodes = gather(rollout, tasks, mistakes=0.0, seed=0)
    assert [episode.group for episode in episodes if not episode.success] == []
