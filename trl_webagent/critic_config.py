"""Settings of CriticTrainer that StepGRPOConfig does not have."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl_webagent.step_grpo_config import StepGRPOConfig


@dataclass
class CriticConfig(StepGRPOConfig):
    """StepGRPOConfig for methods with a value network.

    The critic's AdamW takes `adam_beta1`, `adam_beta2`, `adam_epsilon`, `weight_decay` and `max_grad_norm` (of its own
    gradient) from the policy's; its learning rate is constant.

    > Parameters that control the critic

        critic_learning_rate (`float`, defaults to `5e-6`):
            Learning rate of the critic.
        critic_passes (`int`, defaults to `1`):
            Passes over the rows of a batch.
        critic_pretrain_passes (`int` or `None`, defaults to `None`):
            Passes while the policy stands still (UI-TARS-2's value pre-training). None: `critic_passes`.
        critic_rows_per_step (`int` or `None`, defaults to `None`):
            Rows of this process in one step of the critic's optimizer, drawn anew in every pass. None: all rows of
            the batch, so that a pass is one step.
        critic_min_gain (`float` or `None`, defaults to `None`):
            The value pre-training ends before the objective's `pretrain_updates` once the explained variance no
            longer rises by so much, see `webagent_core.objectives.value_pretraining`. None: it never does.
    """

    critic_learning_rate: float = field(default=5e-6, metadata={"help": "Learning rate of the critic."})
    critic_passes: int = field(default=1, metadata={"help": "Passes of the critic over the rows of a batch."})
    critic_pretrain_passes: int | None = field(
        default=None, metadata={"help": "Passes while the policy stands still; None: critic_passes."}
    )
    critic_rows_per_step: int | None = field(
        default=None, metadata={"help": "Rows in one step of the critic's optimizer; None: all of the batch."}
    )
    critic_min_gain: float | None = field(
        default=None, metadata={"help": "Rise of the explained variance below which value pre-training ends."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic_learning_rate <= 0:
            raise ValueError(f"critic_learning_rate = {self.critic_learning_rate!r} is not allowed: > 0")
        for name in ("critic_passes", "critic_pretrain_passes", "critic_rows_per_step"):
            value = getattr(self, name)
            if (value is None and name == "critic_passes") or (value is not None and value < 1):
                allowed = "numbers from 1" if name == "critic_passes" else "None and numbers from 1"
                raise ValueError(f"{name} = {value!r} is not allowed: {allowed}")
