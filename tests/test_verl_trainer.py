"""The verl trainer computes what the objectives say: the same numbers as `evaluate` and as the TRL trainer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")

from test_step_grpo_trainer import (  # noqa: E402
    MIXED,
    base,  # noqa: F401
    load,
    plain_logps,
    playing,
    replaying,
    train,
)
from verl_harness import VerlSession  # noqa: E402

from webagent_core.episode.trajectory import Trajectory  # noqa: E402
from webagent_core.objectives import Evaluation, Objective, load_objective  # noqa: E402
from webagent_core.objectives.evaluation import evaluate_objective  # noqa: E402

pytestmark = pytest.mark.slow  # one trainer takes half a minute to start

OBJECTIVES = {
    "webgym": {},
    "asyncwebrl": {},
    "openwebrl": {},
    "zerogui": {},
    "arpo": {},
    "uitars2": {"alpha": 1.0, "pretrain_updates": 0},
    "webrl": {},
    "webagent_r1": {"beta": 0.1},
    "hiconagent": {"hcpo": False},
}
# What the TRL trainer hosts so far: the others need a critic or the behaviour policy's log-probabilities.
ON_TRL = ("webgym", "openwebrl", "zerogui", "arpo", "webagent_r1")


def objective_of(name: str) -> Objective:
    return load_objective(name, **OBJECTIVES[name])


@pytest.fixture(scope="module")
def moved(base, tmp_path_factory) -> Path:  # noqa: F811
    """Folder of a policy that has moved away from the reference in `base`."""
    folder = tmp_path_factory.mktemp("moved")
    load(base, noise=0.05).save_pretrained(folder)
    for file in base.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    for file in base.glob("*.jinja"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def played(base, tmp_path_factory) -> list[Trajectory]:  # noqa: F811
    """MIXED episodes with responses that the policy sampled: one of 9 steps, broken ones, a flat group, a lone one."""
    return train(tmp_path_factory.mktemp("played"), base, playing(MIXED))._trajectories


def settings(model: Path, **changed: str) -> list[str]:
    values = {
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.actor.optim.lr": "0",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "0",
        "actor_rollout_ref.actor.optim.clip_grad": "1e9",
        "actor_rollout_ref.actor.grad_clip": "1e9",
        "actor_rollout_ref.actor.ppo_epochs": "1",
    }
    return [f"{name}={value}" for name, value in (values | changed).items()]


@pytest.fixture(scope="module")
def session(moved):
    with VerlSession(settings(moved)) as session:
        yield session


def keys_of(trajectories: list[Trajectory]) -> list[list[tuple[str, int, int]]]:
    """(group, session, turn) of every step, per trajectory."""
    counts: dict[str, int] = {}
    found = []
    for trajectory in trajectories:
        number = counts[trajectory.group] = counts.get(trajectory.group, -1) + 1
        found.append([(trajectory.group, number, turn) for turn in range(len(trajectory.steps))])
    return found


def columns_of(trajectories: list[Trajectory], model: torch.nn.Module, reference: torch.nn.Module) -> dict:
    """Log-probabilities as stale data have them: all four different; and values. By verl's column names."""
    generator = torch.Generator().manual_seed(5)
    columns: dict[str, dict] = {name: {} for name in ("old_log_probs", "rollout_log_probs", "ref_log_prob", "values")}
    with torch.no_grad():
        for trajectory, keys in zip(trajectories, keys_of(trajectories), strict=True):
            for step, key in zip(trajectory.steps, keys, strict=True):
                logp = plain_logps(model, step)
                for name, scale in (("old_log_probs", 0.2), ("rollout_log_probs", 0.4)):
                    columns[name][key] = logp + scale * torch.randn(logp.shape, generator=generator)
                columns["ref_log_prob"][key] = plain_logps(reference, step)
                columns["values"][key] = torch.rand(logp.shape, generator=generator)
    return columns


def plainly(trajectories: list[Trajectory], model: torch.nn.Module, objective: Objective, columns: dict) -> Evaluation:
    """`evaluate` on plain forward passes; the gradient ends up in `model`."""
    names = {"old_logp": "old_log_probs", "prox_logp": "old_log_probs", "behave_logp": "rollout_log_probs"}
    names |= {"ref_logp": "ref_log_prob"}
    batch = []
    for trajectory, keys in zip(trajectories, keys_of(trajectories), strict=True):
        steps = []
        for step, key in zip(trajectory.steps, keys, strict=True):
            given = {ours: columns[verls][key] for ours, verls in names.items()}
            values = {"values": objective.values(columns["values"][key])} if objective.uses_critic else {}
            steps.append({"logp": plain_logps(model, step)} | given | values)
        about = {"group": trajectory.group, "reward": trajectory.reward, "valid": trajectory.valid}
        batch.append(about | {"steps": steps})
    result = evaluate_objective(objective.fitted(()), trajectories=batch)
    model.zero_grad()
    result.loss.backward()
    return result


def fitting(name: str, trajectories: list[Trajectory]) -> list[Trajectory]:
    """The batch as the method takes it: HiconAgent's answers are single steps."""
    trajectories = copy.deepcopy(trajectories)
    if name == "hiconagent":
        for trajectory in trajectories:
            trajectory.steps = trajectory.steps[:1]
    return trajectories


