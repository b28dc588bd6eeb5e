"""What a critic is trained with, and how good it is."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def mse(values: Tensor, returns: Tensor) -> Tensor:
    """(V - R)^2 / 2 per token."""
    return 0.5 * (values - returns) ** 2


def bce(logits: Tensor, outcome: Tensor) -> Tensor:
    """-R log V - (1 - R) log(1 - V) per state, V = sigmoid(logit) the probability of success (WebRL, Eq. 7)."""
    return binary_cross_entropy_with_logits(logits, outcome, reduction="none")


def explained_variance(values: Tensor, targets: Tensor) -> float | None:
    """1 - var(R - V) / var(R) over all tokens or states of a batch, both (N,); None where all targets are equal.

    1 is a perfect critic, 0 one that says the same of everything; below 0 its differences mislead.
    """
    targets = targets.double()
    if len(targets) < 2 or bool((targets == targets[0]).all()):
        return None
    return float(1 - (targets - values.double()).var() / targets.var())
