"""OpenWebRL (arXiv:2606.02031), section 4.4: MM-GRPO, a token mean in each turn and a sum over turns."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from webagent_core.objectives.normalisers import Coefficients, Nest, StepNorm, batch_row_mean, group_mean
from webagent_core.objectives.policy_gradient import GroupPolicyGradient, NonNegative, Positive


class OpenWebRL(GroupPolicyGradient):
    """L = -1/G sum_i sum_j 1/max(m_ij, 1) sum_t min(rho A_i, clip(rho, 1 - eps_low, 1 + eps_high) A_i).

    Turns are added, not averaged, so that hard tasks with many turns are not diluted; the window is wider upwards.
    The authors' code divides by the turns of the whole batch.
    """

    name: ClassVar[str] = "openwebrl"
    released: ClassVar[dict[str, Any] | None] = {"normaliser": "rows"}

    eps_high: NonNegative = 0.28
    adv_eps: NonNegative = 1e-6
    drop_flat_groups: bool = True
    normaliser: Literal["groups", "rows"] = "groups"
    step_norm: StepNorm = "none"
    k: Positive = 10.0

    def normalise(self, groups: Nest) -> Coefficients:
        if self.normaliser == "rows":
            return batch_row_mean(groups)
        return group_mean(groups, step_norm=self.step_norm, token_mean=True, k=self.k)
