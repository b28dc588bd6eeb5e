"""What every objective takes and gives: facts about trajectories in, a plan for their rows out, then a loss over rows.

The two halves are apart because a trainer needs them at different times. Statistics (group baselines, denominators)
look at a whole batch of trajectories, once. The loss looks at rows of log-probabilities, and may be taken over any
subset of them: everything that depends on the batch already sits in each row's advantage and coefficient, so the
losses of micro-batches add up to the loss of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor


@dataclass(frozen=True)
class TrajectoryFacts:
    """What the statistics need to know of one trajectory. Steps are in the order in which they were played."""

    group: str
    reward: float | None  # None: never scored, so the trajectory is not valid
    valid: bool
    tokens: Sequence[int]  # loss tokens m of each step; its length is the number of steps T
    repeats_next: Sequence[bool] | None = None  # per step: the next screenshot equals this one (WebGym)
    values: Sequence[Tensor] | None = None  # per step: the critic's values at its m loss tokens, or one for the state
    advantages: Sequence[float | Tensor] | None = None  # per step: replaces the estimator; a tensor has m entries
    outcome: float | None = None  # what the task itself says where the reward is shaped; filters and replay look at it
    stored: bool = False  # a success of an earlier batch, offered to its group (ARPO's replay)

    @property
    def usable(self) -> bool:
        """Valid, and with something that tells how good it was: a reward, or advantages of the caller's own."""
        return self.valid and (self.reward is not None or self.advantages is not None)

    @property
    def score(self) -> float | None:
        return self.reward if self.outcome is None else self.outcome


@dataclass(frozen=True)
class RowPlan:
    """What the loss needs to know of one step: how good it was and how much its tokens weigh in the batch."""

    advantage: float | Tensor  # a tensor has one entry per loss token
    coefficient: float  # 0.0: the row is not part of the loss and needs no forward pass
    value_target: float | Tensor | None = None  # what the critic should have said: of the state, or per loss token
    value_coefficient: float = 0.0


@dataclass(frozen=True)
class TrajectoryPlan:
    """`advantage` is one float, or one entry per step where the method (or the caller) tells steps or tokens apart."""

    advantage: float | list[float | Tensor]
    rows: list[RowPlan]
    # Why it left the batch: "invalid", "lone" (no one to compare with), "flat", "replaced" (by a stored success),
    # "stored" (a stored success that was not needed) or "short".
    dropped: str | None = None

    @property
    def kept(self) -> bool:
        return self.dropped is None

    @property
    def told(self) -> float | list[float] | None:
        """The advantage for a log: one number, or one a step, the mean over its tokens; None: it left the batch."""
        if not self.kept:
            return None
        if not isinstance(self.advantage, list):
            return self.advantage
        steps = [torch.as_tensor(of_step, dtype=torch.float64).reshape(-1) for of_step in self.advantage]
        return [float(of_step.mean()) if len(of_step) else 0.0 for of_step in steps]


@dataclass(frozen=True)
class Plan:
    """One optimizer step's trajectories, in the order in which they were given."""

    trajectories: list[TrajectoryPlan]

    @property
    def rows(self) -> list[RowPlan]:
        """Every step of every trajectory, in order, rows with coefficient 0 included."""
        return [row for trajectory in self.trajectories for row in trajectory.rows]


@dataclass
class RowTensors:
    """M rows padded to L tokens. Whatever stands where `mask` is 0, NaN included, touches neither loss nor gradient.

    The log-probabilities are (M, L): `logp` of the policy in training; `old_logp` of the policy at the start of the
    update (None: this is the first pass, it equals `logp`); `prox_logp` and `behave_logp` of decoupled objectives;
    `ref_logp` of the reference model. `advantage` is (M,) or (M, L), `coefficient` (M,).
    """

    logp: Tensor
    mask: Tensor
    advantage: Tensor
    coefficient: Tensor
    old_logp: Tensor | None = None
    prox_logp: Tensor | None = None
    behave_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    compressed_logp: Tensor | None = None  # the same responses after the compressed history (HiconAgent)
    compressed_old_logp: Tensor | None = None
    compressed_ref_logp: Tensor | None = None

    def clean(self) -> RowTensors:
        """The same rows with zeros wherever the loss must not look, in the dtype of `logp`, advantage as (M, L).

        Only the branches in training keep their gradient: `old_logp` may be the very tensor that `logp` is.
        """
        live = self.mask.bool() & (self.coefficient != 0).unsqueeze(-1)
        advantage = self.advantage if self.advantage.dim() == 2 else self.advantage.unsqueeze(-1).expand_as(self.logp)

        def cleaned(tensor: Tensor) -> Tensor:
            return torch.where(live, tensor.to(self.logp), self.logp.new_zeros(()))

        logps = {}
        for name in (f.name for f in fields(self) if f.name.endswith("logp")):
            logp = getattr(self, name)
            if logp is not None:
                logps[name] = cleaned(logp if name in ("logp", "compressed_logp") else logp.detach())
        coefficient = self.coefficient.detach().to(self.logp)
        return type(self)(mask=live, advantage=cleaned(advantage.detach()), coefficient=coefficient, **logps)


