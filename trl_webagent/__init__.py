"""The methods as TRL trainers. Thin: the formulas, prompts, parsers and rewards are webagent_core's."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_webagent.critic_config import CriticConfig
    from trl_webagent.critic_trainer import CriticTrainer
    from trl_webagent.phase_trainer import PhaseTrainer
    from trl_webagent.preference_trainer import PairDPOTrainer, pair_rows
    from trl_webagent.step_grpo_config import StepGRPOConfig
    from trl_webagent.step_grpo_trainer import StepGRPOTrainer, trajectory_reward

__all__ = [
    "CriticConfig",
    "CriticTrainer",
    "PairDPOTrainer",
    "PhaseTrainer",
    "StepGRPOConfig",
    "StepGRPOTrainer",
    "pair_rows",
    "trajectory_reward",
]

MODULES = {
    "CriticConfig": "critic_config",
    "CriticTrainer": "critic_trainer",
    "PairDPOTrainer": "preference_trainer",
    "PhaseTrainer": "phase_trainer",
    "StepGRPOConfig": "step_grpo_config",
    "StepGRPOTrainer": "step_grpo_trainer",
    "pair_rows": "preference_trainer",
    "trajectory_reward": "step_grpo_trainer",
}


def __getattr__(name: str) -> Any:
    # On first use: a command line with a typing error is answered before TRL's seconds of imports.
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
