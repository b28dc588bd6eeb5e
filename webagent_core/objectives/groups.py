"""Which trajectories of a batch take part in the loss, and what each of their rows gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from webagent_core.objectives.advantages import group_zscore, why_no_signal
from webagent_core.objectives.base import Plan, RowPlan, TrajectoryFacts, TrajectoryPlan
from webagent_core.objectives.normalisers import Coefficients, Nest

Advantage = float | list[float] | list[Tensor]


def by_group(facts: Sequence[TrajectoryFacts]) -> dict[str, list[int]]:
    """Positions of the usable trajectories of each group, groups in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for i, trajectory in enumerate(facts):
        if trajectory.usable:
            groups.setdefault(trajectory.group, []).append(i)
    return groups


def not_usable(facts: Sequence[TrajectoryFacts]) -> dict[int, str]:
    return {i: "invalid" for i, trajectory in enumerate(facts) if not trajectory.usable}


def compare(
    facts: Sequence[TrajectoryFacts],
    groups: Mapping[str, list[int]],
    *,
    ddof: int,
    adv_eps: float,
    drop_flat_groups: bool,
) -> tuple[list[list[int]], dict[int, float], dict[int, str]]:
    """Kept groups, group z-scores and why members were dropped, where the group is the baseline.

    A group with fewer than two members has no baseline and is dropped; so is a flat one under `drop_flat_groups`. One
    with a member that brings its own advantages is kept: it needs no baseline.
    """
    kept: list[list[int]] = []
    advantages: dict[int, float] = {}
    dropped: dict[int, str] = {}
    for members in groups.values():
        scored = [i for i in members if facts[i].reward is not None]
        advantages.update(zip(scored, group_zscore([facts[i].reward for i in scored], ddof, adv_eps), strict=True))
        why = why_no_signal([facts[i].score for i in members])
        own = any(facts[i].advantages is not None for i in members)
        if own or why is None or (why == "flat" and not drop_flat_groups):
            kept.append(members)
        else:
            dropped.update(dict.fromkeys(members, why))
    return kept, advantages, dropped


def assemble(
    facts: Sequence[TrajectoryFacts],
    kept: Sequence[Sequence[int]],
    advantages: Mapping[int, Advantage],
    dropped: Mapping[int, str],
    normalise: Callable[[Nest], Coefficients],
) -> Plan:
    """The plan of a batch: rows of `kept` groups of positions get coefficients, all others zeros."""
    coefficients: dict[int, list[float]] = {}
    weights = normalise([[facts[i].tokens for i in members] for members in kept])
    for members, of_group in zip(kept, weights, strict=True):
        coefficients.update(zip(members, of_group, strict=True))

    trajectories = []
    for i, trajectory in enumerate(facts):
        advantage: Advantage = 0.0
        if i in coefficients:
            advantage = advantages.get(i, 0.0) if trajectory.advantages is None else list(trajectory.advantages)
        per_step = advantage if isinstance(advantage, list) else [advantage] * len(trajectory.tokens)
        per_row = coefficients.get(i, [0.0] * len(trajectory.tokens))
        rows = [RowPlan(a, c) for a, c in zip(per_step, per_row, strict=True)]
        trajectories.append(TrajectoryPlan(advantage, rows, dropped.get(i)))
    return Plan(trajectories)
