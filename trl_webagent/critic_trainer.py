"""StepGRPOTrainer with a value network beside the policy: UI-TARS-2's PPO and WebRL's regression.

What comes between the playing of a batch and its rows: the critic says what it thinks of every step, `Objective.plan`
turns that and the rewards into advantages and value targets, and the critic takes its optimizer steps towards the
targets. Then the policy is trained as ever. While the objective lets the policy wait (UI-TARS-2's value pre-training)
no row of the plan has a policy coefficient, and only the critic moves.

The critic lives outside the stock loop, with its own optimizer and its own file in every checkpoint.
"""

from __future__ import annotations

import copy
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModel, PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import disable_dropout_in_model, pad

from trl_webagent.critic_config import CriticConfig
from trl_webagent.step_grpo_trainer import StepGRPOTrainer
from webagent_core.episode.trajectory import Step
from webagent_core.objectives import Objective, Plan, RowPlan, TrajectoryFacts, ValueTensors
from webagent_core.objectives.value_losses import explained_variance
from webagent_core.objectives.value_pretraining import ValuePretraining
from webagent_core.sampling.stored import trajectory_of

STATE = "critic.pt"


class ValueModel(torch.nn.Module):
    """A language model's body with one number a token in the place of the next token's logits, 0 at the start."""

    def __init__(self, body: PreTrainedModel) -> None:
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(body.config.get_text_config().hidden_size, 1, dtype=body.dtype)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    @classmethod
    def like(cls, policy: str | PreTrainedModel) -> ValueModel:
        """A value model that starts from a policy's weights, in float32 if they are read from its folder."""
        if isinstance(policy, PreTrainedModel):
            return cls(copy.deepcopy(policy.base_model))
        if isinstance(policy, str | os.PathLike):
            return cls(AutoModel.from_pretrained(policy, dtype=torch.float32))
        raise ValueError(
            f"critic = None is not allowed with a policy that is a {type(policy).__name__}: give the folder or hub name"
            " of the weights from which the critic is to start"
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, keep: int, **pictures: Tensor) -> Tensor:
        """(M, keep): the outputs at the last `keep` positions."""
        out = self.body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **pictures)
        return self.head(out.last_hidden_state[:, -keep:]).squeeze(-1)


