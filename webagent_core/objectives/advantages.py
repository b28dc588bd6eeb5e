"""How good a trajectory or a token was."""

from __future__ import annotations

import math
from collections.abc import Sequence


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, up to the rounding of the last bits.

    Decided on the rewards: the computed standard deviation of three times 0.1 is not zero.
    """
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


def group_zscore(rewards: Sequence[float], ddof: int = 1, eps: float = 0.0, divide_by_std: bool = True) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + eps) over the G valid members of one group (GRPO; source part 2).

    `ddof` 1 is the sample standard deviation, 0 the population's; `divide_by_std=False` leaves the difference from
    the mean. A flat group, and a group of one, is exactly 0. Two passes, so a large common offset costs no digits.
    """
    size = len(rewards)
    if size < 2 or is_flat(rewards):
        return [0.0] * size
    mean = math.fsum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (size - ddof))
    return [c / (std + eps) for c in centred]
