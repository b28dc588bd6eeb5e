"""Per-token estimates of KL(pi || pi_ref) from the log-probabilities of sampled tokens (source part 3)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from webagent_core.objectives.ratios import ratio

KLEstimate = Literal["none", "k1", "k2", "k3", "k2_capped"]


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """log pi - log pi_ref: unbiased and of either sign; its own gradient has mean zero."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(log pi - log pi_ref)^2 / 2; the gradient is the log-ratio itself (ZeroGUI, Eq. 6)."""
    return 0.5 * (logp - ref_logp) ** 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """pi_ref / pi - log(pi_ref / pi) - 1: never negative; grows exponentially where pi << pi_ref (GRPO)."""
    return ratio(ref_logp, logp) - (ref_logp - logp) - 1


def k2_capped(logp: Tensor, ref_logp: Tensor, advantage: Tensor, beta: float) -> Tensor:
    """k2 times min(1, (|A| / beta) / |log pi - log pi_ref|), the factor detached (ZeroGUI's authors' code).

    So beta times the gradient of a token's KL never exceeds |A|, the gradient of its policy term at ratio 1.
    """
    distance = (logp - ref_logp).detach().abs()
    cap = torch.where(distance > 0, advantage.abs() / beta / distance, 1.0).clamp(max=1.0)
    return cap * k2(logp, ref_logp)


def kl_estimate(kind: KLEstimate, logp: Tensor, ref_logp: Tensor, advantage: Tensor, beta: float) -> Tensor:
    if kind == "none":
        return torch.zeros_like(logp)
    if kind == "k2_capped":
        return k2_capped(logp, ref_logp, advantage, beta)
    return {"k1": k1, "k2": k2, "k3": k3}[kind](logp, ref_logp)
