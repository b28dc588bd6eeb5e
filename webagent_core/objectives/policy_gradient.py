"""What the clipped policy-gradient methods share: the loss over rows, and the group as baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from webagent_core.objectives.base import LossOutput, Metric, Objective, Plan, RowTensors, TrajectoryFacts
from webagent_core.objectives.groups import assemble, by_group, compare, not_usable
from webagent_core.objectives.kl import KLEstimate, kl_estimate
from webagent_core.objectives.normalisers import Coefficients, Nest
from webagent_core.objectives.ratios import clipped_surrogate, is_clipped, ratio

Epsilon = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
DualClip = Annotated[float, Field(gt=1)] | None
Ddof = Annotated[int, Field(ge=0, le=1)]


def weighted_sum(token_loss: Tensor, rows: RowTensors) -> Tensor:
    """sum over rows of coefficient * sum over loss tokens; `rows` must be clean."""
    return (rows.coefficient * torch.where(rows.mask, token_loss, 0.0).sum(-1)).sum()


def token_metrics(rows: RowTensors, per_token: dict[str, Tensor]) -> dict[str, Metric]:
    """Sums over the loss tokens of rows that take part, each with the number of those tokens."""
    count = rows.mask.sum()
    return {
        name: Metric(torch.where(rows.mask, value.detach().to(rows.logp.dtype), 0.0).sum(), count)
        for name, value in per_token.items()
    }


class PolicyGradient(Objective):
    """sum over rows of coefficient * sum over loss tokens of ( -surrogate + beta KL )."""

    eps_low: Epsilon = 0.2
    eps_high: NonNegative = 0.2
    dual_clip: DualClip = None
    beta: NonNegative = 0.0
    kl: KLEstimate = "none"

    @property
    def required_logps(self) -> dict[str, str]:
        if self.kl == "none" or self.beta == 0:
            return {}
        return {"ref_logp": f"kl = {self.kl} with beta = {self.beta:g} compares with the reference policy"}

    def surrogate(self, rows: RowTensors) -> tuple[Tensor, dict[str, Tensor]]:
        """What is maximised, per token, with its metrics."""
        rho = ratio(rows.logp, rows.logp.detach() if rows.old_logp is None else rows.old_logp)
        surrogate = clipped_surrogate(rho, rows.advantage, self.eps_low, self.eps_high, self.dual_clip)
        return surrogate, {"ratio": rho, "clip_ratio": is_clipped(rho, rows.advantage, self.eps_low, self.eps_high)}

    def token_loss(self, rows: RowTensors) -> tuple[Tensor, dict[str, Tensor]]:
        surrogate, metrics = self.surrogate(rows)
        metrics["policy_loss"] = token_loss = -surrogate
        if self.uses_reference:
            metrics["kl"] = kl_estimate(self.kl, rows.logp, rows.ref_logp, rows.advantage, self.beta)
            token_loss = token_loss + self.beta * metrics["kl"]
        return token_loss, metrics

    def loss(self, rows: RowTensors) -> LossOutput:
        self.require_logps(rows)
        rows = rows.clean()
        token_loss, metrics = self.token_loss(rows)
        return LossOutput(weighted_sum(token_loss, rows), token_metrics(rows, metrics))


class GroupPolicyGradient(PolicyGradient):
    """Policy gradient with the group z-score as advantage, one value for all tokens of a trajectory."""

    ddof: Ddof = 1
    adv_eps: NonNegative = 0.0
    drop_flat_groups: bool = False

    def normalise(self, groups: Nest) -> Coefficients:
        raise NotImplementedError

    def plan(self, facts: Sequence[TrajectoryFacts], update: int | None = None) -> Plan:
        return self.plan_groups(facts, by_group(facts), not_usable(facts))

    def plan_groups(
        self, facts: Sequence[TrajectoryFacts], groups: dict[str, list[int]], dropped: dict[int, str]
    ) -> Plan:
        kept, advantages, without_signal = compare(
            facts, groups, ddof=self.ddof, adv_eps=self.adv_eps, drop_flat_groups=self.drop_flat_groups
        )
        return assemble(facts, kept, advantages, dropped | without_signal, self.normalise)
