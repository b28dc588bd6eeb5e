"""What the clipped policy-gradient methods share: the loss over rows and its metrics."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from webagent_core.objectives.base import LossOutput, Metric, Objective, RowTensors
from webagent_core.objectives.kl import KLEstimate, kl_estimate
from webagent_core.objectives.ratios import clipped_surrogate, is_clipped, ratio

Epsilon = Annotated[float, Field(ge=0, lt=1)]
EpsilonHigh = Annotated[float, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
DualClip = Annotated[float, Field(gt=1)] | None
Ddof = Annotated[int, Field(ge=0, le=1)]


class PolicyGradient(Objective):
    """sum over rows of coefficient * sum over loss tokens of -(clipped surrogate) + beta KL."""

    eps_low: Epsilon = 0.2
    eps_high: EpsilonHigh = 0.2
    dual_clip: DualClip = None
    beta: NonNegative = 0.0
    kl: KLEstimate = "none"

    @property
    def required_logps(self) -> dict[str, str]:
        if self.kl == "none" or self.beta == 0:
            return {}
        return {"ref_logp": f"kl = {self.kl} with beta = {self.beta:g} compares with the reference policy"}

    def loss(self, rows: RowTensors) -> LossOutput:
        self.require_logps(rows)
        rows = rows.clean()
        rho = ratio(rows.logp, rows.logp.detach() if rows.old_logp is None else rows.old_logp)
        surrogate = clipped_surrogate(rho, rows.advantage, self.eps_low, self.eps_high, self.dual_clip)
        token_loss = -surrogate
        per_token = {
            "ratio": rho,
            "clip_ratio": is_clipped(rho, rows.advantage, self.eps_low, self.eps_high),
            "policy_loss": -surrogate,
        }
        if self.uses_reference:
            per_token["kl"] = kl_estimate(self.kl, rows.logp, rows.ref_logp)
            token_loss = token_loss + self.beta * per_token["kl"]
        return LossOutput(weighted_sum(token_loss, rows), token_metrics(rows, per_token))


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
