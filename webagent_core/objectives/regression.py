"""WebRL's policy loss: no policy gradient, the log-ratio of an action is regressed to its advantage."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss


def squared_error(log_ratio: Tensor, advantage: Tensor, beta: float) -> Tensor:
    """(beta log pi/pi_ref - A)^2 per action (WebRL, Eq. 5), log-ratios summed over the action's tokens, (M,)."""
    return (beta * log_ratio - advantage) ** 2


def released_regression(
    mean_log_ratio: Tensor, ref_mean_logp: Tensor, advantage: Tensor, beta: float, beta_sure: float, sure: float
) -> Tensor:
    """smooth_l1(b x, 1) / b for actions of positive advantage, 0 for the others, (M,) (WebRL's authors' code).

    x is the mean log-ratio per token; b is `beta`, or `beta_sure` where the reference's geometric mean probability of
    a token is at least `sure`, held to |1 / x| and detached. The gradient is that of cloning the action with weight
    clamp(1 - b x, 0, 1): it ends where the policy has come 1/b above the reference.
    """
    b = torch.where(ref_mean_logp.exp() >= sure, beta_sure, torch.full_like(ref_mean_logp, beta))
    distance = mean_log_ratio.detach().abs()
    b = torch.where(distance > 0, torch.minimum(b, 1 / distance), b)
    x = torch.where(advantage > 0, mean_log_ratio, 0.0)
    loss = smooth_l1_loss(b * x, torch.ones_like(x), reduction="none") / b
    return torch.where(advantage > 0, loss, 0.0)
