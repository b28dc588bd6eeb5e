"""Per-token estimates of KL(pi || pi_ref) from the log-probabilities of sampled tokens (source part 3)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from webagent_core.objectives.ratios import ratio

KLEstimate = Literal["none", "k1", "k2", "k3"]


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """log pi - log pi_ref: unbiased and of either sign; its own gradient has mean zero."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(log pi - log pi_ref)^2 / 2; the gradient is the log-ratio itself (ZeroGUI, Eq. 6)."""
    return 0.5 * (logp - ref_logp) ** 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """pi_ref / pi - log(pi_ref / pi) - 1: never negative; grows exponentially where pi << pi_ref (GRPO)."""
    return ratio(ref_logp, logp) - (ref_logp - logp) - 1


def kl_estimate(kind: KLEstimate, logp: Tensor, ref_logp: Tensor) -> Tensor:
    if kind == "none":
        return torch.zeros_like(logp)
    return {"k1": k1, "k2": k2, "k3": k3}[kind](logp, ref_logp)