class CriticTrainer(StepGRPOTrainer):
    """StepGRPOTrainer for objectives with a critic; see the module's text and `CriticConfig`.

    Args:
        critic: folder or hub name of the model from whose weights the critic starts, with the policy's tokenizer; None
            takes the policy's own.

    The metrics beside StepGRPOTrainer's: `explained_variance` of the batch by the critic that was not trained on it
    yet, `value_loss` (the mean over its tokens or states, and passes), `value_mean`, `value_grad_norm`,
    `seconds/values` and `seconds/critic`.
    """

    def __init__(
        self,
        model: Any,
        *,
        objective: Objective,
        args: CriticConfig,
        critic: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not objective.uses_critic:
            raise ValueError(f"objective = {objective.name} is not allowed: it has no critic; use StepGRPOTrainer")
        value_model = ValueModel.like(model if critic is None else critic)
        super().__init__(model, objective=objective, args=args, **kwargs)
        if self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise ValueError(
                f"distributed_type = {self.accelerator.distributed_type.value} is not allowed: CriticTrainer keeps the"
                " whole critic on every process; use one process, or data parallelism"
            )
        disable_dropout_in_model(value_model)
        if args.gradient_checkpointing:
            value_model.body.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        self.critic = self.accelerator.prepare_model(value_model)
        self.critic_optimizer = torch.optim.AdamW(
            self.critic.parameters(),
            lr=args.critic_learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        self.value_pretraining = ValuePretraining(args.critic_min_gain)
        # Of the batch at hand and what joins it, per trajectory: the steps, and the critic's values of each.
        self._judged: list[list[Step]] = []
        self._of_critic: list[list[Tensor]] = []

    # ------------------------------------------------------------------------------------------------ values

    def _facts(self) -> list[TrajectoryFacts]:
        started = time.perf_counter()
        facts = super()._facts()
        joined = [trajectory_of(entry.data) for entry in self._joined] if self._samples else []
        self._judged = [trajectory.steps for trajectory in self._trajectories + joined]
        values = iter(self._values([step for steps in self._judged for step in steps]))
        self._of_critic = [[next(values) for _ in steps] for steps in self._judged]
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["seconds/values"].append(time.perf_counter() - started)
        return [replace(each, values=of_steps) for each, of_steps in zip(facts, self._of_critic, strict=True)]

    @torch.no_grad()
    def _values(self, steps: list[Step]) -> list[Tensor]:
        """Per step what `Objective.plan` takes: one value a response token, or one of the state before it, as (1,)."""
        if not steps:
            return []
        self.critic.eval()
        values: list[Tensor] = [torch.empty(0)] * len(steps)
        for rows, part in self._chunks(self._tokens(steps)):
            of_rows = self.objective.values(self._outputs(part)).cpu()
            for row, value in zip(rows.tolist(), of_rows, strict=True):
                values[row] = value[: len(steps[row].response_ids)] if value.dim() else value.reshape(1)
        return values

    def _outputs(self, rows: dict[str, Any]) -> Tensor:
        """The critic's outputs before each response token, (M, L), or at the end of the prompt, (M,)."""
        ids, mask = rows["prompt_ids"], rows["prompt_mask"]
        at_tokens = self.objective.value_at == "token"
        if at_tokens:
            ids, mask = (torch.cat([rows[f"prompt_{x}"], rows[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
        tokens = rows["completion_ids"].size(1) if at_tokens else 0
        pictures = self._images(ids, rows["pictures"]) if self._images else {}
        pictures.pop("num_images", None)
        with self.accelerator.autocast():
            outputs = self.critic(ids, mask, keep=tokens + 1, **pictures).float()
        return outputs[:, :-1] if at_tokens else outputs[:, 0]

    # ------------------------------------------------------------------------------------------------ learning

    def _plan(self) -> tuple[Plan, int]:
        plan, first = super()._plan()
        if self.model.training:
            self._train_critic(plan, first)
        return plan, first

    def _train_critic(self, plan: Plan, first: int) -> None:
        """The critic's optimizer steps on the value targets of a plan over all ranks."""
        started = time.perf_counter()
        mine = plan.trajectories[first : first + len(self._judged)]
        taught = [
            (step, row, value)
            for steps, planned, values in zip(self._judged, mine, self._of_critic, strict=True)
            for step, row, value in zip(steps, planned.rows, values, strict=True)
            if row.value_coefficient
        ]
        policy_waits = not any(row.coefficient for row in plan.rows)
        self._judge_critic([(value, row.value_target) for _, row, value in taught], policy_waits)
        count = max(gather_object([len(taught)]))
        if not count:
            return
        rows = self._value_rows([step for step, *_ in taught], [row for _, row, _ in taught], count)
        args = self.args
        passes = args.critic_pretrain_passes if policy_waits and args.critic_pretrain_passes else args.critic_passes
        shuffled = torch.Generator().manual_seed(args.seed + self.state.global_step)
        for _ in range(passes):
            order = torch.randperm(count, generator=shuffled) if args.critic_rows_per_step else torch.arange(count)
            for part in order.split(args.critic_rows_per_step or count):
                # Each optimizer step stands for the whole batch.
                self._critic_step(_picked(rows, part), share=count / len(part))
        self._metrics["train"]["seconds/critic"].append(time.perf_counter() - started)

    def _judge_critic(self, judged: list[tuple[Tensor, float | Tensor]], policy_waits: bool) -> None:
        """How well the critic foresaw the batch, all ranks together, and whether its pre-training ends with that."""
        pairs = [(value.double(), torch.as_tensor(target).double().expand_as(value)) for value, target in judged]
        pairs = gather_object(pairs)
        if not pairs:
            return
        values, targets = (torch.cat(column) for column in zip(*pairs, strict=True))
        explained = explained_variance(values, targets)
        if explained is not None:
            self._metrics["train"]["explained_variance"].append(explained)
        self._metrics["train"]["value_mean"].append(float(values.mean()))
        if policy_waits:
            self.value_pretraining.add(explained)
            self._end_pretraining()

    def _end_pretraining(self) -> None:
        if self.value_pretraining.over:
            self.objective = self.objective.model_copy(update={"pretrain_updates": 0})

    def _value_rows(self, steps: list[Step], planned: list[RowPlan], count: int) -> dict[str, Any]:
        """`count` rows with their targets; those beyond `steps` have coefficient 0."""
        filler = count - len(steps)
        rows = self._tokens(steps, filler)
        targets = [torch.as_tensor(row.value_target).float() for row in planned]
        if self.objective.value_at == "token":
            lengths = rows["completion_mask"].sum(1).tolist()
            targets += [torch.zeros(())] * filler
            targets = pad([target.expand(m) for target, m in zip(targets, lengths, strict=True)], 0.0, "right")
        else:
            targets = torch.cat([torch.stack(targets) if targets else torch.empty(0), torch.zeros(filler)])
        coefficients = torch.tensor([row.value_coefficient for row in planned] + [0.0] * filler)
        device = self.accelerator.device
        return rows | {"value_targets": targets.to(device), "value_coefficients": coefficients.to(device)}

    def _critic_step(self, rows: dict[str, Any], share: float) -> None:
        self.critic.train()
        chunks = self._chunks(rows)
        for number, (_, part) in enumerate(chunks, 1):
            with self.accelerator.no_sync(self.critic) if number < len(chunks) else nullcontext():
                out = self.objective.value_loss(
                    ValueTensors(
                        outputs=self._outputs(part),
                        target=part["value_targets"],
                        coefficient=part["value_coefficients"],
                        mask=part["completion_mask"],
                    )
                )
                # Data-parallel training averages gradients over ranks; ours are shares of one sum.
                (out.loss * share * self.accelerator.num_processes).backward()
            for name, metric in out.metrics.items():
                self._count(name, metric.sum, metric.count)
        norm = clip_grad_norm_(self.critic.parameters(), self.args.max_grad_norm or float("inf"))
        self._metrics["train"]["value_grad_norm"].append(float(norm))
        self.critic_optimizer.step()
        self.critic_optimizer.zero_grad()

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.critic_state(), folder / STATE)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint) / STATE
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: the checkpoint was not written by CriticTrainer")
        self.load_critic_state(torch.load(file, map_location=self.accelerator.device, weights_only=True))

    def critic_state(self) -> dict[str, Any]:
        return {
            "model": self.accelerator.unwrap_model(self.critic).state_dict(),
            "optimizer": self.critic_optimizer.state_dict(),
            "pretraining": self.value_pretraining.state_dict(),
        }

    def load_critic_state(self, state: dict[str, Any]) -> None:
        self.accelerator.unwrap_model(self.critic).load_state_dict(state["model"])
        self.critic_optimizer.load_state_dict(state["optimizer"])
        self.value_pretraining.load_state_dict(state["pretraining"])
        self._end_pretraining()


def _picked(rows: dict[str, Any], chosen: Tensor) -> dict[str, Any]:
    """Some rows of a batch of tensors and lists."""
    return {
        name: column[chosen] if torch.is_tensor(column) else [column[row] for row in chosen.tolist()]
        for name, column in rows.items()
    }
