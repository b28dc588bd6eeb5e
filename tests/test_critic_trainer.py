"""CriticTrainer on hand-made episodes: policy and critic learn what the objective says of plain forward passes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_step_grpo_trainer import (
    GOOD,
    MIXED,
    PLAIN_STEPS,
    G,
    Gradients,
    Part,
    assert_same_gradient,
    assert_same_loss,
    assert_same_tensors,
    load,
    plain_logps,
    playing,
    replaying,
    settings,
    tasks,
    with_weights,
)
from toy_policy import base, one_thread
from transformers import AutoTokenizer

from trl_webagent import CriticConfig, CriticTrainer
from trl_webagent.critic_trainer import ValueModel
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.objectives import Evaluation, Objective, ValueTensors, load_objective
from webagent_core.objectives.evaluation import evaluate_objective
from webagent_core.objectives.value_losses import explained_variance
from webagent_core.objectives.value_pretraining import ValuePretraining

__all__ = ["base", "one_thread"]  # fixtures of this module too

# Two tasks of which one can be done and the other cannot, as any critic that reads can tell.
LEARNABLE = {
    "OK": [Part(1, 1.0), Part(2, 1.0), Part(3, 1.0), Part(1, 1.0)],
    "red": [Part(1, 0.0), Part(2, 0.0), Part(1, 0.0), Part(3, 0.0)],
}


def ppo(**changed: Any) -> Objective:
    """UI-TARS-2 with lambda above 0 for episodes of a few tokens, and the policy learning from the start."""
    return load_objective("uitars2", **({"alpha": 0.5, "pretrain_updates": 0} | changed))


OBJECTIVES = {"uitars2": ppo(), "webrl": load_objective("webrl", beta=0.5)}


class Watched(CriticTrainer):
    """The trainer, and what passed through it: weights, losses and gradients of policy and critic."""

    def __init__(self, *args: Any, noise: float = 0.0, **kwargs: Any) -> None:
        self.micro_batches: list[dict[str, Any]] = []
        self.critic_steps: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():  # a critic whose values differ; the real one begins with 0 everywhere
            for parameter in self.critic.parameters():
                parameter += noise * torch.randn(parameter.shape, generator=generator)
        self.critic_optimizer.register_step_pre_hook(self._watch)

    def _watch(self, *_: Any) -> None:
        named = dict(self.accelerator.unwrap_model(self.critic).named_parameters())
        self.critic_steps.append(
            {
                "weights": {name: p.detach().clone() for name, p in named.items()},
                "gradient": {name: p.grad.detach().clone() for name, p in named.items()},
            }
        )

    def training_step(self, model, inputs, num_items_in_batch):
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.micro_batches.append({"weights": weights, "loss": float(loss)})
        return loss


def train(
    tmp_path: Path,
    base: Path,
    play: Callable,
    objective: Objective,
    *,
    model: Any = None,
    names: Any = MIXED,
    resume: str | None = None,
    config: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Watched:
    trainer = Watched(
        load(base, noise=0.05) if model is None else model,
        objective=objective,
        play=play,
        args=settings(tmp_path, CriticConfig, **({"critic_learning_rate": 1e-2} | (config or {}))),
        train_dataset=tasks(names),
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
        callbacks=[gradients := Gradients()],
        **kwargs,
    )
    trainer.gradients = gradients.steps
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def played(base, tmp_path_factory) -> list[Trajectory]:
    """One batch of MIXED episodes with responses that the policy sampled."""
    return train(tmp_path_factory.mktemp("played"), base, playing(MIXED), OBJECTIVES["uitars2"])._trajectories


# ----------------------------------------------------------------------------------------------- the same, done plainly


def plain_outputs(critic: ValueModel, step: Step, at: str) -> torch.Tensor:
    """The critic's outputs before each sampled token, or at the end of the prompt: one sequence alone, no padding."""
    ids = step.prompt_ids + step.response_ids
    hidden = critic.body(torch.tensor([ids])).last_hidden_state[0, len(step.prompt_ids) - 1 : len(ids) - 1]
    outputs = critic.head(hidden).squeeze(-1)
    return outputs if at == "token" else outputs[:1]


