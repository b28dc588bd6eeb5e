"""What each sampler does to the data that reaches a trainer, on real pages: which rows, groups and log-probabilities,
with the sampler on and with its switch off."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_run import G, ScriptedRun, on, rollout
from test_page_search import answered, impatient, right
from test_sampled_training import rows_of, same_row, steps_of
from test_step_grpo_trainer import plain_logps
from transformers import AutoModelForCausalLM

from trl_webagent.preference_run import PreferenceRun
from trl_webagent.recorded_steps_run import RecordedStepsRun
from webagent_core.episode.trajectory import Trajectory
from webagent_core.policy.tiny import BASE
from webagent_core.recipe import load_recipe
from webagent_core.rewards import RewardManager
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.task_generation import NewTask
from webagent_core.tasks.record_demonstrations import record_demonstrations
from webagent_core.tasks.task import Task

__all__ = ["rollout"]  # a fixture of this module too

LINK, OPTION = Task("miniwob/click-link", 1), Task("miniwob/click-option", 1)


def half_of_odd_seeds(task: Task, attempt: int, play: int) -> bool:
    return bool(task.seed % 2 and attempt % 2)


def half(task: Task, attempt: int, play: int) -> bool:
    return bool(attempt % 2)


def half_at_first(task: Task, attempt: int, play: int) -> bool:
    return bool(attempt % 2 and play == 0)


def never(task: Task, attempt: int, play: int) -> bool:
    return False


def policy(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model.load_state_dict(weights)
    return model


def old_logps(run: ScriptedRun, update: int, steps: list[Any], name: str = "old") -> list[torch.Tensor]:
    """As the trainer has them for rows of its batch, one tensor a step."""
    batch, found = run.batches[update], []
    for step in steps:
        row = next(i for i in range(len(batch["coefficients"])) if same_row(batch, i, step))
        found.append(batch[f"{name}_per_token_logps"][row][: len(step.response_ids)])
    return found


def assert_of(weights: dict[str, torch.Tensor], logps: list[torch.Tensor], steps: list[Any], same: bool = True) -> None:
    model = policy(weights)
    with torch.no_grad():
        apart = max(
            float((logp - plain_logps(model, step)).abs().max()) for logp, step in zip(logps, steps, strict=True)
        )
    assert apart < 1e-3 if same else apart > 1e-2


# -------------------------------------------------------------------------------------------------------- group filters


@pytest.mark.parametrize("name", ["asyncwebrl", "openwebrl", "zerogui"])
def test_flat_groups_of_real_pages_are_replaced_and_without_the_filter_they_stay(name, rollout, tmp_path):
    given = {"sampling__max_staleness": 0} if name == "asyncwebrl" else {}
    run = ScriptedRun(name, tmp_path / "on", rollout, half_of_odd_seeds, **given).go()
    played = [t for of_play in run.plays for t in of_play]
    kept = [t for t in played if t.seed % 2]
    assert {t.group for t in kept if t.success} == {t.group for t in kept}  # the page itself says so
    assert len(kept) == 2 * G < len(played)
    assert rows_of(run.batches[0]) == steps_of(kept)

    off = ScriptedRun(name, tmp_path / "off", rollout, half_of_odd_seeds, objective__drop_flat_groups=False, **given)
    (only,) = off.go().plays
    assert len(only) == 2 * G and {t.seed % 2 for t in only} == {0, 1}
    # What its KL term acts on stays in the loss.
    assert rows_of(off.batches[0]) == steps_of([t for t in only if name == "zerogui" or t.seed % 2])


def test_a_batch_that_waited_has_the_log_probabilities_of_the_policy_that_played_it(rollout, tmp_path):
    twice = {"train__updates": 2, "train__num_iterations": 2}
    run = ScriptedRun("asyncwebrl", tmp_path / "on", rollout, half, **twice, sampling__max_staleness=1).go()
    assert len(run.plays) == 3
    second = [step for t in run.plays[1] for step in t.steps]
    assert rows_of(run.batches[1]) == steps_of(run.plays[1])
    behave, prox = (old_logps(run, 1, second, name) for name in ("behave", "old"))
    assert_of(run.weights[0], behave, second)  # played before the first update ...
    assert_of(run.weights[1], prox, second)  # ... and trained on after it
    assert_of(run.weights[1], behave, second, same=False)

    off = ScriptedRun("asyncwebrl", tmp_path / "off", rollout, half, **twice, sampling__max_staleness=0).go()
    second = [step for t in off.plays[1] for step in t.steps]
    assert len(off.plays) == 2
    assert_of(off.weights[1], old_logps(off, 1, second, "behave"), second)


def test_arpo_trains_on_the_tasks_that_a_trial_showed_to_be_possible(rollout, tmp_path):
    def odd(task: Task, attempt: int, play: int) -> bool:
        return bool(task.seed % 2 and attempt == 1)

    settings = {"sampling__candidate_tasks": 6}
    run = ScriptedRun("arpo", tmp_path / "on", rollout, odd, sampling__task_trials=2, **settings).go()
    candidates = set(run.sampling.candidates)
    possible = {task for task in candidates if task.seed % 2}
    assert possible < candidates and set(run.sampling.tasks.entries) == possible
    assert {Task(t.task, t.seed) for t in run.plays[0]} <= possible

    off = ScriptedRun("arpo", tmp_path / "off", rollout, odd, sampling__task_trials=None, **settings).go()
    assert off.sampling.tasks.entries == off.recipe.tasks.names


# ------------------------------------------------------------------------------------------------------------ curricula

# Who gives up goes on to the limit.
IDLE = {"give_up": "Action: click(99)", "rollout__max_steps": 3, "objective__drop_flat_groups": False}


def longest(trajectories: list[Trajectory]) -> dict[str, int]:
    return {t.task: len(t.steps) for t in trajectories if not t.success}


def test_each_difficulty_has_its_own_number_of_steps_and_rows(rollout, tmp_path):
    settings = IDLE | {"sampling__max_staleness": 0}
    limits = {"sampling__max_steps_by_difficulty": [1, 2]}
    run = ScriptedRun("asyncwebrl", tmp_path / "on", rollout, half, **settings, **limits).go()
    assert longest(run.plays[0]) == {"miniwob/click-link": 1, "miniwob/click-option": 2}
    off = ScriptedRun("asyncwebrl", tmp_path / "off", rollout, half, **settings, **dict.fromkeys(limits)).go()
    assert longest(off.plays[0]) == {"miniwob/click-link": 3, "miniwob/click-option": 3}
    for each in (run, off):
        assert rows_of(each.batches[0]) == steps_of(each.plays[0])


def test_episodes_get_longer_from_an_update_on(rollout, tmp_path):
    settings = IDLE | {"rollout__max_steps": 1, "train__updates": 2, "tasks__names": [LINK.name]}
    later = {"sampling__later_max_steps": 3, "sampling__later_from_update": 1}
    run = ScriptedRun("openwebrl", tmp_path / "on", rollout, half, **settings, **later).go()
    assert [longest(play) for play in run.plays] == [{LINK.name: 1}, {LINK.name: 3}]
    off = ScriptedRun("openwebrl", tmp_path / "off", rollout, half, **settings, **dict.fromkeys(later)).go()
    assert [longest(play) for play in off.plays] == [{LINK.name: 1}] * 2
    for each in (run, off):
        assert [rows_of(batch) for batch in each.batches] == [steps_of(play) for play in each.plays]


# -------------------------------------------------------------------------------------------------------------- replays


def test_a_group_that_fails_gets_an_earlier_success_of_its_page_with_log_probabilities_of_now(rollout, tmp_path):
    def run(out: Path, **settings: Any) -> ScriptedRun:
        given = {"rollout__groups_per_update": 1, "train__updates": 2, "train__num_iterations": 2}
        made = ScriptedRun("arpo", out, rollout, half_at_first, **given, sampling__task_trials=None, **settings)
        made.sampling.tasks.restrict([OPTION])
        return made.go()

    made = run(tmp_path / "on")
    successes = [t for t in made.plays[0] if t.success]
    joined = rows_of(made.batches[1]) & steps_of(successes)
    assert joined.total() == 2 and (rows_of(made.batches[1]) - joined).total() == G - 1  # failures of one step
    (steps,) = [t.steps for t in successes if steps_of([t]) == joined][:1]
    assert_of(made.weights[1], old_logps(made, 1, steps), steps)
    assert_of(made.weights[0], old_logps(made, 1, steps), steps, same=False)

    off = run(tmp_path / "off", objective__replay=False)
    assert len(off.plays[1]) == G and not rows_of(off.batches[1])  # nothing to learn from four failures


def test_steps_of_recent_successes_join_and_a_window_of_one_iteration_lets_none(rollout, tmp_path):
    settings = {"train__updates": 2}
    run = ScriptedRun("webgym", tmp_path / "on", rollout, half_at_first, **settings).go()
    succeeded = steps_of([t for t in run.plays[0] if t.success])
    assert rows_of(run.batches[0]) == rows_of(run.batches[1]) == succeeded
    few = ScriptedRun("webgym", tmp_path / "few", rollout, half_at_first, sampling__rows_per_update=3, **settings).go()
    assert [rows_of(batch).total() for batch in few.batches] == [3, 3]
    off = ScriptedRun("webgym", tmp_path / "off", rollout, half_at_first, sampling__recency_window=1, **settings).go()
    assert rows_of(off.batches[0]) == succeeded and not rows_of(off.batches[1])


WINDOW = {"sampling__replay_min_probability": 1e-9, "sampling__replay_max_probability": 1.0}


def test_webrl_replays_actions_of_earlier_phases_within_the_window(rollout, tmp_path):
    settings = {"train__updates": 2, "sampling__updates_per_phase": 1, "sampling__new_tasks_per_phase": None}
    run = ScriptedRun("webrl", tmp_path / "on", rollout, half_at_first, **settings, **WINDOW).go()
    new, before = steps_of(run.plays[1]), steps_of([t for t in run.plays[0] if t.success])
    rows = rows_of(run.batches[1])
    assert rows == new + before and 0 < before.total() <= 2 * new.total()
    half_as_many = ScriptedRun(
        "webrl", tmp_path / "half", rollout, half_at_first, sampling__replay_ratio=0.5, **settings, **WINDOW
    ).go()
    assert rows_of(half_as_many.batches[1]).total() == new.total() + new.total() // 2
    narrow = {"sampling__replay_min_probability": 0.999999, "sampling__replay_max_probability": 1.0}
    for number, off in enumerate([{"sampling__replay_ratio": 0.0}, narrow]):
        run = ScriptedRun("webrl", tmp_path / f"off{number}", rollout, half_at_first, **settings, **off).go()
        assert rows_of(run.batches[1]) == steps_of(run.plays[1])


# ------------------------------------------------------------------------------------------------------------ new tasks


def test_what_failed_in_a_phase_is_varied_and_played_in_the_next(rollout, tmp_path):
    def options_fail(task: Task, attempt: int, play: int) -> bool:
        return task.name == LINK.name

    settings = {"train__updates": 3, "sampling__updates_per_phase": 1, "sampling__replay_ratio": 0.0}
    run = ScriptedRun("webrl", tmp_path / "on", rollout, options_fail, **settings, sampling__new_tasks_per_phase=2).go()
    made = [entry for entry in run.sampling.tasks.entries if isinstance(entry, Task)]
    assert made and {task.name for task in made} == {"miniwob/click-option"}
    played = {Task(t.task, t.seed) for of_play in run.plays[1:] for t in of_play}
    assert played & set(made)
    off = ScriptedRun(
        "webrl", tmp_path / "off", rollout, options_fail, **settings, sampling__new_tasks_per_phase=None
    ).go()
    assert off.sampling.tasks.entries == off.recipe.tasks.names


def test_generated_tasks_come_first_and_then_the_target_tasks(rollout, tmp_path):
    settings = {"train__updates": 2, "objective__drop_flat_groups": False}
    run = ScriptedRun("zerogui", tmp_path / "on", rollout, never, sampling__generated_tasks=2, **settings).go()
    expected = Sampling(run.recipe)
    asyncio.run(expected.first_stage([NewTask(task) for task in expected.start_pages()]))
    made = set(expected.tasks.first)
    assert len(made) == 2
    assert [groups_of(of_play) for of_play in run.plays] == [expected.tasks.next(2), expected.tasks.next(2)]
    assert set(groups_of(run.plays[0])) == made and rows_of(run.batches[0]) == steps_of(run.plays[0])
    off = ScriptedRun("zerogui", tmp_path / "off", rollout, never, **settings).go()
    assert groups_of(off.plays[0]) == Sampling(off.recipe).tasks.next(2)
    assert not {task for of_play in off.plays for task in groups_of(of_play)} & made


def groups_of(trajectories: list[Trajectory]) -> list[Task]:
    return list(dict.fromkeys(Task(t.task, t.seed) for t in trajectories))


class ClicksCount(RewardManager):
    """Scores any goal: an attempt that clicked something succeeded."""

    def score(self, trajectory: Trajectory) -> float:
        return float(any(step.action is not None and step.action.name == "click" for step in trajectory.steps))


def test_a_models_tasks_are_played_from_the_page_that_it_was_shown(rollout, tmp_path, chat_server):
    proposed = [["Follow the last link", "Follow no link"], ["Read the text aloud"]]

    def answer(question: dict[str, Any]) -> str:
        if "exactly YES or NO" in question["messages"][0]["content"]:
            return "NO" if "no link" in question["messages"][1]["content"] else "YES"
        return json.dumps({"tasks": proposed.pop(0)})

    chat_server.answer, generator = answer, chat_server.settings
    run = ScriptedRun(
        "zerogui", tmp_path, rollout, never, tasks__names=[LINK.name], objective__drop_flat_groups=False,
        sampling__generated_tasks=2, sampling__generator__model=generator.model,
        sampling__generator__base_url=generator.base_url, sampling__generator__api_key_env=None,
        reward__manager="test_sampling_on_pages:ClicksCount",
    ).go()  # fmt: skip
    question = chat_server.questions[0]["messages"][1]["content"]
    assert question[1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    example = json.loads(question[0]["text"])["tasks"][0]["task"]
    assert example.startswith("Click on the link")
    assert {t.goal for t in run.plays[0]} == {"Follow the last link", "Read the text aloud"}
    assert {t.group for t in run.plays[0]} == {"generated#0", "generated#2"}
    (start,) = {start for start, _ in run.sampling.generator.starts}
    (page,) = {t.steps[0].observation for t in run.plays[0]}  # two goals on one page
    assert start.name == LINK.name and "<clickable>" in page
    assert all(t.goal in t.steps[0].messages[-1]["content"] for t in run.plays[0])
    assert rows_of(run.batches[0]) == steps_of(run.plays[0])


def test_zerogui_draws_rows(rollout, tmp_path):
    run = ScriptedRun("zerogui", tmp_path / "on", rollout, half, sampling__rows_per_update=5).go()
    played = steps_of([t for of_play in run.plays for t in of_play])
    assert rows_of(run.batches[0]).total() == 5 and not rows_of(run.batches[0]) - played
    off = ScriptedRun("zerogui", tmp_path / "off", rollout, half, sampling__rows_per_update=None).go()
    assert rows_of(off.batches[0]) == steps_of([t for of_play in off.plays for t in of_play])


# ---------------------------------------------------------------------------------------------------------------- pairs


def preferences(name: str, out: Path, rollout: Any, **settings: Any) -> PreferenceRun:
    given = {
        "policy.warm_up": None,
        "rollout.group_size": 2,
        "rollout.groups_per_update": 2,
        "train.updates": 1,
        "train.save_every": 1,
        "pairs.per_update": 2,
        "tasks.names": ["miniwob/click-option"],
    }
    given |= {key.replace("__", "."): value for key, value in settings.items()}
    run = PreferenceRun(load_recipe(name, overrides=given), out, resume=False)
    on(run, rollout, half, give_up="Action: click(1)")
    run.trainer = run._trainer(str(BASE))
    return run


def dpo_batch(run: PreferenceRun, pairs: list[Any]) -> dict[str, list[Any]]:
    """What the DPO trainer gets: prompt and answer of each side, and the reference's log-probabilities."""
    trainer = run._dpo_trainer(run.rounds[0], pairs)
    (batch,) = list(trainer.get_train_dataloader())
    size, rows = len(batch["input_ids"]) // 2, {}
    for side, first in (("chosen", 0), ("rejected", size)):
        ids, seen, answer = (
            batch[name][first : first + size] for name in ("input_ids", "attention_mask", "completion_mask")
        )
        rows[side] = [
            (one[(mask == 1) & (said == 0)].tolist(), one[said == 1].tolist())
            for one, mask, said in zip(ids, seen, answer, strict=True)
        ]
        rows[f"ref_{side}"] = batch[f"ref_{side}_logps"].tolist() if f"ref_{side}_logps" in batch else None
    return rows


