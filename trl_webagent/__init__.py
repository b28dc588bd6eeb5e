"""The methods as TRL trainers. Thin: the formulas, prompts, parsers and rewards are webagent_core's."""

from trl_webagent.step_grpo_config import StepGRPOConfig
from trl_webagent.step_grpo_trainer import StepGRPOTrainer, trajectory_reward

__all__ = ["StepGRPOConfig", "StepGRPOTrainer", "trajectory_reward"]