def plainly(
    trajectories: list[Trajectory],
    objective: Objective,
    model: torch.nn.Module,
    reference: torch.nn.Module,
    critic: ValueModel,
    old: torch.nn.Module | None = None,
) -> Evaluation:
    """`evaluate` on plain forward passes; the gradient ends up in `model`."""
    batch = []
    for trajectory in trajectories:
        steps = []
        for step in trajectory.steps:
            with torch.no_grad():
                outputs = plain_outputs(critic, step, objective.value_at)
                given = {"ref_logp": plain_logps(reference, step), "values": objective.values(outputs)}
                if old is not None:
                    given["old_logp"] = plain_logps(old, step)
            steps.append(given | {"logp": plain_logps(model, step)})
        batch.append(
            {"group": trajectory.group, "reward": trajectory.reward, "valid": trajectory.valid, "steps": steps}
        )
    result = evaluate_objective(objective, trajectories=batch)
    model.zero_grad()
    result.loss.backward()
    return result


def plain_value_gradient(
    trajectories: list[Trajectory], result: Evaluation, objective: Objective, critic: ValueModel
) -> tuple[float, dict[str, torch.Tensor]]:
    """The critic's loss and gradient on the value targets of an evaluation, a row at a time."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    total = torch.zeros(())
    for step, row in zip(steps, result.plan.rows, strict=True):
        if row.value_target is None:
            continue
        outputs = plain_outputs(critic, step, objective.value_at)
        target = torch.as_tensor(row.value_target).to(outputs).expand_as(outputs)
        given = {"outputs": outputs, "target": target}
        if objective.value_at == "token":
            given = {name: tensor.unsqueeze(0) for name, tensor in given.items()}
            given["mask"] = torch.ones_like(given["outputs"], dtype=torch.bool)
        total = (
            total + objective.value_loss(ValueTensors(coefficient=torch.tensor([row.value_coefficient]), **given)).loss
        )
    critic.zero_grad()
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in critic.named_parameters()}


def critic_with(base: Path, weights: dict[str, torch.Tensor]) -> ValueModel:
    critic = ValueModel.like(str(base))
    critic.load_state_dict(weights)
    return critic


# ---------------------------------------------------------------------------------------------------- loss and gradient


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_policy_and_critic_have_the_loss_and_gradient_of_evaluate(base, tmp_path, played, name, rows):
    """A batch with a flat group, a lone trajectory and broken ones, padded on both sides, two passes of each."""
    objective = OBJECTIVES[name]
    config = PLAIN_STEPS | {"num_iterations": 2, "max_steps": 2, "critic_passes": 2, "max_rows_per_forward": rows}
    trainer = train(tmp_path, base, replaying(played), objective, noise=0.1, config=config)
    assert {t.valid for t in played} == {True, False}
    first, second = trainer.micro_batches
    start, reference = with_weights(load(base), first["weights"]), load(base)
    before, between = (critic_with(base, step["weights"]) for step in trainer.critic_steps)

    expected = plainly(played, objective, start, reference, before)
    credits = [a for t in expected.advantages for step in t for a in torch.as_tensor(step).reshape(-1).tolist()]
    assert len({round(a, 6) for a in credits}) > 10  # credit differs from step to step
    assert_same_loss(first["loss"], expected)
    assert_same_gradient(trainer.gradients[0], start)

    # The critic learns from the same plan, twice; the policy's second pass still has the first one's advantages.
    first_loss, gradient = plain_value_gradient(played, expected, objective, before)
    assert_same_tensors(trainer.critic_steps[0]["gradient"], gradient)
    second_loss, gradient = plain_value_gradient(played, expected, objective, between)
    assert_same_tensors(trainer.critic_steps[1]["gradient"], gradient)
    assert second_loss < first_loss

    moved = with_weights(load(base), second["weights"])
    expected = plainly(played, objective, moved, reference, before, old=start)
    assert_same_loss(second["loss"], expected)
    assert_same_gradient(trainer.gradients[1], moved)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_metrics_of_the_critic_are_those_of_the_batch(base, tmp_path, played, name):
    objective, told = OBJECTIVES[name], []
    trainer = train(
        tmp_path, base, replaying(played), objective, noise=0.1, on_trajectories=lambda _, given: told.extend(given)
    )
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    critic = critic_with(base, trainer.critic_steps[0]["weights"])
    plan = plainly(played, objective, start, load(base), critic).plan
    rows = plan.rows
    for trajectory, planned, given in zip(played, plan.trajectories, told, strict=True):
        expected = [float(torch.as_tensor(row.advantage).double().mean()) for row in planned.rows]
        assert given == (pytest.approx(expected, abs=1e-5) if trajectory.valid else None)
    values, targets = [], []
    for step, row in zip([step for t in played for step in t.steps], rows, strict=True):
        if row.value_coefficient:
            outputs = plain_outputs(critic, step, objective.value_at).detach()
            values.append(objective.values(outputs).double())
            targets.append(torch.as_tensor(row.value_target).double().expand_as(outputs))
    values, targets = torch.cat(values), torch.cat(targets)
    if name == "uitars2":
        losses = 0.5 * (values - targets) ** 2
    else:
        losses = -(targets * values.log() + (1 - targets) * (1 - values).log())
    logged = trainer.state.log_history[0]
    assert logged["explained_variance"] == pytest.approx(
        1 - float((targets - values).var() / targets.var()), rel=1e-4, abs=1e-5
    )
    assert logged["value_loss"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert logged["value_mean"] == pytest.approx(float(values.mean()), rel=1e-4)
    norm = torch.cat([g.flatten() for g in trainer.critic_steps[0]["gradient"].values()]).norm()
    assert logged["value_grad_norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_of_the_policy_do_not_change_what_it_learns(base, tmp_path, played, name):
    objective, config = OBJECTIVES[name], PLAIN_STEPS | {"num_iterations": 2, "max_steps": 2}
    split = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": G, "max_rows_per_forward": 3}
    whole, parts = (
        train(tmp_path, base, replaying(played), objective, noise=0.1, config=config | changed)
        for changed in ({}, split)
    )
    assert len(whole.micro_batches) == 2 and len(parts.micro_batches) == 8
    for one, other in zip(whole.gradients, parts.gradients, strict=True):
        assert_same_tensors(other, one)
    assert_same_tensors(parts.critic_steps[0]["gradient"], whole.critic_steps[0]["gradient"])


def test_each_step_of_the_critics_optimizer_stands_for_the_whole_batch(base, tmp_path, played):
    """Where the weights stand still, the mean of a pass, weighed by rows, is the gradient of all rows at once."""
    still = {"critic_learning_rate": 1e-12, "weight_decay": 0.0}
    whole = train(tmp_path, base, replaying(played), OBJECTIVES["webrl"], noise=0.1, config=still)
    parts = train(
        tmp_path,
        base,
        replaying(played),
        OBJECTIVES["webrl"],
        noise=0.1,
        config=still | {"critic_rows_per_step": 8, "critic_passes": 2},
    )
    rows = sum(len(t.steps) for t in played if t.valid)
    sizes = [8] * (rows // 8) + [rows % 8]
    assert rows % 8 and len(parts.critic_steps) == 2 * len(sizes)
    first_pass, second_pass = parts.critic_steps[: len(sizes)], parts.critic_steps[len(sizes) :]
    for steps in (first_pass, second_pass):
        mean = {
            name: sum(step["gradient"][name] * size for step, size in zip(steps, sizes, strict=True)) / rows
            for name in steps[0]["gradient"]
        }
        assert_same_tensors(mean, whole.critic_steps[0]["gradient"])
    weight = "head.weight"
    assert not torch.equal(first_pass[0]["gradient"][weight], second_pass[0]["gradient"][weight])  # drawn anew


def test_the_critics_gradient_is_clipped_by_its_own_norm(base, tmp_path, played):
    free = train(tmp_path, base, replaying(played), OBJECTIVES["webrl"], noise=0.1)
    norm = free.state.log_history[0]["value_grad_norm"]
    clipped = train(
        tmp_path, base, replaying(played), OBJECTIVES["webrl"], noise=0.1, config={"max_grad_norm": norm / 4}
    )
    for name, gradient in clipped.critic_steps[0]["gradient"].items():
        torch.testing.assert_close(4 * gradient, free.critic_steps[0]["gradient"][name], rtol=1e-3, atol=1e-6)
    assert clipped.state.log_history[0]["value_grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_the_critic_begins_with_the_policys_weights_and_says_0(base, tmp_path, played):
    policy = load(base, noise=0.05)
    given = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    trainer = train(tmp_path, base, replaying(played), OBJECTIVES["uitars2"], model=policy)
    first = trainer.critic_steps[0]["weights"]
    for name, tensor in given.items():
        assert torch.equal(first[f"body.{name}"], tensor), name
    assert not first["head.weight"].any() and trainer.state.log_history[0]["value_mean"] == 0.0
    read = ValueModel.like(str(base)).state_dict()
    for name, tensor in load(base).model.state_dict().items():
        assert torch.equal(read[f"body.{name}"], tensor), name


def test_a_response_without_tokens_and_an_episode_without_steps_are_taken(base, tmp_path, played):
    odd = copy.deepcopy(played)
    odd[0].steps[4].response_ids = []
    odd[1].steps, odd[1].exit_status, odd[1].reward = [], ExitStatus.CONTEXT_OVERFLOW, 0.0
    for objective in OBJECTIVES.values():
        trainer = train(tmp_path, base, replaying(odd), objective, noise=0.1)
        start = with_weights(load(base), trainer.micro_batches[0]["weights"])
        critic = critic_with(base, trainer.critic_steps[0]["weights"])
        if objective.value_at == "token":
            expected = plainly(odd, objective, start, load(base), critic)
            assert_same_loss(trainer.micro_batches[0]["loss"], expected)
            assert_same_gradient(trainer.gradients[0], start)
        assert all(torch.isfinite(tensor).all() for tensor in trainer.critic.state_dict().values())


def test_a_batch_of_invalid_trajectories_moves_neither_policy_nor_critic(base, tmp_path):
    broken = {name: [Part(2, None, ExitStatus.ENV_ERROR)] * G for name in ("a", "b")}
    trainer = train(
        tmp_path,
        base,
        playing(GOOD, broken, GOOD),
        OBJECTIVES["webrl"],
        names=["a", "b"] * 3,
        config={"per_device_train_batch_size": 2 * G, "max_steps": 3, "weight_decay": 0.1},
    )
    assert len(trainer.critic_steps) == 2  # of the first and of the third batch
    weights = [m["weights"] for m in trainer.micro_batches]
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
    assert "explained_variance" not in trainer.state.log_history[1]


# --------------------------------------------------------------------------------------------------- value pre-training


def test_while_the_policy_waits_its_weights_stay_and_the_critic_learns_to_tell_the_tasks_apart(base, tmp_path):
    updates = 6
    config = {
        "per_device_train_batch_size": 2 * G,
        "max_steps": updates + 1,
        "weight_decay": 0.1,
        "critic_pretrain_passes": 8,
        "critic_rows_per_step": 4,
    }
    trainer = train(
        tmp_path,
        base,
        playing(*[LEARNABLE] * (updates + 1)),
        ppo(pretrain_updates=updates),
        names=["OK", "red"] * (updates + 1),
        config=config,
    )
    weights = [m["weights"] for m in trainer.micro_batches]
    for later in weights[1:]:  # at the start of each update, so the last one shows what the waiting left
        assert all(torch.equal(later[name], weights[0][name]) for name in later)
    after = trainer.model.state_dict()
    assert not all(torch.equal(after[name], weights[0][name]) for name in after)
    logs = trainer.state.log_history[: updates + 1]
    explained = [log["explained_variance"] for log in logs]
    assert abs(explained[0]) < 1e-6 and explained[-1] > 0.8, explained
    assert [log["loss"] for log in logs[:updates]] == [0.0] * updates and logs[updates]["rows"] > 0
    per_pass = [-(-sum(part.steps for group in LEARNABLE.values() for part in group) // 4)]
    assert len(trainer.critic_steps) == per_pass[0] * (8 * updates + 1)  # one pass once the policy trains


def test_pre_training_ends_early_once_the_explained_variance_no_longer_rises(base, tmp_path):
    """At most 20 batches; the toy is learned in a few, and the policy moves in the batch after that."""
    config = {
        "per_device_train_batch_size": 2 * G,
        "max_steps": 8,
        "critic_pretrain_passes": 8,
        "critic_rows_per_step": 4,
        "critic_min_gain": 0.05,
    }
    trainer = train(
        tmp_path,
        base,
        playing(*[LEARNABLE] * 8),
        ppo(pretrain_updates=20),
        names=["OK", "red"] * 8,
        config=config,
    )
    explained = [log["explained_variance"] for log in trainer.state.log_history[:8]]
    expected, waited = ValuePretraining(0.05), 0
    while not expected.over:
        expected.add(explained[waited])
        waited += 1
    assert 3 <= waited < 8
    weights = [m["weights"] for m in trainer.micro_batches] + [trainer.model.state_dict()]
    moved = [
        not all(torch.equal(before[name], after[name]) for name in before)
        for before, after in zip(weights, weights[1:], strict=False)
    ]
    assert moved == [False] * waited + [True] * (8 - waited)


def test_pre_training_is_over_when_two_batches_bring_no_gain_on_the_best_before_them():
    pretraining = ValuePretraining(min_gain=0.05)
    for value, over in [(-1.0, False), (0.1, False), (0.3, False), (None, False), (0.34, False), (0.33, True)]:
        pretraining.add(value)
        assert pretraining.over is over, (value, pretraining.explained)
    hopeless = ValuePretraining(min_gain=0.05, explained=[-0.1] * 10)
    assert not hopeless.over  # it has not begun to learn: the objective's bound ends it
    assert not ValuePretraining(None, explained=[0.5] * 10).over
    with pytest.raises(ValueError, match=r"^min_gain = 2 .*0 to 1"):
        ValuePretraining(min_gain=2)


def test_explained_variance_of_perfect_constant_and_inverted_values():
    targets = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(targets, targets) == 1.0
    assert explained_variance(torch.full((4,), 0.7), targets) == pytest.approx(0.0)
    assert explained_variance(targets + 5.0, targets) == pytest.approx(1.0)  # an offset is no matter of variance
    assert explained_variance(1 - targets, targets) == pytest.approx(-3.0)
    assert explained_variance(targets, torch.ones(4)) is None


# ---------------------------------------------------------------------------------------------------- resume, processes


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_has_the_critic_and_its_optimizer_as_if_it_had_not_been_interrupted(base, tmp_path, name):
    objective = ppo(pretrain_updates=2) if name == "uitars2" else OBJECTIVES[name]
    config = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 1.0}
    config |= {"per_device_train_batch_size": 2 * G, "critic_rows_per_step": 5, "critic_passes": 2}
    config |= {"critic_min_gain": 1.0}
    names = ["OK", "red"] * 5
    whole = train(
        tmp_path / "whole", base, playing(*[LEARNABLE] * 5), objective, model=str(base), names=names, config=config
    )
    rest = train(
        tmp_path / "rest",
        base,
        playing(*[LEARNABLE] * 2),
        objective,
        model=str(base),
        names=names,
        config=config,
        resume=str(tmp_path / "whole" / "checkpoint-3"),
    )
    assert [m["loss"] for m in rest.micro_batches] == [m["loss"] for m in whole.micro_batches[3:]]
    assert all(m["loss"] for m in rest.micro_batches)  # the policy no longer waits
    for column in ("loss", "value_loss", "explained_variance", "value_grad_norm", "success"):
        one, other = ([log.get(column) for log in t.state.log_history if "loss" in log] for t in (whole, rest))
        assert len(one) == 5 and one == other, column
    for one, other in ((whole.model, rest.model), (whole.critic, rest.critic)):
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())
    moments, again = (t.critic_optimizer.state_dict()["state"] for t in (whole, rest))
    assert moments and all(torch.equal(moments[i][k], again[i][k]) for i in moments for k in moments[i])
    assert whole.value_pretraining == rest.value_pretraining


def test_a_run_whose_pre_training_ended_early_is_resumed_without_waiting(base, tmp_path):
    config = {"critic_min_gain": 0.05, "critic_learning_rate": 1e-3}
    trainer = train(tmp_path, base, playing(MIXED), ppo(pretrain_updates=9), config=config)
    assert trainer.objective.pretrain_updates == 9
    trainer.load_critic_state(trainer.critic_state() | {"pretraining": {"explained": [0.1, 0.5, 0.5, 0.5]}})
    assert trainer.objective.pretrain_updates == 0


def test_a_checkpoint_without_a_critic_is_refused_by_name(base, tmp_path):
    config = {"save_strategy": "steps", "save_steps": 1}
    train(tmp_path, base, playing(MIXED), OBJECTIVES["webrl"], model=str(base), config=config)
    (tmp_path / "checkpoint-1" / "critic.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"critic\.pt is missing"):
        train(
            tmp_path,
            base,
            playing(MIXED),
            OBJECTIVES["webrl"],
            model=str(base),
            config=config,
            resume=str(tmp_path / "checkpoint-1"),
        )


@pytest.mark.slow
def test_two_processes_train_the_critic_that_one_trains(base, tmp_path, played):
    """Twelve trajectories over two ranks, six each, of unequal rows."""
    batch = [t for t in played if t.group != "lone"]
    (tmp_path / "played.pickle").write_bytes(pickle.dumps(batch))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", __file__, str(base), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    alone = train(tmp_path, base, replaying(batch, batch), noise=0.1, **of_two(12))
    for column in ("explained_variance", "value_loss", "value_mean", "value_grad_norm", "loss"):
        for rank in ranks:
            assert rank["log"][column] == pytest.approx(alone.state.log_history[1][column], rel=1e-4), column
    norms = [float(parameter.detach().norm()) for parameter in alone.critic.parameters()]
    for rank in ranks:
        assert rank["norms"] == pytest.approx(norms, rel=1e-5)


def of_two(trajectories: int) -> dict[str, Any]:
    config = PLAIN_STEPS | {"per_device_train_batch_size": trajectories, "max_steps": 2, "max_rows_per_forward": 3}
    return {"objective": OBJECTIVES["uitars2"], "names": ["uneven", "flat", "shaped"] * 2, "config": config}


def one_of_two_processes(base: Path, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    batch = pickle.loads((folder / "played.pickle").read_bytes())
    mine = batch[6 * rank : 6 * rank + 6]
    trainer = train(folder, base, replaying(mine, mine), noise=0.1, **of_two(6))
    norms = [float(parameter.detach().norm()) for parameter in trainer.critic.parameters()]
    (folder / f"rank{rank}.json").write_text(json.dumps({"norms": norms, "log": trainer.state.log_history[1]}))


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"critic_learning_rate": 0.0}, r"^critic_learning_rate = 0\.0 .*> 0"),
        ({"critic_passes": 0}, r"^critic_passes = 0 .*from 1"),
        ({"critic_pretrain_passes": 0}, r"^critic_pretrain_passes = 0 .*None.*from 1"),
        ({"critic_rows_per_step": -1}, r"^critic_rows_per_step = -1 .*None.*from 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message) as error:
        settings(tmp_path, CriticConfig, **changed)
    assert "\n" not in str(error.value)


def test_a_method_without_a_critic_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match=r"^objective = webagent_r1 .*no critic.*StepGRPOTrainer"):
        train(tmp_path, base, playing(MIXED), load_objective("webagent_r1"))


if __name__ == "__main__":
    one_of_two_processes(Path(sys.argv[1]), Path(sys.argv[2]))