def test_a_failed_attempt_is_corrected_at_its_first_wrong_step_and_dpo_gets_that_pair(rollout, tmp_path):
    run = preferences("uitars", tmp_path / "on", rollout, pairs__imitation_steps=None)
    pairs = run._pairs_of(run.rounds[0])
    assert len(pairs) == 2  # one failure each of two pages
    rows = dpo_batch(run, pairs)
    assert rows["ref_chosen"] is None  # the reference is a model
    tokenizer = run.trainer.tokenizer
    for (prompt, chosen), (again, rejected) in zip(rows["chosen"], rows["rejected"], strict=True):
        chat = tokenizer.decode(prompt)
        assert prompt == again and "Task: Select" in chat
        assert tokenizer.decode(chosen, skip_special_tokens=True) != tokenizer.decode(
            rejected, skip_special_tokens=True
        )
    assert {pair.rejected.action for pair in pairs} == {"click(1)"} and {pair.source for pair in pairs} == {
        "correction"
    }


def test_a_model_may_correct_instead(rollout, tmp_path, chat_server):
    chat_server.replies += ['{"step": 1, "answer": "the other 2\\nAction: click(2)"}', '{"step": null}']
    settings = {f"pairs__corrector__{name}": getattr(chat_server.settings, name) for name in ("model", "base_url")}
    run = preferences(
        "uitars", tmp_path, rollout, pairs__imitation_steps=None, pairs__corrector__api_key_env=None, **settings
    )
    (pair,) = run._pairs_of(run.rounds[0])
    assert (pair.chosen.action, pair.rejected.action) == ("click(2)", "click(1)")
    asked = json.loads(chat_server.questions[0]["messages"][1]["content"])
    assert asked["goal"].startswith("Select") and asked["steps"][0]["answer"] == "Action: click(1)"
    rows = dpo_batch(run, [pair])
    assert run.trainer.tokenizer.decode(rows["chosen"][0][1], skip_special_tokens=True).endswith("click(2)")


