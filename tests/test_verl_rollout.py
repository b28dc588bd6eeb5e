"""What the verl side makes of sessions that fail, of stale data, and of a stock trainer; on verl's real rollout."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")

from test_step_grpo_trainer import base, load  # noqa: E402, F401
from test_verl_trainer import moved  # noqa: E402, F401
from verl_harness import VerlSession  # noqa: E402

from verl_webagent.estimators import STOCK  # noqa: E402
from webagent_core.sampling.filters import NoSignal  # noqa: E402

pytestmark = pytest.mark.slow  # one trainer takes half a minute to start

LOOPS = Path(__file__).parent / "toy_loops.yaml"
GROUPS = 7
# Of seven groups of four: whole; one empty; all raise; one None; one hangs; all empty; one of four is left.
FAILURES = {"1/0": "empty", "2/*": "raise", "3/1": "none", "4/0": "hang", "5/*": "empty",
            "6/0": "raise", "6/1": "empty", "6/2": "none"}  # fmt: skip
INVALID = 1 + 4 + 1 + 1 + 4 + 3


def settings(model: Path, **changed: str) -> list[str]:
    values = {
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(LOOPS),
        "actor_rollout_ref.actor.optim.lr": "0.01",
        "actor_rollout_ref.actor.ppo_epochs": "1",
        "data.train_batch_size": str(GROUPS),
        "webagent.session_seconds": "20",
    }
    return [f"{name}={value}" for name, value in (values | changed).items()]


@pytest.mark.parametrize("mode", ["webagent_sync", "webagent_colocate"])
def test_sessions_that_fail_are_counted_and_in_no_statistic(mode, base, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TOY_LOOP", json.dumps(FAILURES))
    overrides = {"trainer.v1.trainer_mode": mode, "trainer.v1.colocate_async.num_warmup_batches": "0"}
    with VerlSession(settings(base, **overrides)) as session:
        session.start_rollout()
        metrics = session.step()
        after = session.step()
    assert metrics["webagent/trajectories"] == GROUPS * 4
    assert metrics["webagent/invalid"] == metrics["webagent/exit_status/env_error"] == INVALID
    assert metrics["webagent/exit_status/answered"] == GROUPS * 4 - INVALID
    assert metrics["webagent/dropped/invalid"] == INVALID
    assert metrics["webagent/dropped/lone"] == 1
    assert math.isfinite(metrics["actor/loss"]) and metrics["actor/grad_norm"] > 0
    # The invalid ones had reward 0 in their rows; the mean is over the others.
    assert metrics["webagent/return"] > 0.2
    assert math.isfinite(after["actor/loss"])  # and the run goes on
    assert after["webagent/trajectories"] == GROUPS * 4


def test_a_run_whose_environment_is_broken_ends_with_the_reason(base, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TOY_LOOP", json.dumps({f"{group}/*": "raise" for group in range(40)}))
    with VerlSession([*settings(base), "webagent.broken_batches=2"]) as session:
        session.start_rollout()
        metrics = session.step()
        assert metrics["webagent/invalid"] == GROUPS * 4
        assert "actor/loss" not in metrics  # no optimizer step without a row
        with pytest.raises(RuntimeError, match="2 batches in a row without one valid trajectory.*environment of group"):
            session.step()


@pytest.mark.parametrize("mode", ["webagent_sync", "webagent_colocate"])
def test_flat_groups_leave_the_batch_and_others_are_played_for_them(mode, base, monkeypatch):  # noqa: F811
    """ZeroGUI's dynamic sampling. Group 2's two valid members are equal: their rewards say as little."""
    flat = {"0/*": "flat", "1/*": "flat", "2/0": "raise", "2/1": "none", "2/2": "flat", "2/3": "flat"}
    monkeypatch.setenv("TOY_LOOP", json.dumps(flat))
    overrides = {"trainer.v1.trainer_mode": mode, "trainer.v1.colocate_async.num_warmup_batches": "0",
                 "data.train_batch_size": "4"}  # fmt: skip
    with VerlSession([*settings(base, **overrides), "actor_rollout_ref.rollout.n=4"], recipe="zerogui") as session:
        session.start_rollout()
        metrics = session.step()
    assert metrics["webagent/groups/kept"] == 4
    assert metrics["webagent/groups/dropped/flat"] == 3
    assert metrics["webagent/groups/played"] == 7
    assert metrics["webagent/trajectories"] == 7 * 4 and metrics["webagent/invalid"] == 2
    assert "webagent/dropped/flat" not in metrics  # none was left for the objective to drop
    assert metrics["actor/grad_norm"] > 0


def test_tasks_that_give_no_signal_end_the_run_with_the_reason(base, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TOY_LOOP", json.dumps({f"{index}/*": "flat" for index in range(400)}))
    with VerlSession([*settings(base), "data.train_batch_size=2"], recipe="zerogui") as session:
        session.start_rollout()
        with pytest.raises(NoSignal, match="no group has signal in 3 batches in a row: .* flat at reward 0 .miniwob/"):
            session.step()


def test_a_group_filter_does_not_take_a_broken_environment_for_tasks_without_signal(base, monkeypatch):  # noqa: F811
    monkeypatch.setenv("TOY_LOOP", json.dumps({f"{index}/*": "raise" for index in range(400)}))
    with VerlSession([*settings(base), "data.train_batch_size=2"], recipe="zerogui") as session:
        session.start_rollout()
        with pytest.raises(RuntimeError, match="groups in a row without one valid trajectory; .*environment of group"):
            session.step()


def test_a_stored_success_joins_a_group_that_failed_and_survives_a_checkpoint(base, monkeypatch):  # noqa: F811
    """ARPO, one task: of its first group one member succeeds, of the second none."""
    plans = {"0/0": "win", "0/*": "flat", "1/*": "flat", "2/*": "flat"}
    monkeypatch.setenv("TOY_LOOP", json.dumps(plans))
    one_task = "webagent.set=['tasks.names=[miniwob/click-tab]','sampling.candidate_tasks=1']"
    sizes = {"data.train_batch_size": "1", "actor_rollout_ref.rollout.n": "4"}
    with VerlSession([*settings(base, **sizes), one_task], recipe="arpo") as session:
        session.start_rollout()
        first, second = session.step(), session.step()
        state = session.trainer.own_state()
        third = session.step()
        session.trainer.load_own_state(state)
        assert session.trainer.own_state()["sampling"]["parts"]["replay"] == state["sampling"]["parts"]["replay"]
    assert first["webagent/replay/stored"] == 1 and first["webagent/replay/rows"] == 0
    assert first["actor/grad_norm"] > 0
    for step in (second, third):
        assert step["webagent/success"] == 0 and step["webagent/trajectories"] == 4  # a stored one is not a played one
        assert step["webagent/replay/rows"] > 0 and step["actor/grad_norm"] > 0
        assert not [name for name in step if name.startswith("training/rollout_")]  # nobody of now has sampled it


def test_failures_of_earlier_iterations_have_no_rows_and_still_count_as_trajectories(base, monkeypatch):  # noqa: F811
    """WebGym, one task an update: one success and three failures, then failures alone."""
    monkeypatch.setenv("TOY_LOOP", json.dumps({"0/0": "win", "0/*": "flat", "1/*": "flat"}))
    sizes = {"data.train_batch_size": "1", "actor_rollout_ref.rollout.n": "4"}
    with VerlSession(settings(base, **sizes), recipe="webgym") as session:
        session.start_rollout()
        first = session.step("loss_coefficient")
        alone = max(float(row.max()) for row in session.columns["loss_coefficient"].values())
        second = session.step("loss_coefficient")
        together = max(float(row.max()) for row in session.columns["loss_coefficient"].values())
    assert (first["webagent/success"], second["webagent/success"]) == (0.25, 0)
    assert second["webagent/trajectories"] == 4 and second["webagent/replay/rows"] == 2  # of the success: two steps
    assert second["actor/grad_norm"] > 0
    assert alone == pytest.approx(1 / 4) and together == pytest.approx(1 / 8)


COLOCATE = {"trainer.v1.trainer_mode": "webagent_colocate", "trainer.v1.colocate_async.num_warmup_batches": "2"}
SEPARATE = {
    "trainer.v1.trainer_mode": "webagent_separate",
    "trainer.v1.separate_async.num_warmup_batches": "2",
    "trainer.v1.separate_async.parameter_sync_step": "1",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "3",
    "actor_rollout_ref.rollout.nnodes": "1",
    "actor_rollout_ref.rollout.n_gpus_per_node": "1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "file",
    "ray_kwargs.ray_init.num_gpus": "2",
    "ray_kwargs.ray_init.num_cpus": "12",
}


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE], ids=["colocate", "separate"])
def test_stale_data_keep_the_log_probabilities_of_the_policies_that_they_are_of(mode, base, monkeypatch):  # noqa: F811
    """AsyncWebRL: behaviour, proximal and current policy differ, and staleness is logged."""
    monkeypatch.setenv("TOY_TOKENS", "48")
    sizes = {"data.train_batch_size": "3", "data.max_response_length": "48"}
    with VerlSession(settings(base, **sizes, **mode), recipe="asyncwebrl") as session:
        session.start_rollout()
        first, *others = [session.step() for _ in range(6)]
    assert first["actor/behave_weight"] == pytest.approx(1.0, abs=1e-3)
    assert max(m["training/off_policy/trajectory_staleness_worst/max"] for m in others) >= 1
    weights = [m["actor/behave_weight"] for m in others if "actor/behave_weight" in m]
    assert any(abs(weight - 1.0) > 1e-3 for weight in weights)  # the policy that played is not the one that is updated
    # The proximal policy is the one that starts the update: within it, nothing has moved yet.
    assert all(m["actor/ratio"] == pytest.approx(1.0, abs=1e-4) for m in others if "actor/ratio" in m)


def test_answers_that_an_update_cuts_off_are_resumed_with_the_new_weights(base, monkeypatch):  # noqa: F811
    """Of three groups in flight one is short: the others' answers are aborted for each update, and go on after it."""
    monkeypatch.setenv("TOY_LOOP", json.dumps({"0/*": "turns 1"} | {f"{group}/*": "turns 6" for group in range(1, 9)}))
    monkeypatch.setenv("TOY_TOKENS", "96")
    sizes = {"data.train_batch_size": "1", "data.max_response_length": "96"}
    with VerlSession(settings(base, **sizes, **COLOCATE), recipe="asyncwebrl") as session:
        session.start_rollout()
        steps = [session.step() for _ in range(4)]
    assert max(step["training/off_policy/trajectory_spans/max"] for step in steps) >= 2
    assert sum(step["webagent/invalid"] for step in steps) == 0
    assert all(math.isfinite(step["actor/loss"]) for step in steps if "actor/loss" in step)


