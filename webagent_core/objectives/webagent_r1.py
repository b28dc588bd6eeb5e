"""WebAgent-R1 (EMNLP 2025), section 2.3: M-GRPO, a mean over a group, its trajectories and their actions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from webagent_core.objectives.base import Plan, TrajectoryFacts
from webagent_core.objectives.groups import plan_groups
from webagent_core.objectives.kl import KLEstimate
from webagent_core.objectives.normalisers import StepNorm, group_mean, trajectory_token_mean
from webagent_core.objectives.policy_gradient import Ddof, NonNegative, PolicyGradient, Positive


class WebAgentR1(PolicyGradient):
    """L = 1/G sum_i 1/T_i sum_j 1/m_ij sum_t ( -min(rho A_i, clip(rho, 1 - eps, 1 + eps) A_i) + beta KL ).

    A_i is the group z-score of the trajectory's reward, the same for all its tokens. The paper does not write its KL
    out: k3 is ours. The authors' code averages over the tokens of the whole trajectory instead of its actions.
    """

    name: ClassVar[str] = "webagent_r1"
    released: ClassVar[dict[str, Any] | None] = {"normaliser": "trajectory_tokens", "adv_eps": 1e-4}

    beta: NonNegative = 0.001
    kl: KLEstimate = "k3"
    ddof: Ddof = 1
    adv_eps: NonNegative = 0.0
    drop_flat_groups: bool = False
    normaliser: Literal["steps", "trajectory_tokens"] = "steps"
    step_norm: StepNorm = "length"
    k: Positive = 10.0

    def plan(self, facts: Sequence[TrajectoryFacts]) -> Plan:
        normalise = partial(group_mean, step_norm=self.step_norm, token_mean=True, k=self.k)
        if self.normaliser == "trajectory_tokens":
            normalise = trajectory_token_mean
        return plan_groups(
            facts, normalise, ddof=self.ddof, adv_eps=self.adv_eps, drop_flat_groups=self.drop_flat_groups
        )
