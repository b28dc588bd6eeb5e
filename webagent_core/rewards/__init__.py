"""Rewards: rules, judges, votes and outcome models behind one class with one method, `RewardManager.score`.

What needs the `judge` extra (a judge's client, HTML checks) or torch (the outcome model) is imported from its module.
"""

from webagent_core.rewards.reward_manager import (
    JudgeError,
    Reward,
    RewardError,
    RewardManager,
    record,
    score_all,
    score_one,
)
from webagent_core.rewards.scoring import Scoring, trl_reward

__all__ = [
    "JudgeError",
    "Reward",
    "RewardError",
    "RewardManager",
    "Scoring",
    "record",
    "score_all",
    "score_one",
    "trl_reward",
]
