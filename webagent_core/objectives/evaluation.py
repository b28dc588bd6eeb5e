"""`evaluate`: plain mappings to the facts and padded rows that an objective takes, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from webagent_core.objectives.base import Metric, Objective, Plan, RowTensors, TrajectoryFacts
from webagent_core.objectives.groups import usable

LOGPS = ("old_logp", "prox_logp", "behave_logp", "ref_logp")


@dataclass(frozen=True)
class Evaluation:
    """`advantages` holds, per trajectory, a float, or per step a float or 1-D tensor (0 where the mask is 0)."""

    loss: Tensor
    advantages: list[float | list[float | Tensor]]
    metrics: dict[str, Metric]
    plan: Plan | None = None


def evaluate_objective(objective: Objective, **given: list | None) -> Evaluation:
    kinds = [kind for kind, value in given.items() if value is not None]
    if len(kinds) != 1 or kinds[0] not in objective.inputs:
        got = " and ".join(kinds) or "nothing"
        raise ValueError(f"{objective.name}: takes {' or '.join(objective.inputs)}, and was given {got}")
    return evaluate_trajectories(objective, kinds[0], given[kinds[0]])


def evaluate_trajectories(objective: Objective, kind: str, trajectories: Sequence[Mapping[str, Any]]) -> Evaluation:
    read = [Attempt(objective, f"{objective.name}: {kind}[{i}]", t) for i, t in enumerate(trajectories)]
    plan = objective.plan([attempt.facts for attempt in read])
    steps = [step for attempt in read for step in attempt.steps]
    if not steps:
        return Evaluation(torch.zeros((), requires_grad=True), [0.0] * len(read), {}, plan)
    rows = pad_rows(objective, steps, [row.advantage for row in plan.rows], [row.coefficient for row in plan.rows])
    out = objective.loss(rows)
    advantages = [attempt.spread(one.advantage) for attempt, one in zip(read, plan.trajectories, strict=True)]
    return Evaluation(out.loss, advantages, out.metrics, plan)


class Step:
    """One step's 1-D tensors, checked: all of one length, mask as bool."""

    def __init__(self, where: str, given: Mapping[str, Any]) -> None:
        self.where = where
        if not isinstance(given.get("logp"), Tensor):
            raise ValueError(f"{where}.logp is missing: a 1-D tensor with the log-probability of each token")
        self.logp = one_dim(f"{where}.logp", given["logp"])
        mask = given.get("mask")
        self.mask = torch.ones_like(self.logp, dtype=torch.bool) if mask is None else self.read("mask", mask) != 0
        self.logps = {name: self.read(name, given[name]) for name in LOGPS if given.get(name) is not None}
        self.repeats_next = bool(given.get("repeats_next", False))
        self.values = given.get("values")

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    def read(self, name: str, value: Any) -> Tensor:
        tensor = one_dim(f"{self.where}.{name}", torch.as_tensor(value, device=self.logp.device))
        if len(tensor) != len(self.logp):
            raise ValueError(f"{self.where}.{name} has {len(tensor)} entries, and logp has {len(self.logp)}")
        return tensor

    def picked(self, name: str, value: Any) -> Tensor:
        """A per-token tensor as it is at the loss tokens."""
        return self.read(name, value)[self.mask].detach()

    def spread(self, at_loss_tokens: Tensor) -> Tensor:
        """The inverse: zeros where the mask is 0."""
        out = torch.zeros(len(self.logp), dtype=at_loss_tokens.dtype, device=at_loss_tokens.device)
        out[self.mask] = at_loss_tokens
        return out


class Attempt:
    """One trajectory's mapping, read into steps and facts."""

    def __init__(self, objective: Objective, where: str, given: Mapping[str, Any]) -> None:
        if "group" not in given:
            raise ValueError(f"{where}.group is missing: attempts with the same group are compared")
        steps = given.get("steps")
        if not isinstance(steps, Sequence) or isinstance(steps, str):
            raise ValueError(f"{where}.steps is missing: a list of steps")
        self.steps = [Step(f"{where}.steps[{j}]", step) for j, step in enumerate(steps)]
        reward = given.get("reward")
        advantages = given.get("advantages")
        if advantages is not None:
            if len(advantages) != len(self.steps):
                raise ValueError(f"{where}.advantages has {len(advantages)} entries for {len(self.steps)} steps")
            advantages = [
                step.picked("advantages", a) if isinstance(a, Tensor) and a.dim() else float(a)
                for step, a in zip(self.steps, advantages, strict=True)
            ]
        self.facts = TrajectoryFacts(
            group=str(given["group"]),
            reward=None if reward is None else float(reward),
            valid=bool(given.get("valid", True)),
            tokens=[step.tokens for step in self.steps],
            repeats_next=[step.repeats_next for step in self.steps],
            advantages=advantages,
        )
        if usable(self.facts):
            for step in self.steps:
                for name, why in objective.required_logps.items():
                    if name not in step.logps:
                        raise ValueError(f"{step.where}.{name} is missing: {why}")

    def spread(self, advantage: float | list[float | Tensor]) -> float | list[float | Tensor]:
        """A planned advantage, with its per-token tensors laid out as `logp` is."""
        if not isinstance(advantage, list):
            return advantage
        return [step.spread(a) if isinstance(a, Tensor) else a for step, a in zip(self.steps, advantage, strict=True)]


def pad_rows(
    objective: Objective, steps: Sequence[Step], advantages: Sequence[float | Tensor], coefficients: Sequence[float]
) -> RowTensors:
    """All steps as one padded batch. A log-probability that some steps leave out stands in as `logp`, detached."""

    def padded(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    logps = {}
    for name in LOGPS:
        if name in objective.required_logps or any(name in step.logps for step in steps):
            logps[name] = padded([step.logps.get(name, step.logp.detach()) for step in steps])
    logp = padded([step.logp for step in steps])
    return RowTensors(
        logp=logp,
        mask=padded([step.mask for step in steps]),
        advantage=padded(
            [
                step.spread(a).to(logp) if isinstance(a, Tensor) else torch.full_like(step.logp, a, requires_grad=False)
                for step, a in zip(steps, advantages, strict=True)
            ]
        ),
        coefficient=torch.tensor(coefficients, dtype=logp.dtype, device=logp.device),
        **logps,
    )


def one_dim(where: str, tensor: Tensor) -> Tensor:
    if tensor.dim() != 1:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}; a 1-D tensor is needed")
    return tensor
