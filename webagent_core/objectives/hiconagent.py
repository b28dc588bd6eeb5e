"""HiconAgent (arXiv:2512.01763), Eq. 1 and 3-6: single-step GRPO over answers, with a compressed-history branch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from webagent_core.objectives.base import LossOutput, Plan, RowTensors, TrajectoryFacts
from webagent_core.objectives.kl import KLEstimate, k3
from webagent_core.objectives.normalisers import Coefficients, Nest, batch_token_mean, group_sequence_mean
from webagent_core.objectives.policy_gradient import GroupPolicyGradient, NonNegative, token_metrics, weighted_sum


class HiconAgent(GroupPolicyGradient):
    """L = GRPO(full history) + GRPO(compressed history) + consistency * KL(compressed || full, detached).

    A group is the G answers to one step; GRPO = 1/G sum_i 1/m_i sum_t ( -min(rho A_i, clip(rho) A_i) + beta KL ), with
    one advantage for both branches. `hcpo` None: the compressed branch takes part when the rows carry one; False is
    Eq. 1 alone. The authors' code averages over the tokens of the batch and gives the full branch ratio 1.
    """

    name: ClassVar[str] = "hiconagent"
    released: ClassVar[dict[str, Any] | None] = {"normaliser": "tokens", "adv_eps": 1e-6, "full_ratio": "one"}
    inputs: ClassVar[tuple[str, ...]] = ("responses", "trajectories")

    beta: NonNegative = 0.01
    kl: KLEstimate = "k3"
    normaliser: Literal["groups", "tokens"] = "groups"
    hcpo: bool | None = None
    consistency: NonNegative = 0.1
    full_ratio: Literal["clipped", "one"] = "clipped"

    def normalise(self, groups: Nest) -> Coefficients:
        return batch_token_mean(groups) if self.normaliser == "tokens" else group_sequence_mean(groups)

    def plan(self, facts: Sequence[TrajectoryFacts], update: int | None = None) -> Plan:
        for trajectory in facts:
            if len(trajectory.tokens) > 1:
                raise ValueError(f"{self.name}: {len(trajectory.tokens)} steps are not allowed: an answer is one step")
        return super().plan(facts, update)

    def fitted(self, given: Collection[str]) -> HiconAgent:
        return self if self.hcpo is not None else self.model_copy(update={"hcpo": "compressed_logp" in given})

    @property
    def required_logps(self) -> dict[str, str]:
        required = super().required_logps
        if self.hcpo:
            required |= {f"compressed_{name}": why for name, why in required.items()}
            required["compressed_logp"] = "hcpo = true trains on the answers after the compressed history too"
        return required

    def loss(self, rows: RowTensors) -> LossOutput:
        if self.hcpo is None:
            return self.fitted([name for name, tensor in vars(rows).items() if tensor is not None]).loss(rows)
        if not self.hcpo:
            return super().loss(rows)
        self.require_logps(rows)
        full = rows.clean()
        compressed = replace(
            full, logp=full.compressed_logp, old_logp=full.compressed_old_logp, ref_logp=full.compressed_ref_logp
        )
        if self.full_ratio == "one":
            full = replace(full, old_logp=None)
        full_loss, metrics = self.token_loss(full)
        compressed_loss, of_compressed = self.token_loss(compressed)
        metrics |= {f"compressed_{name}": value for name, value in of_compressed.items()}
        metrics["consistency"] = k3(compressed.logp, full.logp.detach())
        token_loss = full_loss + compressed_loss + self.consistency * metrics["consistency"]
        return LossOutput(weighted_sum(token_loss, full), token_metrics(full, metrics))