def assert_same(got: dict[str, torch.Tensor], model: torch.nn.Module, digits: float = 1e-6) -> None:
    """Equal to `digits` of the gradient's norm, and not all zero."""
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(got) == set(expected)
    norm = float(torch.cat([tensor.flatten() for tensor in expected.values()]).norm())
    assert norm > 1e-4
    difference = float(torch.cat([(got[name] - expected[name]).flatten() for name in expected]).norm())
    assert difference < digits * norm


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradient_are_those_of_evaluate(name, session, base, moved, played):  # noqa: F811
    objective, trajectories = objective_of(name), fitting(name, played)
    model, reference = load(moved), load(base)
    columns = columns_of(trajectories, model, reference)
    expected = plainly(trajectories, model, objective, columns)
    metrics, gradient = session.update(trajectories, objective, columns)
    assert metrics["actor/loss"] == pytest.approx(float(expected.loss.detach()), rel=1e-5, abs=1e-7)
    assert_same(gradient, model)
    session.clear(session.batch)


@pytest.mark.parametrize("name", ON_TRL)
def test_trl_and_verl_take_the_same_gradient_step(name, session, base, moved, played, tmp_path):  # noqa: F811
    objective = objective_of(name)
    trl = train(tmp_path, base, replaying(played), objective=objective)
    model = load(moved)
    columns = {"ref_log_prob": columns_of(played, model, load(base))["ref_log_prob"]}
    metrics, gradient = session.update(played, objective, columns)
    assert metrics["actor/loss"] == pytest.approx(trl.micro_batches[0]["loss"], rel=1e-5, abs=1e-6)
    for parameter_name, parameter in model.named_parameters():
        parameter.grad = trl.gradients[0].get(parameter_name)
    assert_same(gradient, model, digits=3e-6)  # TRL's fused head rounds otherwise
    session.clear(session.batch)


@pytest.mark.parametrize(
    "micro",
    [
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 300},
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 4096},
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    ],
)
def test_micro_batches_change_nothing(micro, session, base, moved, played):  # noqa: F811
    objective = objective_of("webagent_r1")
    model = load(moved)
    columns = columns_of(played, model, load(base))
    plainly(played, model, objective, columns)
    _, gradient = session.update(played, objective, columns, **micro)
    assert_same(gradient, model)
    session.clear(session.batch)


def test_old_and_reference_log_probabilities_are_those_of_plain_forward_passes(session, moved, played):
    session.update(played, objective_of("webagent_r1"))
    model = load(moved)
    for name in ("old_log_probs", "ref_log_prob"):
        column = session.column(session.batch, name)
        for trajectory, keys in zip(played, keys_of(played), strict=True):
            for step, key in zip(trajectory.steps, keys, strict=True):
                assert torch.allclose(column[key], plain_logps(model, step).detach(), atol=2e-5)
    session.clear(session.batch)


def test_advantages_are_those_of_trajectories_however_many_rows_they_have(session, played):
    """A trajectory of 9 steps and one of 2 in a group: the z-scores are of (1, 0, 1), not of their rows."""
    session.update(played, objective_of("openwebrl"))
    advantages = session.column(session.batch, "advantages")
    z = (1 - 2 / 3) / torch.tensor([1.0, 0.0, 1.0]).std()
    assert all(float(advantages["uneven", 0, turn][0]) == pytest.approx(float(z), rel=1e-5) for turn in range(9))
    assert float(advantages["uneven", 1, 0][0]) == pytest.approx(-2 * float(z), rel=1e-5)
    session.clear(session.batch)


def test_verls_own_path_weighs_a_custom_estimator_by_rows(played):
    """What the trainer modes and the sampler are for: the same z-score, registered, sees rows as trajectories."""
    import numpy as np
    from verl import DataProto
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    @register_adv_est("plain_z_score")
    def z_score(token_level_rewards, response_mask, index=None, config=None, **_):
        score = token_level_rewards.sum(-1)
        advantage = ((score - score.mean()) / score.std()).unsqueeze(-1) * response_mask
        return advantage, advantage

    try:
        lengths, rewards = [9, 2, 3], [1.0, 0.0, 1.0]
        keys = [f"g_{i}_{turn}" for i, length in enumerate(lengths) for turn in range(length)]
        scores = torch.tensor([[r] for r, length in zip(rewards, lengths, strict=True) for _ in range(length)])
        data = DataProto.from_single_dict(
            {
                "token_level_rewards": scores,
                "response_mask": torch.ones_like(scores),
                "uid": np.array(["g"] * len(keys), dtype=object),
            }
        )
        out = compute_advantage_for_multi_trajectories(data, batch_keys=keys, adv_estimator="plain_z_score")
        wanted = (1 - 2 / 3) / float(torch.tensor(rewards).std())
        assert float(out.batch["advantages"][0, 0]) != pytest.approx(wanted, rel=0.2)
    finally:
        ADV_ESTIMATOR_REGISTRY.pop("plain_z_score")


@pytest.mark.parametrize("name", ["webagent_r1", "asyncwebrl", "uitars2"])
def test_two_ranks_take_the_same_step_as_one(name, base, moved, played):  # noqa: F811
    two = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=12"]
    objective, model = objective_of(name), load(moved)
    columns = columns_of(played, model, load(base))
    plainly(played, model, objective, columns)
    with VerlSession([*settings(moved), *two]) as session:
        _, gradient = session.update(played, objective, columns)
    assert_same(gradient, model)
