"""Policy-gradient surrogates, per token, to maximise: how far one update may move the probability of a token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# exp() of more would overflow float32 and turn the zero gradient of a clipped token into NaN; no ratio that matters
# comes near e^20.
MAX_LOG_RATIO = 20.0


def ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """rho = pi(a|s) / pi_old(a|s); the log-ratio is limited to +-20."""
    return torch.exp(torch.clamp(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(
    rho: Tensor, advantage: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> Tensor:
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A) (PPO; asymmetric as in DAPO; source part 1).

    `dual_clip` c > 1 keeps the surrogate of a negative advantage from falling below c A, which ends the gradient of a
    token whose ratio has grown past c (AsyncWebRL, appendix Eq. 2).
    """
    surrogate = torch.minimum(rho * advantage, torch.clamp(rho, 1 - eps_low, 1 + eps_high) * advantage)
    if dual_clip is not None:
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, dual_clip * advantage), surrogate)
    return surrogate


def is_clipped(rho: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Where the clip has taken a token out of the gradient: above the window for A > 0, below it for A < 0."""
    return ((rho > 1 + eps_high) & (advantage > 0)) | ((rho < 1 - eps_low) & (advantage < 0))


def behaviour_weight(
    prox_logp: Tensor, behave_logp: Tensor, cap: float | None, mode: Literal["clip", "drop"]
) -> Tensor:
    """pi_prox / pi_behave, detached: how stale the data is, the half of a decoupled ratio that is not clipped.

    (AsyncWebRL, Eq. 1.) A weight above `cap` is held there ("clip") or takes its token out of the loss ("drop", the
    authors' code).
    """
    weight = ratio(prox_logp, behave_logp).detach()
    if cap is None:
        return weight
    return weight.clamp(max=cap) if mode == "clip" else torch.where(weight > cap, 0.0, weight)
