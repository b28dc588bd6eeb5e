"""Rewards made of rewards. An invalid part makes the whole invalid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from webagent_core.episode.trajectory import Trajectory
from webagent_core.rewards.counts import form_counts
from webagent_core.rewards.reward_manager import Reward, RewardManager, score_one


class Layered(RewardManager):
    """The first layer that has something to say decides: cheap checks before a judge.

    Args:
        layers: each gives a number, a `Reward`, or None to pass on.
        last: scores what they all passed on.
    """

    def __init__(self, *layers: Callable[[Trajectory], float | Reward | None], last: RewardManager) -> None:
        self.layers, self.last = layers, last

    async def score(self, trajectory: Trajectory) -> Reward | float:
        for layer in self.layers:
            said = layer(trajectory)
            if said is not None:
                return said
        return await score_one(self.last, trajectory)


class Mixed(RewardManager):
    """UI-TARS-2 (arXiv:2509.02544), reward design: each task is scored by what there is for it.

    Args:
        facts: by group, else by task name: a text, the reference answer that `reference` compares with; None: no
            program can tell, `outcome_model` says. A task that it does not name is scored by `program`.
    """

    def __init__(
        self,
        facts: Mapping[str, str | None],
        *,
        program: RewardManager,
        reference: RewardManager | None = None,
        outcome_model: RewardManager | None = None,
    ) -> None:
        self.facts, self.program, self.reference, self.outcome_model = facts, program, reference, outcome_model

    async def score(self, trajectory: Trajectory) -> Reward:
        key = trajectory.group if trajectory.group in self.facts else trajectory.task
        if key not in self.facts:
            return await score_one(self.program, trajectory)
        manager = self.outcome_model if self.facts[key] is None else self.reference
        if manager is None:
            raise ValueError(f"facts of {key} = {self.facts[key]!r}, and nothing is there to score it with")
        return await score_one(manager, trajectory)


class WithFormat(RewardManager):
    """ARPO (arXiv:2505.16282, Eq. 2): r_t + weight * r_f, r_f = -1 if a response held no action, else 0.

    The authors' code has weight 0.5. The outcome stays r_t, which is what its replay asks for.
    """

    def __init__(self, inner: RewardManager, *, weight: float = 1.0) -> None:
        self.inner, self.weight = inner, weight

    async def score(self, trajectory: Trajectory) -> Reward:
        counts = form_counts(trajectory)
        penalty = -self.weight if counts.format_errors else 0.0
        why = f"{counts.format_errors} of {counts.steps} responses without an action"
        return _plus(await score_one(self.inner, trajectory), penalty, why)


class LengthPenalty(RewardManager):
    """UI-TARS-2 (arXiv:2509.02544) penalises length in some domains and gives no formula; this one is ours.

    Nothing up to `free`, then growing linearly to `most` at `limit`, and no more beyond.

    Args:
        of: the length: "steps" or "response_tokens".
        only_success: leave a reward of 0 or less as it is, so that a short failure is no better than a long one.
    """

    def __init__(
        self,
        inner: RewardManager,
        *,
        free: int,
        limit: int,
        most: float = 0.5,
        of: str = "steps",
        only_success: bool = True,
    ) -> None:
        if not 0 <= free < limit:
            raise ValueError(f"free = {free!r}, limit = {limit!r} are not allowed: 0 <= free < limit")
        if of not in ("steps", "response_tokens"):
            raise ValueError(f"of = {of!r} is not allowed: steps or response_tokens")
        if most < 0:
            raise ValueError(f"most = {most!r} is not allowed: at least 0")
        self.inner, self.free, self.limit, self.most = inner, free, limit, most
        self.of, self.only_success = of, only_success

    async def score(self, trajectory: Trajectory) -> Reward:
        reward = await score_one(self.inner, trajectory)
        if self.only_success and reward.valid and reward.value <= 0:
            return reward
        length = getattr(form_counts(trajectory), self.of)
        share = min(1.0, max(0.0, (length - self.free) / (self.limit - self.free)))
        return _plus(reward, -self.most * share, f"{length} {self.of}")


def _plus(reward: Reward, amount: float, why: str) -> Reward:
    if not reward.valid or not amount:
        return reward
    outcome = reward.value if reward.outcome is None else reward.outcome
    reasons = (*reward.reasons, f"{amount:+g}: {why}")
    return replace(reward, value=reward.value + amount, outcome=outcome, reasons=reasons)