@pytest.mark.parametrize("ranking_alone", [False, True])
def test_a_search_makes_pairs_with_the_log_probabilities_that_dpo_takes_for_its_reference(
    ranking_alone, rollout, tmp_path
):
    """The impatient click is likelier and fails: what was measured prefers the right one, the ranking the other."""
    q = {"search__mix": 0.0, "search__exploration": 3.0} if ranking_alone else {"search__mix": 1.0}
    run = preferences(
        "agentq", tmp_path, rollout, rollout__groups_per_update=1, pairs__rounds=1, search__proposals=3,
        search__iterations=6, search__depth=5, search__threshold=0.5, search__most_actions=None, **q,
    )  # fmt: skip
    run.trainer.answer = answered
    pairs = [pair for pair in run._pairs_of(run.rounds[0]) if len(pair.messages) == 1]  # at the start page
    assert pairs and all(pair.task.startswith("miniwob/click-option#") for pair in pairs)
    for pair in pairs:
        sides = (pair.chosen.text, pair.rejected.text)
        expected = (right(pair.messages), impatient(pair.messages))
        assert sides == (expected[::-1] if ranking_alone else expected)
    rows = dpo_batch(run, pairs)
    assert set(rows["ref_chosen"]) == {-0.5 if ranking_alone else -1.5}
    assert set(rows["ref_rejected"]) == {-1.5 if ranking_alone else -0.5}
    assert {tuple(said) for _, said in rows["chosen"]} == {tuple(pair.chosen.text.encode()) for pair in pairs}


