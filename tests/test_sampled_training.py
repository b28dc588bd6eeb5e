"""StepGRPOTrainer with a run's sampling, on hand-made episodes: what filter, replay, delay and resume do to rows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_step_grpo_trainer import G, Watched, chat, load, plain_logps, step_of, train, with_weights
from toy_policy import base, one_thread

from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.objectives import load_objective
from webagent_core.recipe import load_recipe
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.task_generation import NewTask
from webagent_core.tasks.task import Task

__all__ = ["base", "one_thread"]  # fixtures of this module too

# Of a trajectory, the number of its attempt at the task, and how many plays came before; None: the page broke.
Outcome = Callable[[Trajectory, int, int], float | None]
MIXED = (1.0, 0.0, 0.0, 1.0)


def sampling_of(name: str, groups: int = 2, **settings: Any) -> Sampling:
    sizes = {"rollout.group_size": G, "rollout.groups_per_update": groups}
    return Sampling(load_recipe(name, overrides=sizes | {k.replace("__", "."): v for k, v in settings.items()}))


class Toy:
    """Plays what it is asked for with responses of the policy; how an attempt goes is up to `outcome`."""

    def __init__(self, outcome: Outcome, still: bool = False) -> None:
        self.outcome, self.still = outcome, still  # still: the first action changes nothing on the page
        self.plays: list[list[Trajectory]] = []

    def __call__(self, rows: list[dict], generate: Callable) -> list[Trajectory]:
        tasks = [Task(row["task"], row["seed"]) for row in rows]
        trajectories = [Trajectory(task.name, task.seed, task.group) for task in tasks]
        for number in range(2):
            chats = [chat(t.task, t.seed % 7 + i, t.steps) for i, t in enumerate(trajectories)]
            for trajectory, messages, answer in zip(trajectories, chats, generate(chats), strict=True):
                step = step_of(messages, answer)
                step.observation = "the same" if self.still else f"page {number}"
                trajectory.steps.append(step)
        attempts: Counter[str] = Counter()
        for trajectory in trajectories:
            trajectory.reward = self.outcome(trajectory, attempts[trajectory.group], len(self.plays))
            trajectory.exit_status = ExitStatus.ENV_ERROR if trajectory.reward is None else ExitStatus.ANSWERED
            attempts[trajectory.group] += 1
        self.plays.append(trajectories)
        return trajectories


def run(
    tmp_path: Path, base: Path, sampling: Sampling, toy: Toy, updates: int, *, groups: int = 2, **kwargs: Any
) -> Watched:
    config = {"per_device_train_batch_size": groups * G, "max_steps": updates, **kwargs.pop("config", {})}
    objective = load_objective(sampling.recipe, **kwargs.pop("hyperparameters", {}))
    names = ["a task"] * (groups * 20)
    return train(tmp_path, base, toy, names=names, objective=objective, sampling=sampling, config=config, **kwargs)


def rows_of(batch: dict[str, torch.Tensor]) -> Counter:
    """(prompt, response) of the rows that are trained on."""
    rows: Counter = Counter()
    for i in range(len(batch["coefficients"])):
        if batch["coefficients"][i]:
            prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
            response = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
            rows[tuple(prompt), tuple(response)] += 1
    return rows


def steps_of(trajectories: list[Trajectory]) -> Counter:
    return Counter((tuple(step.prompt_ids), tuple(step.response_ids)) for t in trajectories for step in t.steps)


# --------------------------------------------------------------------------------------------------------- group filter


def odd_seeds_have_signal(trajectory: Trajectory, attempt: int, _: int) -> float:
    return MIXED[attempt] if trajectory.seed % 2 else 0.0


@pytest.mark.parametrize("name", ["asyncwebrl", "openwebrl", "zerogui"])
def test_flat_groups_are_replaced_by_fresh_tasks_and_never_become_rows(name, base, tmp_path):
    delay = {"sampling__max_staleness": 0} if name == "asyncwebrl" else {}
    toy, seen = Toy(odd_seeds_have_signal), []
    beta = {"beta": 0.0} if name == "zerogui" else {}
    trainer = run(
        tmp_path, base, sampling_of(name, 3, **delay), toy, 1, groups=3, hyperparameters=beta,
        on_trajectories=lambda t, advantages: seen.extend(zip(t, advantages, strict=True)),
    )  # fmt: skip
    played = [t for of_play in toy.plays for t in of_play]
    kept = [t for t in played if t.seed % 2]
    left_out = [t for t in played if t.seed % 2 == 0]
    assert len(kept) == 3 * G and left_out and len({t.group for t in played}) == len(played) / G
    assert rows_of(trainer.batches[0]) == steps_of(kept)
    assert Counter(t.group for t, _ in seen) == Counter(t.group for t in played)
    assert all((advantage is None) == (t.seed % 2 == 0) for t, advantage in seen)
    logged = trainer.state.log_history[0]
    groups = len(played) // G
    assert logged["groups/played"] == groups and logged["groups/dropped/flat"] == groups - 3
    assert logged["groups/kept"] == 3 and logged["groups/missing"] == 0
    assert logged["groups/refills"] == len(toy.plays) - 1 > 0
    assert logged["trajectories"] == len(played) and logged["rows"] == 3 * G * 2
    # How good the policy is shows in all that was played, not in the selection.
    assert logged["success"] == pytest.approx(sum(t.success for t in played) / len(played))


def test_a_batch_that_stays_short_trains_on_what_it_has(base, tmp_path):
    """One group of the eight that may be played has signal; a group that breaks is left out as well."""
    order: list[int] = []

    def outcome(trajectory: Trajectory, attempt: int, _: int) -> float | None:
        if trajectory.seed not in order:
            order.append(trajectory.seed)
        number = order.index(trajectory.seed)
        return MIXED[attempt] if number == 4 else None if number == 2 and attempt else 0.0

    toy = Toy(outcome)
    trainer = run(tmp_path, base, sampling_of("openwebrl"), toy, 1)
    played = [t for of_play in toy.plays for t in of_play]
    assert len(played) == 8 * G  # four times what is wanted
    assert rows_of(trainer.batches[0]) == steps_of([t for t in played if t.seed == order[4]])
    logged = trainer.state.log_history[0]
    assert logged["groups/kept"] == 1 and logged["groups/missing"] == 1 and logged["groups/dropped/lone"] == 1
    assert logged["trajectories"] == 8 * G and logged["invalid"] == G - 1
    assert trainer.no_signal is None


def test_training_ends_with_a_checkpoint_when_no_task_gives_signal(base, tmp_path):
    toy = Toy(lambda *_: 0.0)
    config = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 100, "weight_decay": 0.1}
    trainer = run(tmp_path, base, sampling_of("openwebrl"), toy, 20, config=config)
    assert trainer.no_signal.startswith("no group has signal in 3 batches in a row: 24 groups played, 24 groups flat")
    assert trainer.state.global_step == 6 and sum(map(len, toy.plays)) == 24 * G
    assert (tmp_path / "checkpoint-6" / "sampling-0.pt").is_file()
    assert (tmp_path / "checkpoint-6" / "trainer_state.json").is_file()
    first, last = trainer.micro_batches[0]["weights"], trainer.model.state_dict()
    assert all(torch.equal(last[name], tensor) for name, tensor in first.items())


def test_a_filter_that_wants_another_number_of_groups_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match="12 trajectories a rank, groups of 4, 1 ranks: not allowed .* wants 2 groups"):
        run(tmp_path, base, sampling_of("openwebrl", 2), Toy(odd_seeds_have_signal), 1, groups=3)


# --------------------------------------------------------------------------------------------------------------- replay


def test_a_stored_success_joins_a_group_that_failed_with_logps_of_the_policy_as_it_is(base, tmp_path):
    sampling = sampling_of("arpo", 1)
    task = Task("miniwob/click-tab", 5)
    sampling.tasks.restrict([task])
    toy = Toy(lambda _, attempt, play: MIXED[attempt] if play == 0 else 0.0)
    config = {"num_iterations": 2, "max_steps": 4}
    trainer = run(tmp_path, base, sampling, toy, 4, groups=1, config=config)
    first, second = trainer.batches
    successes = [t for t in toy.plays[0] if t.success]
    earlier = rows_of(second) & steps_of(successes)
    assert earlier.total() == 2  # one success of two steps ...
    assert rows_of(second).total() == G * 2  # ... in the place of one of the failures
    logged = [line for line in trainer.state.log_history if "replay/rows" in line]
    assert [(line["replay/stored"], line["replay/rows"]) for line in logged] == [(2, 0), (2, 2)]

    # Log-probabilities are those of the policy that starts the second update, for the stored rows too.
    now = with_weights(load(base), trainer.micro_batches[2]["weights"])
    before = with_weights(load(base), trainer.micro_batches[0]["weights"])
    compared = 0
    for trajectory in successes:
        for step in trajectory.steps:
            at = [i for i in range(len(second["coefficients"])) if same_row(second, i, step)]
            for i in at:
                stored = second["old_per_token_logps"][i][: len(step.response_ids)]
                torch.testing.assert_close(stored, plain_logps(now, step).detach(), rtol=1e-4, atol=1e-5)
                assert float((stored - plain_logps(before, step)).abs().max()) > 1e-2
                assert second["advantages"][i] == pytest.approx(1.5)  # one success of four
                compared += 1
    assert compared == 2


def same_row(batch: dict[str, torch.Tensor], i: int, step: Any) -> bool:
    prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
    response = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
    return bool(batch["coefficients"][i]) and prompt == step.prompt_ids and response == step.response_ids


def test_failures_have_no_rows_and_successes_of_recent_iterations_join(base, tmp_path):
    sampling = sampling_of("webgym", sampling__recency_window=2)
    toy = Toy(lambda _, attempt, play: MIXED[attempt] if play < 3 else 0.0)
    trainer = run(tmp_path, base, sampling, toy, 5)
    succeeded = [steps_of([t for t in of_play if t.success]) for of_play in toy.plays]
    assert [rows.total() for rows in succeeded] == [8, 8, 8, 0, 0]
    assert rows_of(trainer.batches[0]) == succeeded[0]
    for batch, earlier, now in zip(trainer.batches[1:], succeeded, succeeded[1:], strict=False):
        assert rows_of(batch) == earlier + now
    # A mean over all trajectories of the window, failures included.
    assert trainer.batches[0]["coefficients"].max() == pytest.approx(1 / 8)
    assert trainer.batches[1]["coefficients"].max() == pytest.approx(1 / 16)
    assert trainer.batches[3]["coefficients"].max() == pytest.approx(1 / 16)
    assert not trainer.batches[4]["coefficients"].any()
    assert [line["replay/rows"] for line in trainer.state.log_history[:5]] == [0, 8, 8, 8, 0]


def test_a_draw_of_rows_weighs_what_all_of_them_would(base, tmp_path):
    trainer = run(tmp_path, base, sampling_of("webgym", sampling__rows_per_update=5), Toy(odd_attempts_succeed), 1)
    (batch,) = trainer.batches
    assert rows_of(batch).total() == 5
    assert float(batch["coefficients"].sum()) == pytest.approx(4 * 2 / 8)


def odd_attempts_succeed(trajectory: Trajectory, attempt: int, _: int) -> float:
    return float(attempt % 2)


def test_an_action_that_changed_nothing_is_not_cloned(base, tmp_path):
    toy = Toy(odd_attempts_succeed, still=True)
    trainer = run(tmp_path, base, sampling_of("webgym"), toy, 1)
    last = [t.steps[1] for t in toy.plays[0] if t.success]
    assert rows_of(trainer.batches[0]) == Counter((tuple(s.prompt_ids), tuple(s.response_ids)) for s in last)


# ------------------------------------------------------------------------------------------------------------ staleness


def test_a_batch_waits_an_update_and_three_policies_are_in_its_loss(base, tmp_path):
    sampling = sampling_of("asyncwebrl", sampling__max_staleness=1)
    toy = Toy(lambda _, attempt, play: MIXED[attempt])
    trainer = run(tmp_path, base, sampling, toy, 4, config={"num_iterations": 2, "max_steps": 4})
    assert len(toy.plays) == 3  # two before the first update, one before the second
    first, second = trainer.batches
    assert rows_of(first) == steps_of(toy.plays[0]) and rows_of(second) == steps_of(toy.plays[1])
    lines = [line for line in trainer.state.log_history if "staleness" in line]
    assert [line["staleness"] for line in lines] == [0, 1]
    assert [line["trajectories"] for line in lines] == [4 * G, 2 * G]

    sampled = with_weights(load(base), trainer.micro_batches[0]["weights"])
    started = with_weights(load(base), trainer.micro_batches[2]["weights"])
    compared = 0
    for step in (step for trajectory in toy.plays[1] for step in trajectory.steps):
        i = next(i for i in range(len(second["coefficients"])) if same_row(second, i, step))
        behave, prox = (second[f"{name}_per_token_logps"][i][: len(step.response_ids)] for name in ("behave", "old"))
        torch.testing.assert_close(behave, plain_logps(sampled, step).detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(prox, plain_logps(started, step).detach(), rtol=1e-4, atol=1e-5)
        compared += float((behave - prox).abs().max()) > 1e-3
    assert compared > len(toy.plays[1])
    current = trainer.micro_batches[3]["weights"]  # of the second pass: it has moved on
    assert not torch.equal(current["model.norm.weight"], trainer.micro_batches[2]["weights"]["model.norm.weight"])
    by_pass = [line for line in trainer.state.log_history if "behave_weight" in line]
    assert by_pass[0]["behave_weight"] == pytest.approx(1.0, abs=1e-5)
    assert abs(by_pass[-1]["behave_weight"] - 1.0) > 1e-4


# --------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("name", ["asyncwebrl", "arpo", "webgym", "openwebrl", "zerogui", "webagent_r1"])
def test_a_resumed_run_plays_and_trains_as_one_that_was_not_interrupted(name, base, tmp_path):
    """Tasks, what the buffers hold and which rows are drawn, rows that wait for a later update, and so the weights."""
    drawn = {"sampling__rows_per_update": 6}
    settings = {"webgym": drawn, "zerogui": drawn | {"sampling__generated_tasks": 30}}.get(name, {})

    def outcome(trajectory: Trajectory, attempt: int, _: int) -> float:
        return float(sum(trajectory.steps[0].response_ids) % 4 == 0)  # so that it follows from all that went before

    def fresh(begins: bool) -> Sampling:
        sampling = sampling_of(name, **settings)
        if begins and name == "arpo":  # three tasks that come back
            sampling.tasks.restrict([Task("miniwob/click-tab", seed) for seed in (3, 6, 16)])
        if begins and name == "zerogui":
            asyncio.run(sampling.first_stage([NewTask(task) for task in sampling.start_pages()]))
        return sampling

    config = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear"}
    whole, toy = fresh(begins=True), Toy(outcome)
    uninterrupted = run(tmp_path / "whole", base, whole, toy, 6, config=config, model=str(base))
    rest, toy_again = fresh(begins=False), Toy(outcome)
    resumed = run(
        tmp_path / "rest", base, rest, toy_again, 6, config=config, model=str(base),
        resume=str(tmp_path / "whole" / "checkpoint-3"),
    )  # fmt: skip
    played, again = (
        [[(t.group, steps_of([t])) for t in of_play] for of_play in each.plays] for each in (toy, toy_again)
    )
    assert 0 < len(again) < len(played) and again == played[-len(again) :]
    for mine, theirs in zip(resumed.batches, uninterrupted.batches[3:], strict=True):
        assert rows_of(mine) == rows_of(theirs)
    assert any(rows_of(batch) for batch in resumed.batches)
    assert [m["loss"] for m in resumed.micro_batches] == [m["loss"] for m in uninterrupted.micro_batches[3:]]
    for name, tensor in uninterrupted.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
    assert rest.state_dict() == whole.state_dict()


def test_a_checkpoint_without_the_runs_sampling_is_refused(base, tmp_path):
    config = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    run(tmp_path, base, sampling_of("webgym"), Toy(odd_attempts_succeed), 2, config=config)
    (tmp_path / "checkpoint-1" / "sampling-0.pt").unlink()
    with pytest.raises(FileNotFoundError, match="sampling-0.pt is not there"):
        run(
            tmp_path, base, sampling_of("webgym"), Toy(odd_attempts_succeed), 2, config=config,
            resume=str(tmp_path / "checkpoint-1"),
        )  # fmt: skip
