"""What a critic is trained with."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def mse(values: Tensor, returns: Tensor) -> Tensor:
    """(V - R)^2 / 2 per token."""
    return 0.5 * (values - returns) ** 2


def bce(logits: Tensor, outcome: Tensor) -> Tensor:
    """-R log V - (1 - R) log(1 - V) per state, V = sigmoid(logit) the probability of success (WebRL, Eq. 7)."""
    return binary_cross_entropy_with_logits(logits, outcome, reduction="none")
