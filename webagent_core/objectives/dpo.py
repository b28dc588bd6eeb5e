"""The two methods that learn from pairs: UI-TARS (arXiv:2501.12326, 4.5) and Agent Q (arXiv:2408.07199, Eq. 5)."""

from __future__ import annotations

from typing import ClassVar

from webagent_core.objectives.base import LossOutput, Metric, Objective, PairTensors
from webagent_core.objectives.policy_gradient import Positive
from webagent_core.objectives.preference import dpo, sequence_log_ratio


class DPO(Objective):
    """L = -mean over pairs of log sigmoid(beta log pi/pi_ref(chosen) - beta log pi/pi_ref(rejected))."""

    inputs: ClassVar[tuple[str, ...]] = ("pairs",)
    stored_reference: ClassVar[bool] = False  # the reference is what was stored at sampling, not a model in memory

    beta: Positive = 0.1

    @property
    def required_logps(self) -> dict[str, str]:
        return {"ref_logp": "a preference is relative to the reference policy"}

    def pair_loss(self, pairs: PairTensors) -> LossOutput:
        chosen = sequence_log_ratio(pairs.chosen_logp, pairs.chosen_ref_logp, pairs.chosen_mask)
        rejected = sequence_log_ratio(pairs.rejected_logp, pairs.rejected_ref_logp, pairs.rejected_mask)
        count = pairs.coefficient.new_tensor(len(pairs.coefficient))
        margin = self.beta * (chosen - rejected).detach()
        metrics = {
            "margin": Metric(margin.sum(), count),
            "accuracy": Metric((margin > 0).sum(), count),
            "chosen_reward": Metric(self.beta * chosen.detach().sum(), count),
            "rejected_reward": Metric(self.beta * rejected.detach().sum(), count),
        }
        return LossOutput((pairs.coefficient.to(chosen) * dpo(chosen, rejected, self.beta)).sum(), metrics)


class UITARS(DPO):
    """A step that went wrong (rejected) against its labelled correction (chosen); the reference is the SFT model.

    The paper does not give its beta; no code is public.
    """

    name: ClassVar[str] = "uitars"


class AgentQ(DPO):
    """Two explored actions of one tree node whose Q differ enough; the reference is what was stored at sampling.

    The paper gives no numbers at all; no official code is public.
    """

    name: ClassVar[str] = "agentq"
    stored_reference: ClassVar[bool] = True
