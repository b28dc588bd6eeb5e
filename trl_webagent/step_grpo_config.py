"""Settings of StepGRPOTrainer that GRPOConfig does not have."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig


@dataclass
class StepGRPOConfig(GRPOConfig):
    """GRPOConfig for trajectories of several steps, each a training row of its own.

    What keeps its meaning: `num_generations` is G, the attempts at one task; `max_completion_length` bounds one
    response. What counts differently: `per_device_train_batch_size` counts trajectories, since how many rows they
    will have is not known before they are played; memory is bounded by `max_rows_per_forward`. What the objective
    decides instead, so that setting it here is refused: `loss_type`, `epsilon`, `epsilon_high`, `delta`,
    `scale_rewards`, `importance_sampling_level`, `multi_objective_aggregation`, `use_bias_correction_kl`,
    `off_policy_mask_threshold`, `mask_truncated_completions`, `top_entropy_quantile` and `entropy_coef`. `beta` is
    copied from the objective; the trainer refuses another one. With `use_vllm`, `vllm_importance_sampling_correction`
    must be False.

    > Parameters that control the rows

        max_rows_per_forward (`int` or `None`, defaults to `64`):
            Most rows in one forward and backward pass. The loss and its gradient do not depend on it. None: all at
            once.
        max_context_tokens (`int` or `None`, defaults to `None`):
            Longest prompt plus `max_completion_length`; a step whose prompt does not fit ends its episode as
            `context_overflow`. None: no bound.
    """

    max_rows_per_forward: int | None = field(
        default=64, metadata={"help": "Most rows in one forward and backward pass; None: all at once."}
    )
    max_context_tokens: int | None = field(
        default=None, metadata={"help": "Most tokens of prompt and response together; None: no bound."}
    )

    # The objective's ground. Compared with GRPOConfig's own defaults: only a value that somebody set is refused.
    _OBJECTIVES_OWN = (
        "loss_type", "epsilon", "epsilon_high", "delta", "scale_rewards", "importance_sampling_level",
        "multi_objective_aggregation", "use_bias_correction_kl", "off_policy_mask_threshold",
        "mask_truncated_completions", "top_entropy_quantile", "entropy_coef",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_rows_per_forward is not None and self.max_rows_per_forward < 1:
            raise ValueError(
                f"max_rows_per_forward = {self.max_rows_per_forward!r}: allowed are None and numbers from 1"
            )
        if self.max_context_tokens is not None and self.max_context_tokens <= self.max_completion_length:
            raise ValueError(
                f"max_context_tokens = {self.max_context_tokens!r}: must exceed max_completion_length = "
                f"{self.max_completion_length}, or no prompt ever fits"
            )
        if self.use_vllm and self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction = True: StepGRPOTrainer does not correct for vLLM's own "
                "log-probabilities; with use_vllm = True it must be False"
            )
        stock = GRPOConfig.__dataclass_fields__
        for name in self._OBJECTIVES_OWN:
            # GRPOConfig's own initialisation turns `scale_rewards` into its canonical text.
            default = {"scale_rewards": "group"}.get(name, stock[name].default)
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: StepGRPOTrainer takes this from its objective; set it there, "
                    "e.g. load_objective('webagent_r1', eps_low=0.2)"
                )
