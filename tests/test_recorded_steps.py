"""Recorded steps: read from AMEX's shape, made of demonstrations, answered by a policy, scored by what is right."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from webagent_core.episode.actions import Action
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.contexts import Budget, ContextOverflow, HiconAgentContext
from webagent_core.episode.runner import Response
from webagent_core.episode.trajectory import ExitStatus
from webagent_core.recipe import load_recipe
from webagent_core.rewards.for_recipe import rewards_for
from webagent_core.rewards.scoring import Scoring
from webagent_core.sampling.step_answers import StepAnswers, draw_history, gold_of, history_bias, step_schedule
from webagent_core.tasks.demonstrations import DEMONSTRATORS, elements
from webagent_core.tasks.record_demonstrations import record_demonstrations
from webagent_core.tasks.recorded_steps import RecordedStep, read_steps
from webagent_core.tasks.task import Task

DEVICE = [1000, 2000]
# As AMEX has them, fields of no concern to us included.
AMEX = [
    {"action": "TAP", "touch_coord": [250, 500], "lift_coord": [250, 500], "type_text": ""},
    {"action": "TYPE", "touch_coord": [-1, -1], "lift_coord": [-1, -1], "type_text": 'say "hi"'},
    {"action": "SWIPE", "touch_coord": [500, 1500], "lift_coord": [520, 300], "type_text": ""},
    {"action": "SWIPE", "touch_coord": [100, 1000], "lift_coord": [900, 1010], "type_text": ""},
    {"action": "PRESS_ENTER"},
    {"action": "PRESS_HOME"},
    {"action": "PRESS_BACK"},
    {"action": "TASK_COMPLETE"},
    {"action": "TASK_IMPOSSIBLE"},
]
AS_OURS = [
    "click(x=250, y=250)",
    'type("say \\"hi\\"")',
    'scroll("down")',
    'scroll("left")',
    'hotkey("enter")',
    'hotkey("home")',
    "back()",
    'stop("")',
    'stop("impossible")',
]


def recording(folder: Path, steps: list[dict[str, Any]], name: str = "e1", **changed: Any) -> Path:
    """One episode, each step with a picture and the device."""
    (folder / "instruction_anno").mkdir(parents=True, exist_ok=True)
    (folder / "screenshot").mkdir(exist_ok=True)
    written = []
    for number, step in enumerate(steps):
        picture = f"{name}-{number}.png"
        Image.new("RGB", (20, 40), (number, 0, 0)).save(folder / "screenshot" / picture)
        written.append({"step_id": number, "image_path": picture, "device_dim": DEVICE, "package_name": "p"} | step)
    episode = {"episode_id": name, "instruction": "Say hi", "steps": written} | changed
    (folder / "instruction_anno" / f"{name}.json").write_text(json.dumps(episode))
    return folder


# ------------------------------------------------------------------------------------------------------------- reading


def test_amexs_actions_become_actions_at_points(tmp_path):
    steps = read_steps(recording(tmp_path, AMEX), at_points=True)
    assert [step.gold for step in steps] == AS_OURS
    assert [step.actions for step in steps] == [AS_OURS[:number] for number in range(len(AMEX))]
    assert {(step.task, step.episode, step.goal) for step in steps} == {("amex", "e1", "Say hi")}
    assert steps[4].name == "e1/4"
    assert [Path(file).name for file in steps[2].screenshots] == ["e1-0.png", "e1-1.png", "e1-2.png"]
    assert steps[2].pages == ["", "", ""]


def test_steps_of_text_hold_the_pages_and_what_was_really_done_on_them(tmp_path):
    steps = [
        {"page": "Buy 3 <button>", "element_action": "click(3)", "done": "click(9)", "box": [100, 200, 300, 400]},
        {"page": "Sold 4 <button>", "element_action": "stop()"},
    ]
    first, second = read_steps(recording(tmp_path, steps, task="shop/buy"))
    assert (first.task, first.gold, first.actions, first.box) == ("shop/buy", "click(3)", [], [100, 100, 300, 200])
    assert (second.gold, second.actions, second.box) == ('stop("")', ["click(9)"], None)
    assert second.pages == ["Buy 3 <button>", "Sold 4 <button>"]
    assert RecordedStep.of(second.row() | {"prompt": "another column"}) == second


def test_a_step_that_is_no_action_at_a_point_is_history_only(tmp_path):
    choose = {"page": "", "element_action": 'select(1, "red")'}
    steps = read_steps(recording(tmp_path, [AMEX[0], choose, AMEX[6]]), at_points=True)
    assert [step.gold for step in steps] == ["click(x=250, y=250)", "back()"]
    assert steps[1].actions == ["click(x=250, y=250)", ""]


REFUSED = {
    "action": ({"action": "SHAKE"}, True, r"steps\[0\].action = 'SHAKE' is not allowed: one of TAP, SWIPE"),
    "point": ({"action": "TAP", "touch_coord": [5000, 1]}, True, r"touch_coord = \[5000, 1\] is not allowed: inside"),
    "no point": ({"action": "TAP"}, True, "touch_coord = None is not allowed: 2 numbers"),
    "device": (AMEX[0] | {"device_dim": [0, 3]}, True, r"device_dim = \[0, 3\] is not allowed"),
    "text": ({"action": "TYPE"}, True, "type_text = None is not allowed"),
    "page": ({"element_action": "click(3)"}, False, "page is missing: a policy that acts on elements reads"),
    "element": ({"page": "x"}, False, "element_action = None is not allowed: it is missing"),
    "grammar": ({"page": "x", "element_action": "press(3)"}, False, r"element_action = 'press\(3\)' is not allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named(tmp_path, case):
    step, at_points, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read_steps(recording(tmp_path, [step]), at_points=at_points)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \*.json"):
        read_steps(tmp_path)
    recording(tmp_path, [AMEX[0]])
    (tmp_path / "screenshot" / "e1-0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"image_path = 'e1-0.png'"):
        read_steps(tmp_path, at_points=True)
    recording(tmp_path, [AMEX[0]], instruction="")
    with pytest.raises(ValueError, match="instruction is missing"):
        read_steps(tmp_path, at_points=True)


# -------------------------------------------------------------------------------------------------------------- making


@pytest.mark.slow
def test_demonstrations_on_real_pages_are_recorded_with_the_right_action_wherever_the_hand_slipped(tmp_path):
    names = ("miniwob/click-option", "miniwob/enter-text", "miniwob/choose-list")
    tasks = [Task(name, seed) for seed in range(4) for name in names]
    with BrowserRollout(pages=4) as rollout:
        trajectories = record_demonstrations(rollout, tasks, tmp_path, mistakes=0.5, seed=1)
    assert all(trajectory.valid for trajectory in trajectories)
    steps = read_steps(tmp_path)
    assert len(steps) == sum(len(trajectory.steps) for trajectory in trajectories)
    for step in steps:
        assert str(DEMONSTRATORS[step.task](step.goal, elements(step.pages[-1])).action) == step.gold
        left, top, right, bottom = step.box
        assert 0 <= left < right <= 1000 and 0 <= top < bottom <= 1000
        assert Image.open(step.screenshots[-1]).size == (160, 210)
    by_name = {step.name: step for step in steps}
    slipped = 0
    for trajectory in trajectories:
        done = [str(step.action) for step in trajectory.steps]
        for number in range(len(done)):
            assert by_name[f"{trajectory.group}/{number}"].actions == done[:number]
            slipped += by_name[f"{trajectory.group}/{number}"].gold != done[number]
    assert slipped > 0
    # The same steps for a policy that points: choosing from a list is no action at a point.
    pointing = read_steps(tmp_path, at_points=True)
    assert {step.gold.split("(")[0] for step in pointing} == {"click", "type"}
    assert Counter(step.gold.startswith("select") for step in steps)[True] == len(steps) - len(pointing)
    for step in pointing:
        if step.gold.startswith("click"):
            x, y = (int(part.split("=")[1]) for part in step.gold[len("click(") : -1].split(", "))
            assert step.box[0] <= x <= step.box[2] and step.box[1] <= y <= step.box[3]


# ------------------------------------------------------------------------------------------------------------- answers


PAGES = ["Buy 3 <button>", "Sure? 5 <button>", "Sold 4 <button>"]
STEP = RecordedStep("shop/buy", "e1", "Buy it", PAGES, [""] * 3, ["click(3)", ""], "click(4)")


def characters(chat: list[dict]) -> int:
    return sum(len(message["content"]) for message in chat)


def answers_of(most: int = 1000) -> StepAnswers:
    return StepAnswers(HiconAgentContext(observation="text"), Budget(characters, most))


def saying(*texts: str):
    """A policy that says these, and what it was shown."""
    chats: list[list[dict]] = []

    def generate(batch: list[list[dict]]) -> list[Response]:
        chats.extend(batch)
        return [Response(text, [1, 2], [3]) for text in texts]

    return generate, chats


def test_an_answer_sees_the_drawn_history_and_carries_both_branches_prompts():
    generate, chats = saying("Action: click(4)", "no idea", "Action: back()")
    lengths = iter([2, 1, 0])
    first, second, third = answers_of()([STEP.row()] * 3, generate, lambda available: next(lengths))
    whole = "Task: Buy it\nBuy 3 <button>\n1. click(3)\nSure? 5 <button>\n2. no action\nSold 4 <button>"
    assert [chat[0]["content"] for chat in chats] == [
        whole,
        "Task: Buy it\nSure? 5 <button>\n1. no action\nSold 4 <button>",
        "Task: Buy it\nSold 4 <button>",
    ]
    for trajectory, history in zip((first, second, third), (2, 1, 0), strict=True):
        (step,) = trajectory.steps
        assert step.history == history
        assert step.full == [{"role": "user", "content": whole}]
        assert step.compressed[0]["content"] == "Task: Buy it\n1. click(3)\n2. no action\nSold 4 <button>"
        assert (step.prompt_ids, step.response_ids, step.gold) == ([1, 2], [3], Action("click", element="4"))
        assert (trajectory.task, trajectory.group, trajectory.seed) == ("shop/buy", "e1/2", 2)
    assert [t.exit_status for t in (first, second, third)] == ["answered", "format_error", "answered"]


def test_answers_are_scored_by_the_recipes_rule_against_the_right_action():
    generate, _ = saying("Action: click(4)", "no idea", "Action: back()", "Action: click(3)")
    recipe = load_recipe("hiconagent")
    trajectories = answers_of()([STEP.row()] * 4, generate)
    Scoring(rewards_for(recipe, gold=gold_of)).finish(trajectories)
    assert [trajectory.reward for trajectory in trajectories] == [3.0, 0.0, 1.0, 2.0]
    assert [trajectory.success for trajectory in trajectories] == [True, False, False, False]
    assert all(trajectory.valid for trajectory in trajectories)


def test_a_policy_that_points_is_scored_by_its_distance(tmp_path):
    steps = read_steps(recording(tmp_path, AMEX[:1]), at_points=True)
    generate, chats = saying("Action: click(start_box='(250,350)')", "Action: click(start_box='(250,750)')")
    answers = StepAnswers(HiconAgentContext(), Budget(lambda chat: 0, 10), at_points=True)
    trajectories = answers([steps[0].row()] * 2, generate)
    manager = rewards_for(load_recipe("hiconagent"), gold=gold_of)
    manager.parse = answers.parse
    Scoring(manager).finish(trajectories)
    assert [part["type"] for part in chats[0][0]["content"]] == ["text", "image"]
    assert [trajectory.reward for trajectory in trajectories] == pytest.approx([2.9, 2.5])
    assert [trajectory.success for trajectory in trajectories] == [True, False]  # within 14% of the screen


def test_what_does_not_fit_is_cut_and_what_cannot_be_cut_is_known_beforehand():
    generate, chats = saying("Action: click(4)")
    answers = answers_of(most=60)
    (trajectory,) = answers([STEP.row()], generate)
    assert "Buy 3 <button>" not in chats[0][0]["content"] and characters(chats[0]) <= 60
    assert trajectory.steps[0].cut == "the oldest 2 screenshots of the history"
    assert answers.fits(STEP)
    assert not answers_of(most=20).fits(STEP)
    with pytest.raises(ContextOverflow):
        answers_of(most=20)([STEP.row()], generate)


def test_a_recorded_action_of_the_wrong_grammar_is_named():
    wrong = RecordedStep("t", "e", "g", ["page"], [""], [], "click(x=1, y=2)")
    with pytest.raises(ValueError, match=r"recorded action = 'click\(x=1, y=2\)' is not allowed"):
        answers_of()([wrong.row()], saying("x")[0])


# ------------------------------------------------------------------------------------------------- schedule and history


def test_every_step_is_asked_once_before_any_is_asked_again():
    order = step_schedule(steps=10, groups_per_update=3, updates=6, seed=0)
    assert len(order) == 18
    for update in range(6):
        assert len(set(order[3 * update : 3 * update + 3])) == 3
    for round in (order[:9], order[9:]):
        assert len(set(round)) == 9  # of ten, the one that is left over waits for another round
    assert order == step_schedule(10, 3, 6, 0) != step_schedule(10, 3, 6, 1)
    with pytest.raises(ValueError, match="groups_per_update = 3 is not allowed: there are 2 recorded steps"):
        step_schedule(2, 3, 1, 0)


def test_history_lengths_begin_even_and_come_to_lean_to_the_whole_history():
    assert [history_bias(u, 13, steepness=2.0, ramp=3.0) for u in (0, 2, 4, 12)] == pytest.approx([0, 1, 2, 2])
    assert history_bias(0, 1, steepness=2.0, ramp=3.0) == 0
    for bias in (0.0, 2.0):
        rng = random.Random(0)
        drawn = Counter(draw_history(3, bias, rng) for _ in range(8000))
        total = sum(math.exp(bias * n) for n in range(4))
        for n in range(4):
            assert drawn[n] / 8000 == pytest.approx(math.exp(bias * n) / total, abs=0.02)
    assert draw_history(0, 2.0, random.Random(0)) == 0
    assert draw_history(2000, 2.0, random.Random(0)) > 1990  # no overflow


def test_exit_statuses_of_answers_are_the_policys_own():
    generate, _ = saying("nothing")
    (trajectory,) = answers_of()([STEP.row()], generate)
    trajectory.reward = 0.0
    assert trajectory.exit_status is ExitStatus.FORMAT_ERROR and trajectory.valid
