"""Preference between two responses to the same state (source part 4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sequence_log_ratio(logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """log pi(a|s) / pi_ref(a|s) of each response, (M,): the sum over its loss tokens.

    `ref_logp` is (M, L), from a reference model in memory, or (M,), the sum that was stored when the response was
    sampled (Agent Q).
    """
    mask = mask.bool()
    policy = torch.where(mask, logp, 0.0).sum(-1)
    ref_logp = ref_logp.detach().to(logp)
    return policy - (ref_logp if ref_logp.dim() == 1 else torch.where(mask, ref_logp, 0.0).sum(-1))


def dpo(chosen_log_ratio: Tensor, rejected_log_ratio: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (log-ratio of the chosen - log-ratio of the rejected)), (M,) (UI-TARS 4.5; Agent Q Eq. 5)."""
    return -logsigmoid(beta * (chosen_log_ratio - rejected_log_ratio))
