"""WebAgent-R1 (EMNLP 2025), section 2.3: M-GRPO, a mean over a group, its trajectories and their actions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from webagent_core.objectives.kl import KLEstimate
from webagent_core.objectives.normalisers import Coefficients, Nest, StepNorm, batch_sequence_mean, group_mean
from webagent_core.objectives.policy_gradient import GroupPolicyGradient, NonNegative, Positive


class WebAgentR1(GroupPolicyGradient):
    """L = 1/G sum_i 1/T_i sum_j 1/m_ij sum_t ( -min(rho A_i, clip(rho, 1 - eps, 1 + eps) A_i) + beta KL ).

    The paper does not write its KL out: k3 is ours. The authors' code averages over the tokens of a whole trajectory
    instead of over its actions.
    """

    name: ClassVar[str] = "webagent_r1"
    released: ClassVar[dict[str, Any] | None] = {"normaliser": "sequences", "adv_eps": 1e-4}

    beta: NonNegative = 0.001
    kl: KLEstimate = "k3"
    normaliser: Literal["groups", "sequences"] = "groups"
    step_norm: StepNorm = "length"
    k: Positive = 10.0

    def normalise(self, groups: Nest) -> Coefficients:
        if self.normaliser == "sequences":
            return batch_sequence_mean(groups)
        return group_mean(groups, step_norm=self.step_norm, token_mean=True, k=self.k)
