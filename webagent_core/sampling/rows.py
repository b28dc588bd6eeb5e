"""Which rows of a batch are trained on, where a method takes only some: ZeroGUI, WebGym, WebRL's replay, HiconAgent."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from webagent_core.objectives import Plan, RowPlan


def weighted_choice(weights: Sequence[float], limit: int, rng: random.Random) -> list[int]:
    """Indices of at most `limit` items drawn without replacement, in order; of weight 0, none.

    Each draw takes one of the remaining items with a chance in proportion to its weight (Efraimidis and Spirakis
    2006: that is to take the largest of log(u)/w).
    """
    keys = [(math.log(1.0 - rng.random()) / weight, index) for index, weight in enumerate(weights) if weight > 0]
    return sorted(index for _, index in sorted(keys, reverse=True)[:limit])


def choose_rows(plan: Plan, limit: int | None, rng: random.Random) -> list[set[int]]:
    """For each trajectory the steps that stay, `limit` in all, drawn evenly from the rows that have a part in the loss.

    ZeroGUI's authors train on a random 16384 step rows of a rollout. None: all of them.
    """
    live = [(i, j) for i, each in enumerate(plan.trajectories) for j, row in enumerate(each.rows) if row.coefficient]
    taken = live if limit is None else rng.sample(live, min(limit, len(live)))
    chosen: list[set[int]] = [set() for _ in plan.trajectories]
    for i, j in taken:
        chosen[i].add(j)
    return chosen


def keep_rows(plan: Plan, chosen: Sequence[Collection[int]]) -> Plan:
    """The plan with only the chosen steps of each trajectory in the loss.

    The coefficients that stay are scaled by (live rows before) / (live rows after): a mean over rows stays one, and
    the expectation of any weighted sum under an even draw stays what it was. Likewise the critic's.
    """
    if len(chosen) != len(plan.trajectories):
        raise ValueError(f"chosen has {len(chosen)} entries for {len(plan.trajectories)} trajectories")

    def scale(name: str) -> float:
        before = sum(getattr(row, name) != 0 for row in plan.rows)
        after = sum(
            getattr(row, name) != 0
            for each, steps in zip(plan.trajectories, chosen, strict=True)
            for j, row in enumerate(each.rows)
            if j in steps
        )
        return before / after if after else 0.0

    of_loss, of_value = scale("coefficient"), scale("value_coefficient")

    def kept(row: RowPlan, stays: bool) -> RowPlan:
        return replace(
            row,
            coefficient=row.coefficient * of_loss if stays else 0.0,
            value_coefficient=row.value_coefficient * of_value if stays else 0.0,
        )

    return Plan(
        [
            replace(each, rows=[kept(row, j in steps) for j, row in enumerate(each.rows)])
            for each, steps in zip(plan.trajectories, chosen, strict=True)
        ]
    )


def draw_single_steps(recorded: int, training_steps: int | None, seed: int) -> list[int]:
    """Which of a data set's recorded steps are trained on (HiconAgent: 3000 of AMEX), in order. None: all of them."""
    if training_steps is None or training_steps >= recorded:
        return list(range(recorded))
    return sorted(random.Random(f"single steps/{seed}").sample(range(recorded), training_steps))
