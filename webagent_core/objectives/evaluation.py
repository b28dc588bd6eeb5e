"""`evaluate`: plain mappings to the facts and padded rows that an objective takes, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from webagent_core.objectives.base import Metric, Objective, PairTensors, Plan, RowTensors, TrajectoryFacts, spread

LOGPS = (
    "old_logp", "prox_logp", "behave_logp", "ref_logp",
    "compressed_logp", "compressed_old_logp", "compressed_ref_logp",
)  # fmt: skip
STAND_IN = {"compressed_old_logp": "compressed_logp"}  # on-policy where it is left out; the others: `logp`


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
    kind, batch = kinds[0], given[kinds[0]]
    if kind == "pairs":
        return evaluate_pairs(objective, batch)
    if kind == "responses":
        batch = [response if "steps" in response else {**response, "steps": [response]} for response in batch]
    given_names = {name for trajectory in batch for step in trajectory.get("steps") or [] for name in step}
    return evaluate_trajectories(objective.fitted(given_names), kind, batch)


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


def evaluate_pairs(objective: Objective, pairs: Sequence[Any]) -> Evaluation:
    sides: dict[str, list[Step]] = {"chosen": [], "rejected": []}
    for i, pair in enumerate(pairs):
        where = f"{objective.name}: pairs[{i}]"
        pair = pair if isinstance(pair, Mapping) else dict(zip(sides, pair, strict=False))
        for side, steps in sides.items():
            if side not in pair:
                raise ValueError(f"{where}.{side} is missing: a pair is a chosen and a rejected step")
            step = Step(f"{where}.{side}", pair[side], stored_sums=True)
            step.require(objective)
            steps.append(step)
    if not pairs:
        return Evaluation(torch.zeros((), requires_grad=True), [], {})
    tensors: dict[str, Tensor] = {}
    for side, steps in sides.items():
        tensors[f"{side}_logp"] = padded([step.logp for step in steps])
        tensors[f"{side}_mask"] = padded([step.mask for step in steps])
        tensors[f"{side}_ref_logp"] = torch.stack([step.summed("ref_logp") for step in steps])
    logp = tensors["chosen_logp"]
    out = objective.pair_loss(PairTensors(coefficient=logp.new_full((len(pairs),), 1 / len(pairs)), **tensors))
    return Evaluation(out.loss, [], out.metrics)


def padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


class Step:
    """One step's 1-D tensors, checked: all of one length, mask as bool."""

    def __init__(self, where: str, given: Mapping[str, Any], stored_sums: bool = False) -> None:
        self.where = where
        if not isinstance(given.get("logp"), Tensor):
            raise ValueError(f"{where}.logp is missing: a 1-D tensor with the log-probability of each token")
        self.logp = one_dim(f"{where}.logp", given["logp"])
        mask = given.get("mask")
        self.mask = torch.ones_like(self.logp, dtype=torch.bool) if mask is None else self.read("mask", mask) != 0
        self.logps = {}
        for name in LOGPS:
            if given.get(name) is None:
                continue
            if stored_sums and as_tensor(given[name]).dim() == 0:
                self.logps[name] = as_tensor(given[name]).to(self.logp)
            else:
                self.logps[name] = self.read(name, given[name])
        self.repeats_next = bool(given.get("repeats_next", False))
        self.values = given.get("values")

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    def read(self, name: str, value: Any) -> Tensor:
        tensor = one_dim(f"{self.where}.{name}", as_tensor(value).to(self.logp.device))
        if len(tensor) != len(self.logp):
            raise ValueError(f"{self.where}.{name} has {len(tensor)} entries, and logp has {len(self.logp)}")
        return tensor

    def require(self, objective: Objective) -> None:
        for name, why in objective.required_logps.items():
            if name not in self.logps:
                raise ValueError(f"{self.where}.{name} is missing: {why}")

    def summed(self, name: str) -> Tensor:
        """A log-probability of the whole response: its loss tokens' sum, or the stored number."""
        logp = self.logps[name]
        return logp if logp.dim() == 0 else torch.where(self.mask, logp, 0.0).sum()

    def picked(self, name: str, value: Any) -> Tensor:
        """A per-token tensor as it is at the loss tokens."""
        return self.read(name, value)[self.mask].detach()

    def value(self, at: str) -> Tensor:
        """The critic's values at the loss tokens, or its one value of the state before them."""
        if self.values is None:
            raise ValueError(f"{self.where}.values is missing: the critic's value of every {at}")
        if at == "token":
            return self.picked("values", self.values)
        of_state = as_tensor(self.values).detach().reshape(-1)
        if len(of_state) == len(self.logp) and self.mask.any():
            return of_state[self.mask][:1]
        if not len(of_state):
            raise ValueError(f"{self.where}.values is empty: the critic's value of the state is needed")
        return of_state[:1]

    def spread(self, advantage: float | Tensor) -> float | Tensor:
        """A planned advantage, laid out as `logp` is where it is per token."""
        return spread(advantage.to(self.logp), self.mask) if isinstance(advantage, Tensor) else advantage


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
        outcome = given.get("outcome")
        facts = TrajectoryFacts(
            group=str(given["group"]),
            reward=None if reward is None else float(reward),
            valid=bool(given.get("valid", True)),
            tokens=[step.tokens for step in self.steps],
            repeats_next=[step.repeats_next for step in self.steps],
            advantages=advantages,
            outcome=None if outcome is None else float(outcome),
            stored=bool(given.get("stored", False)),
        )
        if facts.usable:
            for step in self.steps:
                step.require(objective)
            if objective.value_at is not None and advantages is None:
                facts = replace(facts, values=[step.value(objective.value_at) for step in self.steps])
        self.facts = facts

    def spread(self, advantage: float | list[float | Tensor]) -> float | list[float | Tensor]:
        """A planned advantage, with its per-token tensors laid out as `logp` is."""
        if not isinstance(advantage, list):
            return advantage
        return [step.spread(a) for step, a in zip(self.steps, advantage, strict=True)]


def pad_rows(
    objective: Objective, steps: Sequence[Step], advantages: Sequence[float | Tensor], coefficients: Sequence[float]
) -> RowTensors:
    """All steps as one padded batch. A log-probability that a step leaves out stands in as its current one."""
    logps = {}
    for name in LOGPS:
        if name in objective.required_logps or any(name in step.logps for step in steps):
            rows = [step.logps.get(name, step.logps.get(STAND_IN.get(name), step.logp).detach()) for step in steps]
            logps[name] = padded(rows)
    logp = padded([step.logp for step in steps])
    if any(isinstance(advantage, Tensor) for advantage in advantages):
        per_token = [
            a if isinstance(a, Tensor) else torch.full((step.tokens,), a, dtype=torch.float64)
            for step, a in zip(steps, advantages, strict=True)
        ]
        advantage = padded([step.spread(a) for step, a in zip(steps, per_token, strict=True)])
    else:
        advantage = logp.new_tensor(advantages)
    return RowTensors(
        logp=logp,
        mask=padded([step.mask for step in steps]),
        advantage=advantage,
        coefficient=logp.new_tensor(coefficients),
        **logps,
    )


def as_tensor(value: Any) -> Tensor:
    """A tensor as it is; numbers and lists in double precision, whatever torch's default is."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def one_dim(where: str, tensor: Tensor) -> Tensor:
    if tensor.dim() != 1:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}; a 1-D tensor is needed")
    return tensor
