"""Which trajectories of a batch take part in the loss, and their group baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from webagent_core.objectives.advantages import group_zscore, is_flat
from webagent_core.objectives.base import Plan, RowPlan, TrajectoryFacts, TrajectoryPlan
from webagent_core.objectives.normalisers import Coefficients, Nest


def usable(facts: TrajectoryFacts) -> bool:
    """Valid, and with something that tells how good it was: a reward, or advantages of the caller's own."""
    return facts.valid and (facts.reward is not None or facts.advantages is not None)


def by_group(facts: Sequence[TrajectoryFacts]) -> dict[str, list[int]]:
    """Positions of the usable trajectories of each group, groups in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for i, trajectory in enumerate(facts):
        if usable(trajectory):
            groups.setdefault(trajectory.group, []).append(i)
    return groups


def plan_groups(
    facts: Sequence[TrajectoryFacts],
    normalise: Callable[[Nest], Coefficients],
    *,
    ddof: int,
    adv_eps: float,
    drop_flat_groups: bool,
) -> Plan:
    """Group z-scores and row coefficients of a batch in which the group is the baseline.

    Invalid members leave first. A group with fewer than two members left has no baseline and is dropped; so is a flat
    one under `drop_flat_groups`. A group with a member that brings its own advantages is always kept: it needs no
    baseline.
    """
    dropped: dict[int, str] = {i: "invalid" for i, trajectory in enumerate(facts) if not usable(trajectory)}
    advantages: dict[int, float] = {}
    kept: list[list[int]] = []
    for members in by_group(facts).values():
        scored = {i: facts[i].reward for i in members if facts[i].reward is not None}
        advantages.update(zip(scored, group_zscore(list(scored.values()), ddof, adv_eps), strict=True))
        if any(facts[i].advantages is not None for i in members):
            kept.append(members)
        elif len(members) < 2:
            dropped.update(dict.fromkeys(members, "lone"))
        elif drop_flat_groups and is_flat(list(scored.values())):
            dropped.update(dict.fromkeys(members, "flat"))
        else:
            kept.append(members)
    return assemble(facts, kept, dropped, advantages, normalise)


def assemble(
    facts: Sequence[TrajectoryFacts],
    kept: Sequence[Sequence[int]],
    dropped: dict[int, str],
    advantages: dict[int, float],
    normalise: Callable[[Nest], Coefficients],
) -> Plan:
    """The plan of a batch: `kept` groups of positions get coefficients, the others zeros."""
    nest = [[facts[i].tokens for i in members] for members in kept]
    coefficients: dict[int, list[float]] = {}
    for members, of_group in zip(kept, normalise(nest), strict=True):
        coefficients.update(zip(members, of_group, strict=True))

    trajectories = []
    for i, trajectory in enumerate(facts):
        own = trajectory.advantages if i in coefficients else None
        advantage: float | list = advantages.get(i, 0.0) if i in coefficients else 0.0
        if own is not None:
            advantage = list(own)
        per_step = advantage if isinstance(advantage, list) else [advantage] * len(trajectory.tokens)
        weights = coefficients.get(i, [0.0] * len(trajectory.tokens))
        rows = [RowPlan(a, c) for a, c in zip(per_step, weights, strict=True)]
        trajectories.append(TrajectoryPlan(advantage, rows, dropped.get(i)))
    return Plan(trajectories)
