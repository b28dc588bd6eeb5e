"""The methods as TRL trainers. Thin: the formulas, prompts, parsers and rewards are webagent_core's."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_webagent.step_grpo_config import StepGRPOConfig
    from trl_webagent.step_grpo_trainer import StepGRPOTrainer, trajectory_reward

__all__ = ["StepGRPOConfig", "StepGRPOTrainer", "trajectory_reward"]


def __getattr__(name: str) -> Any:
    # On first use: a command line with a typing error is answered before TRL's seconds of imports.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "step_grpo_config" if name == "StepGRPOConfig" else "step_grpo_trainer"
    return getattr(import_module(f"{__name__}.{module}"), name)
