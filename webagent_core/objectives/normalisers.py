"""How much the token sum of each row weighs in the loss of a batch.

Every function takes the loss tokens m of each step, nested as groups > trajectories > steps, and returns coefficients
of the same shape. Only what takes part in the loss is in the nest: valid members of groups that were kept. A fully
masked step (m = 0) adds nothing to the loss and still counts as a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Nest = Sequence[Sequence[Sequence[int]]]
Coefficients = list[list[list[float]]]
StepNorm = Literal["length", "k", "none"]


def group_mean(groups: Nest, *, step_norm: StepNorm, token_mean: bool, k: float = 1.0) -> Coefficients:
    """1/n * 1/G * (1/T_i | 1/k | 1) * (1/m | 1): mean over groups, over members, then over, or of, steps and tokens.

    T_i with token mean is WebAgent-R1's three-level mean, k with token sum AsyncWebRL (Eq. 1), none with token mean
    OpenWebRL (section 4.4).
    """
    return [
        [
            [
                1
                / (
                    len(groups)
                    * len(members)
                    * {"length": len(steps), "k": k, "none": 1}[step_norm]
                    * (max(m, 1) if token_mean else 1)
                )
                for m in steps
            ]
            for steps in members
        ]
        for members in groups
    ]


def trajectory_token_mean(groups: Nest) -> Coefficients:
    """1/N * 1/(loss tokens of the trajectory), over all N trajectories, whatever their group."""
    trajectories = sum(len(members) for members in groups)
    return [[[1 / (trajectories * max(sum(steps), 1)) for _ in steps] for steps in members] for members in groups]