def stock(name: str) -> dict[str, str]:
    """Settings of verl's own trainer for a recipe of ours: one optimizer step over all rows."""
    return {
        "trainer.v1.trainer_mode": "sync",
        "algorithm.adv_estimator": name,
        "actor_rollout_ref.actor.policy_loss.loss_mode": name,
        "actor_rollout_ref.actor.loss_agg_mode": "token-sum",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "40",
        "data.train_batch_size": "4",
        **UNCLIPPED,
    }


def sampler(name: str) -> dict[str, str]:
    return {
        "trainer.v1.sampler.custom_sampler.path": "pkg://verl_webagent.stock",
        "trainer.v1.sampler.custom_sampler.name": "SessionSampler",
        "+trainer.v1.sampler.sampler_kwargs.recipe": name,
        "+trainer.v1.sampler.sampler_kwargs.set": f"{WITHOUT.get(name, [])}",
    }


UNCLIPPED = {"actor_rollout_ref.actor.grad_clip": "1e9", "actor_rollout_ref.actor.optim.clip_grad": "1e9"}
# A stock trainer cannot weigh a KL term by row.
WITHOUT = {"zerogui": ["objective.beta=0"], "webagent_r1": ["objective.beta=0"]}


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_trainer_with_our_sampler_takes_the_gradient_step_of_ours(name, base, monkeypatch):  # noqa: F811
    """By configuration alone, on the same sampled sessions (they are seeded)."""
    # WebGym has no signal but a success.
    monkeypatch.setenv("TOY_LOOP", json.dumps({f"{group}/0": "win" for group in range(40)}))
    gradients = []
    ours = {"trainer.v1.trainer_mode": "webagent_sync", "data.train_batch_size": "4", **UNCLIPPED,
            "webagent.set": f"{WITHOUT.get(name, [])}"}  # fmt: skip
    for changed in (ours, stock(name) | sampler(name)):
        with VerlSession(settings(base, **changed), recipe=name) as session:
            session.start_rollout()
            metrics = session.step()
            gradients.append(session.gradient())
            assert metrics["webagent/return"] > 0
    first, second = gradients
    norm = float(torch.cat([tensor.flatten() for tensor in first.values()]).norm())
    difference = float(torch.cat([(first[key] - second[key]).flatten() for key in first]).norm())
    assert norm > 1e-4 and difference < 1e-6 * norm


def test_a_stock_trainer_without_the_sampler_is_refused(base):  # noqa: F811
    with VerlSession(settings(base, **stock("openwebrl")), recipe="openwebrl") as session:
        session.start_rollout()
        with pytest.raises(RuntimeError, match="'openwebrl' on a stock trainer needs the sampler"):
            session.step()
