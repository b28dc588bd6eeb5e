"""How much the token sum of each row weighs in the loss of a batch.

Every function takes the loss tokens m of each step, nested as groups > trajectories > steps, and returns coefficients
of the same shape. Only what takes part in the loss is in the nest: valid members of groups that were kept. A fully
masked step (m = 0) adds nothing to the loss and still counts as a step. n groups, G members of a group, T_i steps of
trajectory i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Nest = Sequence[Sequence[Sequence[int]]]
Coefficients = list[list[list[float]]]
StepNorm = Literal["length", "k", "none"]


def each_row(groups: Nest, denominator: Callable[[Sequence[Sequence[int]], Sequence[int], int], float]) -> Coefficients:
    """1/denominator(group, trajectory, m) for every row."""
    return [[[1 / denominator(group, steps, m) for m in steps] for steps in group] for group in groups]


def over_steps(steps: Sequence[int], step_norm: StepNorm, k: float) -> float:
    """What a trajectory's sum over steps is divided by: its length T_i, a constant k, or nothing."""
    return {"length": float(len(steps)), "k": k, "none": 1.0}[step_norm]


def group_mean(groups: Nest, *, step_norm: StepNorm, token_mean: bool, k: float) -> Coefficients:
    """1/n * 1/G * (1/T_i | 1/k | 1) * (1/m | 1).

    T_i with the mean over tokens is WebAgent-R1's three-level mean (section 2.3), k with their sum AsyncWebRL (Eq. 1),
    none with the mean OpenWebRL (section 4.4).
    """

    def denominator(group: Sequence[Sequence[int]], steps: Sequence[int], m: int) -> float:
        return len(groups) * len(group) * over_steps(steps, step_norm, k) * (max(m, 1) if token_mean else 1)

    return each_row(groups, denominator)


def group_row_mean(groups: Nest) -> Coefficients:
    """1/n * 1/(sum_i T_i) * 1/m: mean over all steps of a group (ZeroGUI, Eq. 5)."""
    return each_row(groups, lambda group, steps, m: len(groups) * sum(map(len, group)) * max(m, 1))


def group_sequence_mean(groups: Nest) -> Coefficients:
    """1/n * 1/G * 1/(sum of m over the trajectory): each trajectory is one sequence (ARPO, section 3.1)."""
    return each_row(groups, lambda group, steps, m: len(groups) * len(group) * max(sum(steps), 1))


def batch_row_mean(groups: Nest) -> Coefficients:
    """1/(rows of the batch) * 1/m (the authors' code of OpenWebRL and ZeroGUI)."""
    rows = sum(len(steps) for group in groups for steps in group)
    return each_row(groups, lambda group, steps, m: rows * max(m, 1))


def batch_sequence_mean(groups: Nest) -> Coefficients:
    """1/(trajectories of the batch) * 1/(sum of m over the trajectory) (the authors' code of ARPO and WebAgent-R1)."""
    trajectories = sum(map(len, groups))
    return each_row(groups, lambda group, steps, m: trajectories * max(sum(steps), 1))


def batch_token_mean(groups: Nest, *, step_norm: StepNorm = "none", k: float = 1.0) -> Coefficients:
    """1/(loss tokens of the batch) (UI-TARS-2; the authors' code of HiconAgent; with 1/k that of AsyncWebRL)."""
    tokens = max(sum(m for group in groups for steps in group for m in steps), 1)
    return each_row(groups, lambda group, steps, m: tokens * over_steps(steps, step_norm, k))


def batch_trajectory_sum(groups: Nest) -> Coefficients:
    """1/N, N the trajectories of the batch (WebGym, Eq. 1)."""
    trajectories = sum(map(len, groups))
    return each_row(groups, lambda group, steps, m: trajectories)
