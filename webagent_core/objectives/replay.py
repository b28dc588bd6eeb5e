"""ARPO's replay inside a group (section 3.5): a group in which all failed gets one stored success of its task."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal

ReplayRule = Literal["all_failed", "low_mean"]
ReplaySlot = Literal["random", "first"]


def wants_replay(scores: Sequence[float], rule: ReplayRule) -> bool:
    """Whether a group takes a stored success. `scores` are the outcomes of its valid members; none is no evidence.

    "all_failed": none of them is a success, 1. "low_mean": standard deviation below 0.05 and mean below 0.2, the
    authors' code.
    """
    if not scores:
        return False
    if rule == "all_failed":
        return max(scores) < 1
    mean = math.fsum(scores) / len(scores)
    variance = math.fsum((score - mean) ** 2 for score in scores) / max(len(scores) - 1, 1)
    return math.sqrt(variance) < 0.05 and mean < 0.2


def replaced_slot(members: int, slot: ReplaySlot, seed: int, group: str) -> int:
    """Which of the group's valid members goes: a random one (the same for the same seed and group), or the first."""
    return 0 if slot == "first" else random.Random(f"{seed} {group}").randrange(members)
