"""How good a trajectory, a step or a token was."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, up to the rounding of the last bits.

    Decided on the rewards: the computed standard deviation of three times 0.1 is not zero.
    """
    return math.isclose(min(rewards), max(rewards), rel_tol=1e-9, abs_tol=1e-12)


def why_no_signal(rewards: Sequence[float | None]) -> str | None:
    """Why a group has nothing to compare: "lone" with fewer than two scored members, "flat" with equal rewards.

    None (an invalid member) is not a reward. The result None means that the group has signal. Where the reward is
    shaped, ask about the outcomes.
    """
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return "lone"
    return "flat" if is_flat(scored) else None


def group_zscore(rewards: Sequence[float], ddof: int = 1, eps: float = 0.0, divide_by_std: bool = True) -> list[float]:
    """A_i = (r_i - mean(r)) / (std(r) + eps) over the G valid members of one group (GRPO; source part 2).

    `ddof` 1 is the sample standard deviation, 0 the population's; `divide_by_std=False` leaves the difference from
    the mean. A flat group, and a group of one, is exactly 0. Two passes, so a large common offset costs no digits.
    """
    size = len(rewards)
    if size < 2 or is_flat(rewards):
        return [0.0] * size
    mean = math.fsum(rewards) / size
    centred = [reward - mean for reward in rewards]
    if not divide_by_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (size - ddof))
    return [c / (std + eps) for c in centred]


def success_indicator(reward: float) -> float:
    """1[R = 1] (WebGym, supplement F, Eq. 1)."""
    return 1.0 if reward == 1 else 0.0


def length_adaptive_lambda(length: int, alpha: float) -> float:
    """lambda = max(0, 1 - 1/(alpha l)), l the policy tokens of the trajectory (UI-TARS-2).

    Up to l = 1/alpha the paper's 1 - 1/(alpha l) is negative or 0; a negative lambda means nothing, so 0 stands.
    """
    return max(0.0, 1 - 1 / (alpha * length)) if length else 0.0


def terminal_reward(reward: float, mask: Tensor) -> Tensor:
    """(L,) rewards of a trajectory that is scored once: all of it on its last policy token, whatever follows."""
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    policy = mask.nonzero()
    if len(policy):
        rewards[policy[-1]] = reward
    return rewards


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over the policy tokens of one trajectory, all (L,); other tokens are as if absent."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (generalised advantage estimation).

    One trajectory, all (L,): its rows one after the other. Tokens where `mask` is 0 are skipped as if absent and get
    0; V is 0 after the last policy token. lam 1 is the Monte Carlo return minus V.
    """
    policy = mask.bool()
    r, v = rewards[policy].double(), values[policy].double()
    next_v = torch.cat([v[1:], v.new_zeros(min(len(v), 1))])
    delta = (r + gamma * next_v - v).tolist()
    running, backwards = 0.0, []
    for d in reversed(delta):
        running = d + gamma * lam * running
        backwards.append(running)
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    advantages[policy] = torch.tensor(backwards[::-1], dtype=torch.float64)
    return advantages


def td_mc_blend(values: Sequence[float], outcome: float, lam: float, gamma: float = 1.0) -> list[float]:
    """A_t = lam (r_t + gamma V_{t+1} - V_t) + (1 - lam) (gamma^(T-1-t) R - V_t) (WebRL, Eq. 8).

    `values` are V(s_t) of the T states; the reward r_t is 0 before the last step and R, the outcome, there; V is 0
    after the end. Eq. 8 writes no discount: gamma 1.
    """
    steps = len(values)
    advantages = []
    for t, value in enumerate(values):
        last = t == steps - 1
        td = outcome - value if last else gamma * values[t + 1] - value
        advantages.append(lam * td + (1 - lam) * (gamma ** (steps - 1 - t) * outcome - value))
    return advantages


def released_webrl_advantage(values: Sequence[float], outcome: float, gamma: float, offset: float) -> list[float]:
    """clamp(V_{t+1} - V_t - offset + r_t + gamma^(T-1-t) R, -1, 1): what WebRL's authors' code computes for Eq. 8."""
    steps = len(values)
    advantages = []
    for t, value in enumerate(values):
        last = t == steps - 1
        raw = (0.0 if last else values[t + 1]) - value - offset + (outcome if last else 0.0)
        advantages.append(min(1.0, max(-1.0, raw + gamma ** (steps - 1 - t) * outcome)))
    return advantages
