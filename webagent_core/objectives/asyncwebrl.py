"""AsyncWebRL (arXiv:2606.05597), Eq. 1: GRPO with a constant step normaliser and a ratio split for stale data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from webagent_core.objectives.base import RowTensors
from webagent_core.objectives.normalisers import Coefficients, Nest, StepNorm, batch_token_mean, group_mean
from webagent_core.objectives.policy_gradient import DualClip, GroupPolicyGradient, Positive
from webagent_core.objectives.ratios import behaviour_weight


class AsyncWebRL(GroupPolicyGradient):
    """L = -1/(G k) sum_i sum_j sum_t w min(u A_i, clip(u, 1 - eps, 1 + eps) A_i).

    u = pi/pi_prox and w = pi_prox/pi_behave: only how far this update moves, u, is clipped; how stale the data was, w,
    stays as a weight. The dual clip bounds the part in u, then w multiplies. `prox_logp` left out is `old_logp`, the
    policy at the start of the update. The authors' code divides by the tokens of the whole batch and drops tokens with
    w > 5.
    """

    name: ClassVar[str] = "asyncwebrl"
    released: ClassVar[dict[str, Any] | None] = {"normaliser": "tokens", "behave_cap": 5.0, "adv_eps": 1e-5}

    dual_clip: DualClip = 3.0
    drop_flat_groups: bool = True
    normaliser: Literal["groups", "tokens"] = "groups"
    step_norm: StepNorm = "k"
    k: Positive = 10.0
    decoupled: bool = True  # False: one ratio pi/pi_behave, clipped
    behave_cap: Positive | None = None
    behave_cap_mode: Literal["drop", "clip"] = "drop"

    @property
    def required_logps(self) -> dict[str, str]:
        return super().required_logps | {"behave_logp": "the policy that sampled the data, to weigh how stale it is"}

    def normalise(self, groups: Nest) -> Coefficients:
        if self.normaliser == "tokens":
            return batch_token_mean(groups, step_norm=self.step_norm, k=self.k)
        return group_mean(groups, step_norm=self.step_norm, token_mean=False, k=self.k)

    def surrogate(self, rows: RowTensors) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.decoupled:
            return super().surrogate(replace(rows, old_logp=rows.behave_logp))
        prox = next(logp for logp in (rows.prox_logp, rows.old_logp, rows.logp.detach()) if logp is not None)
        surrogate, metrics = super().surrogate(replace(rows, old_logp=prox))
        weight = behaviour_weight(prox, rows.behave_logp, self.behave_cap, self.behave_cap_mode)
        return weight * surrogate, metrics | {"behave_weight": weight}