# ------------------------------------------------------------------------------------------------------- recorded steps


@pytest.fixture(scope="module")
def recording(rollout, tmp_path_factory) -> Path:
    """Four demonstrated episodes of two steps or more."""
    folder = tmp_path_factory.mktemp("recording")
    record_demonstrations(rollout, [Task("miniwob/click-option", seed) for seed in range(4)], folder)
    return folder


def answered_steps(
    out: Path, rollout: Any, recording: Path, checkpoint: str | None = None, updates: int = 2, **sampling: Any
) -> tuple[Any, list[dict], list[Any]]:
    """Updates on a recording, those after `checkpoint`: the run, and of each its rows and its answered steps."""
    given = {"policy.warm_up": None, "train.num_iterations": 1, "rollout.group_size": G}
    given |= {"train.updates": updates, "train.save_every": 2}
    given |= {"rollout.groups_per_update": 2, "sampling.recorded_steps": str(recording)}
    given |= {f"sampling.{name}": value for name, value in sampling.items()}
    run = RecordedStepsRun(load_recipe("hiconagent", overrides=given), out, resume=False)
    on(run, rollout, never)
    run.trainer = run._trainer(str(BASE))
    batches: list[dict[str, Any]] = []
    steps: list[Any] = []
    stock = run.trainer._generate_and_score_completions

    def watched(inputs: Any) -> dict[str, Any]:
        batches.append(stock(inputs))
        steps.append([t.steps[0] for t in run.trainer._trajectories])
        return batches[-1]

    run.trainer._generate_and_score_completions = watched
    run._train(checkpoint)
    return run, batches, steps


