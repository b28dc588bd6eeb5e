"""UI-TARS-2 (arXiv:2509.02544), Eq. 4: PPO with a critic, length-adaptive GAE and value pre-training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from webagent_core.objectives.advantages import gae, length_adaptive_lambda, terminal_reward
from webagent_core.objectives.base import LossOutput, Metric, Plan, TrajectoryFacts, ValueTensors
from webagent_core.objectives.groups import assemble, not_usable
from webagent_core.objectives.normalisers import batch_token_mean
from webagent_core.objectives.policy_gradient import Fraction, NonNegative, PolicyGradient, Positive
from webagent_core.objectives.value_losses import mse


class UITARS2(PolicyGradient):
    """L = -1/(loss tokens of the batch) sum min(rho A_t, clip(rho, 1 - eps_low, 1 + eps_high) A_t), A_t from GAE.

    GAE runs over all policy tokens of a trajectory, across its steps, with lambda = 1 - 1/(alpha l) for the policy and
    lambda 1 (Monte Carlo) for the critic's targets. For the first `pretrain_updates` batches the policy stands still
    and only the critic learns. The paper gives no number for eps_low, eps_high and gamma; no code is public.
    """

    name: ClassVar[str] = "uitars2"
    value_at: ClassVar = "token"

    eps_high: NonNegative = 0.28
    gamma: Fraction = 1.0
    alpha: Positive = 0.05
    lam: Fraction | None = None  # a number replaces the length-adaptive lambda
    value_lam: Fraction = 1.0
    pretrain_updates: Annotated[int, Field(ge=0)] = 20

    def policy_lambda(self, length: int) -> float:
        return length_adaptive_lambda(length, self.alpha) if self.lam is None else self.lam

    def plan(self, facts: Sequence[TrajectoryFacts], update: int | None = None) -> Plan:
        dropped = not_usable(facts)
        kept = [i for i in range(len(facts)) if i not in dropped]
        advantages: dict[int, list[Tensor]] = {}
        targets: dict[int, list[Tensor]] = {}
        for i in kept:
            if facts[i].advantages is None:
                advantages[i], targets[i] = self.credit(facts[i])
        plan = assemble(facts, [kept], advantages, dropped, batch_token_mean)

        policy_waits = update is not None and update < self.pretrain_updates
        trajectories = []
        for i, (trajectory, of_policy) in enumerate(zip(facts, plan.trajectories, strict=True)):
            per_step = targets.get(i, [None] * len(trajectory.tokens))
            rows = [
                replace(
                    row,
                    coefficient=0.0 if policy_waits else row.coefficient,
                    value_target=target,
                    value_coefficient=0.0 if target is None else row.coefficient,
                )
                for row, target in zip(of_policy.rows, per_step, strict=True)
            ]
            none = [torch.zeros(m, dtype=torch.float64) for m in trajectory.tokens]
            trajectories.append(replace(of_policy, rows=rows, advantage=of_policy.advantage if i in kept else none))
        return Plan(trajectories)

    def credit(self, facts: TrajectoryFacts) -> tuple[list[Tensor], list[Tensor]]:
        """Advantages and value targets of one trajectory, per step one (m,) tensor."""
        if facts.values is None:
            raise ValueError(f"{self.name}: values is missing: the critic's value at every loss token of a trajectory")
        tokens = list(facts.tokens)
        values = torch.cat([torch.empty(0, dtype=torch.float64), *(v.detach().double().cpu() for v in facts.values)])
        policy = torch.ones(len(values), dtype=torch.bool)
        rewards = terminal_reward(facts.reward, policy)
        advantages = gae(rewards, values, policy, self.gamma, self.policy_lambda(len(values)))
        returns = gae(rewards, values, policy, self.gamma, self.value_lam) + values
        return list(advantages.split(tokens)), list(returns.split(tokens))

    def values(self, outputs: Tensor) -> Tensor:
        return outputs

    def value_loss(self, values: ValueTensors) -> LossOutput:
        live = values.mask.bool() & (values.coefficient != 0).unsqueeze(-1)
        error = mse(torch.where(live, values.outputs, 0.0), torch.where(live, values.target.to(values.outputs), 0.0))
        loss = (values.coefficient.to(error) * error.sum(-1)).sum()
        return LossOutput(loss, {"value_loss": Metric(error.detach().sum(), live.sum())})
