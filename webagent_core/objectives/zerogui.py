"""ZeroGUI (arXiv:2505.23762), Eq. 3-6: GRPO averaged over all steps of a group, with the k2 estimate of the KL."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from webagent_core.objectives.kl import KLEstimate
from webagent_core.objectives.normalisers import Coefficients, Nest, batch_row_mean, group_row_mean
from webagent_core.objectives.policy_gradient import GroupPolicyGradient, NonNegative


class ZeroGUI(GroupPolicyGradient):
    """L = 1/(sum_i T_i) sum_i sum_j 1/m_ij sum_t ( -min(rho A_i, clip(rho, 1 - eps, 1 + eps) A_i) + beta k2 ).

    The paper makes one update a rollout, so rho is 1 and eps (undisclosed) idle. The authors' code caps each token's
    KL gradient at that of its policy term, and averages over the steps of the whole batch.
    """

    name: ClassVar[str] = "zerogui"
    released: ClassVar[dict[str, Any] | None] = {"normaliser": "rows", "kl": "k2_capped", "adv_eps": 1e-8}

    beta: NonNegative = 0.1
    kl: KLEstimate = "k2"
    drop_flat_groups: bool = True
    normaliser: Literal["groups", "rows"] = "groups"

    def normalise(self, groups: Nest) -> Coefficients:
        return batch_row_mean(groups) if self.normaliser == "rows" else group_row_mean(groups)