def test_answers_are_sampled_after_drawn_histories_and_trained_on_after_the_whole_one(rollout, recording, tmp_path):
    def prompts(batch: dict[str, Any]) -> set[tuple[int, ...]]:
        return {prompt for prompt, _ in rows_of(batch)}

    def whole(run: Any, step: Any) -> tuple[int, ...]:
        chat = run.trainer.processing_class.apply_chat_template(
            step.full, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return tuple(chat["input_ids"])

    run, batches, steps = answered_steps(tmp_path / "on", rollout, recording, history_ramp=0.001)
    for batch, of_update in zip(batches, steps, strict=True):
        assert prompts(batch) == {whole(run, step) for step in of_update}
    answered = [step for of_update in steps for step in of_update]
    assert any(tuple(step.prompt_ids) != whole(run, step) for step in answered)
    run, batches, steps = answered_steps(tmp_path / "off", rollout, recording, history_steepness=None)
    for batch, of_update in zip(batches, steps, strict=True):
        assert prompts(batch) == {tuple(step.prompt_ids) for step in of_update}


def test_only_the_drawn_steps_of_a_recording_are_trained_on(rollout, recording, tmp_path):
    def asked(number: int | None, name: str) -> list[set[str]]:
        _, _, steps = answered_steps(tmp_path / name, rollout, recording, training_steps=number)
        return [{step.full[0]["content"] for step in of_update} for of_update in steps]

    first, second = asked(2, "two")
    assert len(first) == 2 and first == second
    first, second = asked(None, "all")
    assert len(first) == len(second) == 2 and not first & second


def test_a_resumed_run_answers_the_same_steps_after_the_same_histories(rollout, recording, tmp_path):
    whole, _, steps = answered_steps(tmp_path / "run", rollout, recording, updates=3)
    checkpoint = str(tmp_path / "run" / "checkpoints" / "checkpoint-2")
    resumed, _, again = answered_steps(tmp_path / "run", rollout, recording, checkpoint, updates=3)
    (last,) = again
    assert [(step.messages, step.response_ids) for step in last] == [
        (step.messages, step.response_ids) for step in steps[2]
    ]
    for name, weight in whole.trainer.model.state_dict().items():
        assert torch.equal(resumed.trainer.model.state_dict()[name], weight), name
