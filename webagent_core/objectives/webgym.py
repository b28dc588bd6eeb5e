"""WebGym (CVPR 2026), supplement F, Eq. 1: REINFORCE with a success indicator, filtered behaviour cloning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from webagent_core.objectives.advantages import success_indicator
from webagent_core.objectives.base import LossOutput, Objective, Plan, RowTensors, TrajectoryFacts
from webagent_core.objectives.groups import assemble, not_usable
from webagent_core.objectives.normalisers import Coefficients, Nest, batch_token_mean, batch_trajectory_sum
from webagent_core.objectives.policy_gradient import token_metrics, weighted_sum


def only(steps: Nest, masks: list[list[bool]]) -> list[list]:
    """Zeros where the mask is False."""
    return [[x * on for x, on in zip(*both, strict=True)] for both in zip(steps, masks, strict=True)]


class WebGym(Objective):
    """L = -1/N sum_i 1[R_i = 1] sum_j sum_t log pi, without the steps whose next screenshot equals their own.

    N counts all trajectories, failures included; there is no group, ratio or clip. The authors' code fine-tunes on the
    successful steps, a mean over their tokens, from trajectories of two steps or more.
    """

    name: ClassVar[str] = "webgym"
    released: ClassVar[dict[str, Any] | None] = {"normaliser": "tokens", "min_steps": 2}

    drop_repeats: bool = True
    min_steps: Annotated[int, Field(ge=0)] = 0  # shorter trajectories leave the batch
    normaliser: Literal["trajectories", "tokens"] = "trajectories"

    def plan(self, facts: Sequence[TrajectoryFacts], update: int | None = None) -> Plan:
        dropped = not_usable(facts)
        dropped |= {i: "short" for i, t in enumerate(facts) if t.usable and len(t.tokens) < self.min_steps}
        kept = [i for i in range(len(facts)) if i not in dropped]
        indicator = {i: success_indicator(facts[i].reward) for i in kept if facts[i].advantages is None}

        def trains(i: int) -> list[bool]:
            repeats = facts[i].repeats_next or [False] * len(facts[i].tokens)
            return [indicator.get(i) != 0.0 and not (self.drop_repeats and repeated) for repeated in repeats]

        def normalise(groups: Nest) -> Coefficients:
            masks = [trains(i) for i in kept]
            if self.normaliser == "tokens":
                coefficients = batch_token_mean([only(groups[0], masks)])
            else:
                coefficients = batch_trajectory_sum(groups)
            return [only(coefficients[0], masks)]

        return assemble(facts, [kept], indicator, dropped, normalise)

    def loss(self, rows: RowTensors) -> LossOutput:
        rows = replace(rows, old_logp=None).clean()
        return LossOutput(weighted_sum(-rows.advantage * rows.logp, rows), token_metrics(rows, {"logp": rows.logp}))
