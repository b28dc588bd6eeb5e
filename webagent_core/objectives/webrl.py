"""WebRL (ICLR 2025), Eq. 5, 7 and 8: the log-ratio of an action is regressed to its advantage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from webagent_core.objectives.advantages import released_webrl_advantage, td_mc_blend
from webagent_core.objectives.base import LossOutput, Metric, Objective, Plan, RowTensors, TrajectoryFacts, ValueTensors
from webagent_core.objectives.groups import assemble, not_usable
from webagent_core.objectives.normalisers import Coefficients, Nest, each_row
from webagent_core.objectives.policy_gradient import Fraction, NonNegative, Positive
from webagent_core.objectives.preference import sequence_log_ratio
from webagent_core.objectives.regression import released_regression, squared_error
from webagent_core.objectives.value_losses import bce


class WebRL(Objective):
    """L = mean over steps of (beta log pi(a)/pi_ref(a) - A)^2, A = lam TD + (1 - lam) MC from a critic V.

    An action's log-ratio is the sum over its tokens. The paper does not give its beta. The authors' code computes
    something else (`regression.released_regression`): only actions of positive advantage, towards a fixed log-ratio.
    """

    name: ClassVar[str] = "webrl"
    released: ClassVar[dict[str, Any] | None] = {"form": "positives", "gamma": 0.9}
    value_at: ClassVar = "state"

    form: Literal["regression", "positives"] = "regression"
    beta: Positive = 1.0
    lam: Fraction = 0.5
    gamma: Fraction = 1.0
    offset: NonNegative = 0.05  # from here on: `form` "positives" only
    beta_sure: Positive = 5.0
    sure: Fraction = 0.8

    @property
    def required_logps(self) -> dict[str, str]:
        return {"ref_logp": "the regression is to the log-ratio with the reference policy"}

    def plan(self, facts: Sequence[TrajectoryFacts], update: int | None = None) -> Plan:
        dropped = not_usable(facts)
        kept = [i for i in range(len(facts)) if i not in dropped]
        credited = {i: self.credit(facts[i]) for i in kept if facts[i].advantages is None}

        def normalise(groups: Nest) -> Coefficients:
            steps = sum(map(len, groups[0]))
            return each_row(groups, lambda group, trajectory, m: steps)

        plan = assemble(facts, [kept], credited, dropped, normalise)
        trajectories = []
        for i, (trajectory, planned) in enumerate(zip(facts, plan.trajectories, strict=True)):
            target = trajectory.reward if i in credited else None
            weight = {"value_target": target} if target is not None else {}
            rows = [replace(r, value_coefficient=r.coefficient if weight else 0.0, **weight) for r in planned.rows]
            advantage = planned.advantage if i in kept else [0.0] * len(trajectory.tokens)
            trajectories.append(replace(planned, rows=rows, advantage=advantage))
        return Plan(trajectories)

    def credit(self, facts: TrajectoryFacts) -> list[float]:
        if facts.values is None:
            raise ValueError(f"{self.name}: values is missing: the critic's value of the state before every step")
        values = [float(value.reshape(-1)[0]) for value in facts.values]
        if self.form == "positives":
            return released_webrl_advantage(values, facts.reward, self.gamma, self.offset)
        return td_mc_blend(values, facts.reward, self.lam, self.gamma)

    def loss(self, rows: RowTensors) -> LossOutput:
        self.require_logps(rows)
        given = rows.advantage
        rows = rows.clean()
        tokens = rows.mask.sum(-1)
        acts = tokens > 0
        advantage = (given if given.dim() == 1 else rows.advantage.sum(-1) / tokens.clamp(min=1)).to(rows.logp)
        advantage = torch.where(acts, advantage, 0.0)  # a masked action has nothing to regress: its error is 0
        log_ratio = sequence_log_ratio(rows.logp, rows.ref_logp, rows.mask)
        if self.form == "positives":
            length = tokens.clamp(min=1)
            mean_ref = rows.ref_logp.sum(-1) / length
            error = released_regression(log_ratio / length, mean_ref, advantage, self.beta, self.beta_sure, self.sure)
        else:
            error = squared_error(log_ratio, advantage, self.beta)
        per_action = {"policy_loss": error, "log_ratio": log_ratio}
        metrics = {name: Metric(value.detach().sum(), acts.sum()) for name, value in per_action.items()}
        return LossOutput((rows.coefficient * error).sum(), metrics)

    def values(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs)

    def value_loss(self, values: ValueTensors) -> LossOutput:
        live = values.coefficient != 0
        target = torch.where(live, values.target.to(values.outputs), 0.0)
        error = torch.where(live, bce(torch.where(live, values.outputs, 0.0), target), 0.0)
        loss = (values.coefficient.to(error) * error).sum()
        return LossOutput(loss, {"value_loss": Metric(error.detach().sum(), live.sum())})
