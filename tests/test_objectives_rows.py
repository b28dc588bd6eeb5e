"""The trainer's half of an objective: a plan for a batch, and a loss over any subset of its rows."""

from __future__ import annotations

import math

import pytest
import torch
from test_objectives_switches import batch as batch_of

from webagent_core.objectives import OBJECTIVES, RowTensors, TrajectoryFacts, average_metrics, evaluate, load_objective
from webagent_core.objectives.evaluation import Attempt, pad_rows

torch.set_num_threads(1)


def rows_of(plan, masks, logps, **extra):
    return RowTensors(
        logp=logps,
        mask=masks,
        advantage=torch.tensor([row.advantage for row in plan.rows], dtype=logps.dtype),
        coefficient=torch.tensor([row.coefficient for row in plan.rows], dtype=logps.dtype),
        **extra,
    )


@pytest.fixture
def batch():
    """Three trajectories of 2, 1 and 3 steps in one group, an invalid one, and their (7, 5) rows."""
    generator = torch.Generator().manual_seed(0)
    facts = [
        TrajectoryFacts("a", 1.0, True, [3, 5]),
        TrajectoryFacts("a", 0.0, True, [2]),
        TrajectoryFacts("a", 0.0, True, [4, 0, 1]),
        TrajectoryFacts("a", None, False, [5]),
    ]
    lengths = [m for trajectory in facts for m in trajectory.tokens]
    masks = torch.arange(5) < torch.tensor(lengths)[:, None]
    draw = lambda: -torch.rand(7, 5, generator=generator, dtype=torch.float64) * 2  # noqa: E731
    return facts, masks, draw(), draw(), draw()


def test_micro_batches_of_any_size_add_up_to_the_batch(batch):
    facts, masks, logp, old, ref = batch
    objective = load_objective("webagent_r1", beta=0.1)
    plan = objective.plan(facts)

    def run(size):
        leaf = logp.clone().requires_grad_()
        total, metrics = 0.0, []
        for rows in torch.arange(7).split(size):
            whole = rows_of(plan, masks, leaf, old_logp=old, ref_logp=ref)
            part = RowTensors(**{name: value[rows] for name, value in vars(whole).items() if value is not None})
            out = objective.loss(part)
            out.loss.backward()
            total += out.loss.item()
            metrics.append(out.metrics)
        return total, leaf.grad, average_metrics(metrics)

    loss, gradient, metrics = run(7)
    for size in (1, 2, 3):
        other_loss, other_gradient, other_metrics = run(size)
        assert other_loss == pytest.approx(loss, abs=1e-14)
        assert torch.allclose(other_gradient, gradient, atol=1e-14, rtol=0)
        assert other_metrics == pytest.approx(metrics)
    assert set(metrics) == {"ratio", "clip_ratio", "policy_loss", "kl"}


def loss_and_gradients(recipe: str, trajectories: list[dict], rows_per_part: int | None) -> tuple[float, torch.Tensor]:
    """By `evaluate`, or by the objective's own plan and loss, part by part, as a trainer would."""
    if rows_per_part is None:
        result = evaluate(recipe, trajectories=trajectories)
        result.loss.backward()
        total = result.loss.item()
    else:
        objective = load_objective(recipe).fitted(trajectories[0]["steps"][0])
        read = [Attempt(objective, "", trajectory) for trajectory in trajectories]
        plan, steps, total = objective.plan([one.facts for one in read]), [s for one in read for s in one.steps], 0.0
        for at in range(0, len(steps), rows_per_part):
            part = slice(at, at + rows_per_part)
            rows = plan.rows[part]
            out = objective.loss(
                pad_rows(objective, steps[part], [row.advantage for row in rows], [row.coefficient for row in rows])
            )
            out.loss.backward()
            total += out.loss.item()
    return total, torch.cat([step["logp"].grad for t in trajectories for step in t["steps"]])


@pytest.mark.parametrize("recipe", [name for name, cls in OBJECTIVES.items() if "trajectories" in cls.inputs])
def test_cutting_and_reordering_a_batch_change_nothing(recipe):
    loss, gradient = loss_and_gradients(recipe, batch_of(recipe), None)
    for rows_per_part in (1, 4):
        parts_loss, parts_gradient = loss_and_gradients(recipe, batch_of(recipe), rows_per_part)
        assert parts_loss == pytest.approx(loss, abs=1e-12)
        assert torch.allclose(parts_gradient, gradient, atol=1e-12, rtol=0)
    backwards_loss, _ = loss_and_gradients(recipe, batch_of(recipe)[::-1], None)
    if recipe != "arpo":  # which member a replayed success replaces goes by the order of the group
        assert backwards_loss == pytest.approx(loss, abs=1e-12)


def test_garbage_under_the_mask_and_in_rows_left_out_touches_nothing(batch):
    facts, masks, logp, old, ref = batch
    objective = load_objective("webagent_r1", beta=0.1)
    plan = objective.plan(facts)
    results = []
    for garbage in (0.0, math.nan, math.inf, -math.inf):
        fill = masks.clone()
        fill[-1] = False  # the invalid trajectory's row
        leaf, old_, ref_ = (torch.where(fill, tensor, garbage) for tensor in (logp, old, ref))
        leaf.requires_grad_()
        out = objective.loss(rows_of(plan, masks, leaf, old_logp=old_, ref_logp=ref_))
        out.loss.backward()
        results.append((out.loss.item(), leaf.grad))
    for loss, gradient in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(gradient, results[0][1])


def test_a_batch_without_a_valid_trajectory_back_propagates_zeros():
    leaf = torch.full((3,), -1.0, requires_grad=True)
    result = evaluate("webagent_r1", trajectories=[{"group": "a", "reward": None, "steps": [{"logp": leaf}]}], beta=0.1)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert torch.equal(leaf.grad, torch.zeros(3))
    assert result.advantages == [0.0]


def test_a_missing_reference_is_named():
    objective = load_objective("webagent_r1")
    assert objective.uses_reference
    assert not load_objective("webagent_r1", beta=0.0).uses_reference
    plan = objective.plan([TrajectoryFacts("a", 1.0, True, [1]), TrajectoryFacts("a", 0.0, True, [1])])
    with pytest.raises(ValueError, match="webagent_r1: ref_logp is missing: kl = k3 with beta = 0.001"):
        objective.loss(rows_of(plan, torch.ones(2, 1), torch.zeros(2, 1)))
