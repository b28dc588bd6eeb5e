"""ARPO (arXiv:2505.16282), sections 3.1 and 3.5: GRPO on whole trajectories, with replay into groups that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from webagent_core.objectives.base import Plan, TrajectoryFacts
from webagent_core.objectives.groups import by_group, not_usable
from webagent_core.objectives.normalisers import Coefficients, Nest, batch_sequence_mean, group_sequence_mean
from webagent_core.objectives.policy_gradient import GroupPolicyGradient, NonNegative
from webagent_core.objectives.replay import ReplayRule, ReplaySlot, replaced_slot, wants_replay


class ARPO(GroupPolicyGradient):
    """L = -1/G sum_i 1/|o_i| sum_t min(rho A_i, clip(rho, 1 - eps_low, 1 + eps_high) A_i), o_i all of a trajectory.

    A stored success offered to its group takes the place of a member before the advantages, if all of them failed.
    The authors' code adds a dual clip and averages over the trajectories of the whole batch.
    """

    name: ClassVar[str] = "arpo"
    released: ClassVar[dict[str, Any] | None] = {
        "normaliser": "sequences", "dual_clip": 3.0, "adv_eps": 1e-6, "replay_rule": "low_mean", "replay_slot": "first",
    }  # fmt: skip

    eps_high: NonNegative = 0.3
    normaliser: Literal["groups", "sequences"] = "groups"
    replay: bool = True
    replay_rule: ReplayRule = "all_failed"
    replay_slot: ReplaySlot = "random"
    replay_seed: int = 0

    def normalise(self, groups: Nest) -> Coefficients:
        return batch_sequence_mean(groups) if self.normaliser == "sequences" else group_sequence_mean(groups)

    def plan(self, facts: Sequence[TrajectoryFacts], update: int | None = None) -> Plan:
        groups, dropped = by_group(facts), not_usable(facts)
        for name, members in groups.items():
            stored = [i for i in members if facts[i].stored]
            fresh = [i for i in members if not facts[i].stored]
            scores = [facts[i].score for i in fresh if facts[i].score is not None]
            if self.replay and stored and wants_replay(scores, self.replay_rule):
                slot = replaced_slot(len(fresh), self.replay_slot, self.replay_seed, name)
                dropped[fresh[slot]] = "replaced"
                fresh[slot] = stored.pop(0)
            dropped.update(dict.fromkeys(stored, "stored"))
            groups[name] = fresh
        return self.plan_groups(facts, {name: members for name, members in groups.items() if members}, dropped)