@dataclass
class ValueTensors:
    """What a critic is trained on: per token, all (M, L) with a mask, or per state, all (M,). `coefficient` is (M,)."""

    outputs: Tensor
    target: Tensor
    coefficient: Tensor
    mask: Tensor | None = None


@dataclass
class PairTensors:
    """M pairs of responses to the same state; (M, L) log-probabilities and masks, `coefficient` (M,) = 1/pairs.

    A reference log-probability is per token (M, L), or (M,): the stored sum over the response's loss tokens.
    """

    chosen_logp: Tensor
    chosen_mask: Tensor
    chosen_ref_logp: Tensor
    rejected_logp: Tensor
    rejected_mask: Tensor
    rejected_ref_logp: Tensor
    coefficient: Tensor


def spread(at_loss_tokens: Tensor, mask: Tensor) -> Tensor:
    """A row's m entries laid out along its (L,) mask, zeros where the mask is 0."""
    out = at_loss_tokens.new_zeros(mask.shape)
    out[mask.bool()] = at_loss_tokens
    return out


class Metric(NamedTuple):
    """A detached sum and how many things it is a sum of, so that micro-batches can be averaged without bias."""

    sum: Tensor
    count: Tensor


@dataclass
class LossOutput:
    loss: Tensor  # scalar; the batch's loss is the sum of its micro-batches' losses
    metrics: dict[str, Metric] = field(default_factory=dict)


def average_metrics(outputs: Iterable[dict[str, Metric]]) -> dict[str, float]:
    """The mean of each metric over all micro-batches; a metric that nothing counted towards is left out."""
    totals: dict[str, list[float]] = {}
    for metrics in outputs:
        for name, metric in metrics.items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += float(metric.sum)
            total[1] += float(metric.count)
    return {name: total / count for name, (total, count) in totals.items() if count}


class Objective(BaseModel):
    """A method's loss. Fields are its hyperparameters; their defaults are the paper's (`preset="paper"`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: ClassVar[str]
    # Hyperparameters in which the authors' code departs from the defaults; None where there is no public code.
    released: ClassVar[dict[str, Any] | None] = None
    inputs: ClassVar[tuple[str, ...]] = ("trajectories",)  # what `evaluate` takes: trajectories, responses or pairs
    value_at: ClassVar[Literal["token", "state"] | None] = None  # where the critic looks, if there is one

    @property
    def required_logps(self) -> dict[str, str]:
        """The `RowTensors` log-probabilities, beside `logp`, without which there is no loss, each with the reason."""
        return {}

    def fitted(self, given: Collection[str]) -> Objective:
        """The objective as it applies to rows with the `given` log-probabilities, where parts of it are optional."""
        return self

    @property
    def uses_reference(self) -> bool:
        return "ref_logp" in self.required_logps

    @property
    def uses_critic(self) -> bool:
        return self.value_at is not None

    def plan(self, facts: Sequence[TrajectoryFacts], update: int | None = None) -> Plan:
        """Advantages and coefficients of a whole optimizer step; `update` counts the batches before this one."""
        raise NotImplementedError(f"{self.name} is not trained on trajectories")

    def loss(self, rows: RowTensors) -> LossOutput:
        """The sum over `rows` of coefficient * sum over loss tokens of the method's token loss."""
        raise NotImplementedError(f"{self.name} is not trained on rows")

    def values(self, outputs: Tensor) -> Tensor:
        """The values that `plan` takes, from what the critic's head puts out."""
        raise NotImplementedError(f"{self.name} has no critic")

    def value_loss(self, values: ValueTensors) -> LossOutput:
        """The critic's loss, summed with the coefficients of the plan."""
        raise NotImplementedError(f"{self.name} has no critic")

    def pair_loss(self, pairs: PairTensors) -> LossOutput:
        """The sum over `pairs` of coefficient * the preference loss."""
        raise NotImplementedError(f"{self.name} is not trained on pairs")

    def require_logps(self, rows: RowTensors) -> None:
        for name, why in self.required_logps.items():
            if getattr(rows, name) is None:
                raise ValueError(f"{self.name}: {name} is missing: {why}")
