"""GRPO over trajectories whose every step is a training row: what web agents need and one conversation a sample is not.

Stock `GRPOTrainer` wants one row a prompt. A web trajectory has as many rows as steps, because the context of each
step is its own (old pages are taken out). So a batch goes through two phases inside stock
`_generate_and_score_completions`:

1. trajectories: stock code calls our rollout, which plays an episode for every prompt and gives back one representative
   row for each; reward functions, reward weights, logging and evaluation are stock and see trajectories;
2. rows: the trajectories become rows, each with its advantage and the coefficient of its token sum, both from
   `Objective.plan` over the whole (global) batch.

The loss is `Objective.loss` over rows, a sum that does not depend on how rows are split into forward passes or ranks.

With a `Sampling`, tasks come from it; groups without signal are replaced while the batch is played; earlier
trajectories join the plan; and rows may wait for later updates, with the log-probabilities of the policy that sampled
them beside them (AsyncWebRL).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import pad, use_adapter

from trl_webagent.image_rows import ImageInputs, open_pictures
from trl_webagent.reference import refuse_unlike
from trl_webagent.sampled_batch import SampledBatch, play_batch
from trl_webagent.step_grpo_config import StepGRPOConfig
from webagent_core.episode.pictures import picture_urls
from webagent_core.episode.rollout import GenerateBatch
from webagent_core.episode.runner import ContextOverflow, Response
from webagent_core.episode.trajectory import NOT_THE_POLICY, ExitStatus, Step, Trajectory
from webagent_core.objectives import Objective, Plan, RowTensors, TrajectoryFacts
from webagent_core.policy.vision_processing import load_processing_class
from webagent_core.sampling.replay import Perplexities
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.stored import Stored, repeats_next, store, trajectory_of
from webagent_core.tasks.task import Task

# Plays one episode for each dataset row and returns the trajectories in that order. It may call the policy as often
# as it likes; `webagent_core.episode.browser_rollout.BrowserRollout` is the one for real pages. Where a `Sampling`
# draws the tasks, a row is {"task": name, "seed": seed}.
Play = Callable[[list[dict[str, Any]], GenerateBatch], list[Trajectory]]

ADD_UP = ("trajectories", "invalid", "exit_status/", "groups/", "seconds/rollout")  # metrics of a batch's play


def trajectory_reward(trajectory: list[Trajectory], **_: Any) -> list[float | None]:
    """The default reward function: each trajectory's own reward, None (left out of everything) if it is not valid."""
    return [each.reward if each.valid else None for each in trajectory]


class StepGRPOTrainer(GRPOTrainer):
    """GRPOTrainer for multi-step trajectories; see the module's text and `StepGRPOConfig`.

    Args:
        objective: the method's loss, e.g. `webagent_core.objectives.load_objective("webagent_r1")`.
        play: plays episodes for a batch of dataset rows, see `Play`.
        reward_funcs: as in TRL; each is also given `trajectory`, the list of `Trajectory`. None for a trajectory takes
            it out of group statistics, loss, denominators and metrics, as an exit status that no policy can have
            caused does whatever the functions say. Of several, the first says how the task went (which is what replay
            looks at) and the others shape the reward. Default: `trajectory_reward`.
        on_trajectories: called once a batch with (trajectories, advantages), after scoring; for logs and dumps. An
            advantage is a number, or one for each step where the method tells steps apart. What the group filter left
            out is among them, with advantage None.
        sampling: the run's sampling. The dataset then says no more than how many batches there are. A group filter
            looks at the trajectories' own rewards: where they are judged, `play` must have them judged. When it finds
            no signal any more, training ends and `no_signal` says why. The state is in the checkpoints.

    Everything else, from PEFT to vLLM, is GRPOTrainer's. `beta` > 0 needs a model path (or LoRA) for the reference, as
    in TRL.
    """

    def __init__(
        self,
        model: Any,
        *,
        objective: Objective,
        play: Play,
        args: StepGRPOConfig,
        reward_funcs: Any = trajectory_reward,
        on_trajectories: Callable[[list[Trajectory], list[Any]], None] | None = None,
        sampling: Sampling | None = None,
        **kwargs: Any,
    ) -> None:
        self.objective = objective
        self.play = play
        self.on_trajectories = on_trajectories
        self.sampling = sampling
        self.no_signal: str | None = None
        self._playing = False
        self._inputs: list[dict[str, Any]] = []
        # This rank's trajectories: the batch's, those that were played for it and left out, earlier ones that join.
        self._trajectories: list[Trajectory] = []
        self._left_out: list[Trajectory] = []
        self._joined: list[Stored] = []
        self._waiting: deque[dict[str, Any]] = deque()  # {"update": when played, "rows": its rows}
        self._generated_tokens = 0
        self._rollout_seconds = 0.0
        self._rows_in_step = 0  # of the coming optimizer step, this rank's
        self._token_sums: dict[str, dict[str, list[float]]] = {"train": {}, "eval": {}}
        # Stock code builds the reference model if, and only if, beta is not 0.
        beta = getattr(objective, "beta", 0.0) if objective.uses_reference else 0.0
        if args.beta not in (0.0, beta):
            raise ValueError(
                f"beta = {args.beta!r}: StepGRPOTrainer takes this from its objective, where it is {beta!r}"
            )
        args.beta = beta
        logging.getLogger("trl.trainer.grpo_trainer").addFilter(_not_about_unscored_rows)
        super().__init__(model, reward_funcs=reward_funcs, args=args, rollout_func=_rollout, **kwargs)
        self._images = ImageInputs(self.processing_class) if self._is_vlm else None  # None: a policy that only reads
        self.add_callback(_NoStepWithoutRows(self))
        self.add_callback(_EndWithoutSignal(self))

    def load_reference(self, model: str) -> None:
        """Compare with `model`, a folder or hub name, instead of with the policy that training starts from.

        Raises ValueError if its parameters do not have the policy's names and shapes, or it has another vocabulary.
        """
        mine = self.accelerator.unwrap_model(self.ref_model)
        other = type(mine).from_pretrained(model, dtype=mine.dtype)
        refuse_unlike(model, mine, other, self.processing_class, load_processing_class(model))
        SyncRefModelCallback.sync_target_model(other.to(mine.device), mine, 1.0)

    # ------------------------------------------------------------------------------------------------ generation

    def generate(self, chats: list[list[dict]]) -> list[Response | ContextOverflow]:
        """One sampled answer a chat from the policy as it is now; a chat that does not fit gives a ContextOverflow."""
        if self._images:
            chats = open_pictures(chats)
        prompt_ids, images, fields = self._tokenize_prompts(chats)
        limit = self.args.max_context_tokens
        fits = [not limit or len(ids) + self.max_completion_length <= limit for ids in prompt_ids]
        answers: list[Response | ContextOverflow] = [
            ContextOverflow(f"a prompt of {len(ids)} tokens leaves no room for {self.max_completion_length} in {limit}")
            for ids in prompt_ids
        ]
        fitting = [index for index, fit in enumerate(fits) if fit]
        if not fitting:
            return answers
        if not self._images:
            images, fields = None, {}
        elif len(fitting) < len(chats):
            _, images, fields = self._tokenize_prompts([chats[i] for i in fitting])
        fitting_ids = [prompt_ids[i] for i in fitting]
        response_ids, _ = self._generate_single_turn(fitting_ids, images, fields, num_generations=1)
        texts = self._tokenizer.batch_decode(response_ids, skip_special_tokens=True)
        for index, ids, text in zip(fitting, response_ids, texts, strict=True):
            cut = not ids or ids[-1] not in self.eos_token_ids
            answers[index] = Response(text, list(prompt_ids[index]), list(ids), "length" if cut else "stop")
            self._generated_tokens += len(ids)
        return answers

    def _play(self, prompts: list[Any]) -> dict[str, Any]:
        """Phase 1, called by stock `_generate` through `_rollout`: one representative row a trajectory."""
        if len(prompts) != len(self._inputs):
            raise RuntimeError(
                f"{len(prompts)} prompts for {len(self._inputs)} dataset rows: TRL changed how it batches"
            )
        started, self._generated_tokens = time.perf_counter(), 0
        played = self._sampled_batch(len(prompts)) if self._samples else None
        played = played or SampledBatch(self.play(self._inputs, self.generate))
        self._trajectories, self._left_out = played.trajectories, played.left_out
        self.no_signal = played.no_signal or self.no_signal
        for name, value in played.metrics.items():
            self._metrics["train"][name].append(value)
        self._rollout_seconds = time.perf_counter() - started
        nothing = [self._tokenizer.eos_token_id]  # an episode that never began still stands for itself in stock code
        return {
            "prompt_ids": [t.steps[0].prompt_ids if t.steps else nothing for t in self._trajectories],
            "completion_ids": [
                [token for step in t.steps for token in step.response_ids] or nothing for t in self._trajectories
            ],
            "logprobs": None,
            "trajectory": self._trajectories,
            "task": [t.task for t in self._trajectories],
            "seed": [t.seed for t in self._trajectories],
        }

    @property
    def _samples(self) -> bool:
        return self.sampling is not None and self.model.training

    def _sampled_batch(self, places: int) -> SampledBatch:
        def play(tasks: Sequence[Task]) -> list[Trajectory]:
            return self.play([{"task": task.name, "seed": task.seed} for task in tasks], self.generate)

        return play_batch(
            self.sampling,
            play,
            places=places,
            group_size=self.num_generations,
            rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes,
        )

    def _log_rollout(self) -> None:
        metrics, seconds = self._metrics["train" if self.model.training else "eval"], self._rollout_seconds
        everyone = gather_object([(t.success, len(t.steps), t.exit_status) for t in self._trajectories])
        tokens = sum(gather_object([self._generated_tokens]))
        rewards = list(self._rewards)
        # No reward function saw what was left out: its own reward counts.
        for reward, *rest in gather_object(
            [(t.reward if t.valid else math.nan, t.success, len(t.steps), t.exit_status) for t in self._left_out]
        ):
            rewards.append(reward)
            everyone.append(tuple(rest))
        counted = [
            (reward, success, steps)
            for reward, (success, steps, _) in zip(rewards, everyone, strict=True)
            if not math.isnan(reward)
        ]
        if counted:
            for name, values in zip(("return", "success", "steps"), zip(*counted, strict=True), strict=True):
                metrics[name].append(sum(values) / len(counted))
        metrics["trajectories"].append(float(len(everyone)))
        metrics["invalid"].append(float(len(everyone) - len(counted)))
        statuses = Counter(status for *_, status in everyone)
        for status in ExitStatus:
            metrics[f"exit_status/{status}"].append(float(statuses[status]))
        metrics["tokens_per_second"].append(tokens / seconds)
        metrics["browser_steps_per_second"].append(sum(steps for _, steps, _ in everyone) / seconds)
        metrics["seconds/rollout"].append(seconds)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # (world trajectories, functions), gathered
        # Whatever a reward function says of a page that broke, the policy is not to learn from it.
        broken = gather_object([t.exit_status in NOT_THE_POLICY for t in self._trajectories])
        rewards[torch.tensor(broken, device=rewards.device)] = torch.nan
        weighted = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        self._rewards = torch.where(rewards.isnan().all(dim=1), torch.nan, weighted).tolist()
        # What the task says, where a trajectory knows it or other functions shape the reward.
        shaped, known = len(self.reward_funcs) > 1, gather_object([t.outcome for t in self._trajectories])
        first = [None if not shaped or math.isnan(value) else value for value in rewards[:, 0].tolist()]
        self._outcomes = [a if b is None else b for a, b in zip(first, known, strict=True)]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self._samples:
            batch = self._played(inputs)
        else:
            before = {name: len(values) for name, values in self._metrics["train"].items()}
            while len(self._waiting) <= self.sampling.staleness:
                self._waiting.append({"update": self.sampling.update, "rows": self._played(inputs)})
            for name, values in self._metrics["train"].items():
                new = values[before.get(name, 0) :]
                if len(new) > 1 and name.startswith(ADD_UP):  # several plays: these do not average
                    values[-len(new) :] = [sum(new)]
            oldest = self._waiting.popleft()
            if self.sampling.staleness:
                self._metrics["train"]["staleness"].append(float(self.sampling.update - oldest["update"]))
            self.sampling.update += 1
            batch = oldest["rows"]
        rows = int((batch["coefficients"] != 0).sum())
        self._metrics["train" if self.model.training else "eval"]["rows"].append(float(sum(gather_object([rows]))))
        return batch | self._stored_logps(batch)

    def _played(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch that the policy plays now, as rows."""
        self._inputs, self._playing, self._joined = inputs, True, []
        try:
            super()._generate_and_score_completions(inputs)
        finally:
            self._playing = False
        self._log_rollout()
        plan, first = self._plan()
        mine = plan.trajectories[first : first + len(self._trajectories) + len(self._joined)]
        if self.on_trajectories:
            advantages = [each.told for each in mine[: len(self._trajectories)]]
            self.on_trajectories(self._trajectories + self._left_out, advantages + [None] * len(self._left_out))
        batch = self._rows(mine)
        if "behave_logp" in self.objective.required_logps:
            batch["behave_per_token_logps"] = self._logps(self.model, batch)
        return batch

    # ------------------------------------------------------------------------------------------------ rows

    def _plan(self) -> tuple[Plan, int]:
        """The objective's plan over the trajectories of all ranks, and the index of this rank's first.

        A rank's trajectories are the batch's, then those that join.
        """
        entries = self._join() if self._samples else []
        mine = self._facts()
        counts = gather_object([len(mine)])
        plan = self.objective.plan(gather_object(mine), update=self._batches_before())
        if self._samples:
            plan = self.sampling.choose(plan, gather_object(entries))
            if self.sampling.replay is not None:
                self._log_replay(plan, counts)
        return plan, sum(counts[: self.accelerator.process_index])

    _perplexities: Perplexities | None = None  # of earlier actions under the reference, for a trainer with phases

    def _join(self) -> list[Stored | None]:
        """Find what joins this batch, and store the batch; this rank's trajectories as entries, None: not valid."""
        first = self.accelerator.process_index * len(self._trajectories)
        entries: list[Stored | None] = [None] * len(self._trajectories)
        if self.sampling.replay is not None:
            for index, trajectory in enumerate(self._trajectories):
                reward, outcome = self._rewards[first + index], self._outcomes[first + index]
                if not math.isnan(reward):
                    scored = replace(trajectory, reward=reward)
                    number, pictures = first + index, self._images is not None
                    entries[index] = store(scored, self.sampling.update, number, outcome=outcome, pictures=pictures)
            joined = self.sampling.join(gather_object(entries), self._perplexities)
            self._joined = joined[self.accelerator.process_index :: self.accelerator.num_processes]
        return entries + self._joined

    def _facts(self) -> list[TrajectoryFacts]:
        """What the plan is made from: this rank's trajectories, the batch's and then those that join."""
        first = self.accelerator.process_index * len(self._trajectories)
        facts = [
            TrajectoryFacts(
                group=trajectory.group,
                reward=None if math.isnan(self._rewards[index]) else self._rewards[index],
                valid=not math.isnan(self._rewards[index]),
                tokens=[len(step.response_ids) for step in trajectory.steps],
                repeats_next=repeats_next(trajectory),
                outcome=self._outcomes[index],
            )
            for index, trajectory in enumerate(self._trajectories, start=first)
        ]
        for entry in self._joined:
            steps = entry.data["steps"]
            facts.append(
                TrajectoryFacts(
                    group=entry.task,
                    reward=entry.data["reward"],
                    valid=True,
                    tokens=[len(step["response_ids"]) for step in steps],
                    repeats_next=[step["repeats_next"] for step in steps],
                    outcome=entry.outcome,
                    stored=True,
                )
            )
        return facts

    def _log_replay(self, plan: Plan, counts: list[int]) -> None:
        """`replay/stored`: successes in the buffer; `replay/rows`: rows of earlier batches that are trained on."""
        rows, start = 0, 0
        for count in counts:
            joined = plan.trajectories[start + len(self._trajectories) : start + count]
            rows += sum(row.coefficient != 0 for each in joined for row in each.rows)
            start += count
        self._metrics["train"]["replay/stored"].append(float(len(self.sampling.replay)))
        self._metrics["train"]["replay/rows"].append(float(rows))

    def _batches_before(self) -> int:
        """Batches of trajectories that were trained on before the one at hand."""
        micro_batches = self.state.global_step * self.args.gradient_accumulation_steps
        return micro_batches // (self.args.steps_per_generation * self.num_iterations)

    def _rows(self, trajectories: list[Any]) -> dict[str, Any]:
        """Phase 2: the rows that take part in the loss, laid out for stock buffering, shuffling and splitting.

        `trajectories`: the plans of this rank's trajectories, the batch's and then those that join.
        """
        steps: list[Step] = []
        rows: list[Any] = []
        joined = [trajectory_of(entry.data) for entry in self._joined]
        for trajectory, planned in zip(self._trajectories + joined, trajectories, strict=True):
            for step, row in zip(trajectory.steps, planned.rows, strict=True):
                has_loss = self.objective.uses_reference or torch.as_tensor(row.advantage).any()
                if row.coefficient and step.response_ids and has_loss:
                    steps.append(step)
                    rows.append(row)
        count = len(rows)
        # Every rank must take part in the same passes, and stock splitting drops what does not divide: fill up with
        # rows of coefficient 0.
        chunks = self.args.steps_per_generation if self.model.training else 1
        wanted = max(gather_object([max(count, 1)]))
        filler = math.ceil(wanted / chunks) * chunks - count
        batch = self._tokens(steps, filler)
        lengths = batch["completion_mask"].sum(1).tolist()
        coefficients = torch.tensor([row.coefficient for row in rows] + [0.0] * filler)
        batch["coefficients"] = coefficients.to(self.accelerator.device)
        batch["advantages"] = self._advantages(rows, lengths).to(self.accelerator.device)
        return batch

    def _tokens(self, steps: list[Step], filler: int = 0) -> dict[str, Any]:
        """Prompts and responses of steps, padded, with `filler` rows of one token behind them; a list of the pictures
        that each row shows, if the policy sees."""
        pad_id = self._tokenizer.pad_token_id
        nothing = [torch.tensor([pad_id])] * filler
        prompts = [torch.tensor(step.prompt_ids, dtype=torch.long) for step in steps] + nothing
        responses = [torch.tensor(step.response_ids, dtype=torch.long) for step in steps] + nothing
        batch = {
            "prompt_ids": pad(prompts, pad_id, "left"),
            "prompt_mask": pad([torch.ones_like(ids) for ids in prompts], 0, "left"),
            "completion_ids": pad(responses, pad_id, "right"),
            "completion_mask": pad([torch.ones_like(ids) for ids in responses], 0, "right"),
        }
        batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        if self._images:
            batch["pictures"] = [picture_urls(step.messages) for step in steps] + [[]] * filler
        return batch

    @staticmethod
    def _advantages(rows: list[Any], lengths: list[int]) -> torch.Tensor:
        """(M,), or (M, L) for a method that tells tokens apart; `lengths` of responses beyond `rows` are filler's."""
        advantages = [row.advantage for row in rows] + [0.0] * (len(lengths) - len(rows))
        if not any(isinstance(advantage, torch.Tensor) for advantage in advantages):
            return torch.tensor(advantages)
        per_token = [torch.as_tensor(a).float().expand(m) for a, m in zip(advantages, lengths, strict=True)]
        return pad(per_token, 0.0, "right")

    @torch.no_grad()
    def _stored_logps(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Log-probabilities that stay as they are during the update: of the policy that starts it, of the reference."""
        stored = {}
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            # With one optimizer step a batch the first forward pass of the loss is this one, so it is not run twice.
            if self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0:
                stored["old_per_token_logps"] = self._logps(self.model, batch)
            if self.objective.uses_reference:
                if self.ref_model is not None:
                    stored["ref_per_token_logps"] = self._logps(self.ref_model, batch)
                else:
                    policy = self.accelerator.unwrap_model(self.model)
                    with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
                        stored["ref_per_token_logps"] = self._logps(self.model, batch)
        return stored

    def _logps(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """(M, L) log-probabilities of the responses' tokens, a bounded number of rows at a time."""
        result = torch.zeros_like(batch["completion_ids"], dtype=torch.float32)
        for rows, part in self._chunks(batch):
            logps, _ = self._forward(model, part, entropy=False)
            result[rows, : logps.size(1)] = logps.float()
        return result

    def _chunks(self, batch: dict[str, Any]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """(row indices, rows) of at most `max_rows_per_forward` rows of like length, cut to the longest of them."""
        prompts, responses = batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)
        order = torch.argsort(prompts + responses, stable=True)
        size = self.args.max_rows_per_forward or len(order)
        chunks = []
        for rows in order.split(size):
            part = {name: value[rows] for name, value in batch.items() if torch.is_tensor(value) and value.ndim}
            prompt, response = int(prompts[rows].max()), int(responses[rows].max())
            for name, tensor in part.items():
                if name.startswith("prompt_"):
                    part[name] = tensor[:, -prompt:]
                elif tensor.ndim == 2:
                    part[name] = tensor[:, :response]
            if self._images:
                part["pictures"] = [batch["pictures"][row] for row in rows.tolist()]
            chunks.append((rows, part))
        return chunks

    def _forward(self, model: Any, rows: dict[str, Any], *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        logps, entropies, _ = super()._get_per_token_logps_and_entropies(
            model,
            ids,
            torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
            rows["completion_ids"].size(1),
            compute_entropy=entropy,
            **(self._images(ids, rows["pictures"]) if self._images else {}),
        )
        return logps, entropies

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        # Stock code would score the representative rows; nothing reads what comes of it.
        if self._playing:
            return torch.zeros(input_ids.size(0), logits_to_keep, device=input_ids.device), None, None
        return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, **kwargs)

    # ------------------------------------------------------------------------------------------------ loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The batch's loss. Runs at most `max_rows_per_forward` rows at a time, each chunk's backward before the
        next."""
        if return_outputs:
            raise ValueError("StepGRPOTrainer does not return outputs")
        started = time.perf_counter()
        if model.training:
            self._rows_in_step += int((inputs["coefficients"] != 0).sum())
        chunks = self._chunks(inputs)
        done = torch.zeros((), device=self.accelerator.device)
        for _, rows in chunks[:-1]:
            with self.accelerator.no_sync(model):  # forward as well: that is where DDP decides what to send
                loss = self._compute_loss(model, rows)
                if model.training:
                    self.accelerator.backward(loss)
            done = done + loss.detach()
        loss = self._compute_loss(model, chunks[-1][1])
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["seconds/loss"].append(time.perf_counter() - started)
        return loss + done  # the last chunk's graph; the value of all

    def _compute_loss(self, model, inputs):
        logps, entropies = self._forward(model, inputs, entropy=True)
        out = self.objective.loss(self._row_tensors(model, inputs, logps))
        live = inputs["completion_mask"].bool() & (inputs["coefficients"] != 0).unsqueeze(1)
        self._count("entropy", (entropies.detach() * live).sum(), live.sum())
        for name, metric in out.metrics.items():
            self._count(name, metric.sum, metric.count)
        if not model.training:
            return out.loss * self.accelerator.num_processes
        # Data-parallel training averages gradients over ranks; ours are shares of one sum. And a batch that is split
        # over several optimizer steps gives each of them a share that must count as a whole.
        share = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        return out.loss * self.accelerator.num_processes * share

    def _row_tensors(self, model: Any, inputs: dict[str, Any], logps: torch.Tensor) -> RowTensors:
        """What the objective's loss is made from."""
        return RowTensors(
            logp=logps,
            mask=inputs["completion_mask"],
            advantage=inputs["advantages"],
            coefficient=inputs["coefficients"],
            old_logp=inputs.get("old_per_token_logps"),
            behave_logp=inputs.get("behave_per_token_logps"),
            ref_logp=inputs.get("ref_per_token_logps"),
        )

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _save_checkpoint(self, model, trial):
        # Before the trainer's own state, which comes last and so says that a checkpoint is whole.
        if self.sampling is not None:
            folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({"sampling": self.sampling.state_dict(), "waiting": list(self._waiting)}, self._state_in(folder))
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.sampling is not None and checkpoint is not None:
            file = self._state_in(checkpoint)
            if not file.is_file():
                raise FileNotFoundError(f"{file} is not there: the checkpoint holds no state of a run's sampling")
            state = torch.load(file, map_location=self.accelerator.device, weights_only=True)
            self.sampling.load_state_dict(state["sampling"])
            self._waiting = deque(state["waiting"])

    def _state_in(self, checkpoint: str | Path) -> Path:
        return Path(checkpoint) / f"sampling-{self.accelerator.process_index}.pt"

    # ------------------------------------------------------------------------------------------------ metrics

    def _count(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add to a token mean that `log` will report: weighted by tokens over all chunks and ranks."""
        sums = self._token_sums["train" if self.model.training else "eval"].setdefault(name, [0.0, 0.0])
        sums[0] += float(total)
        sums[1] += float(count)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        mine = self._token_sums[mode]
        names = sorted(set(gather_object(list(mine))))
        sums = torch.tensor([mine.get(name, [0.0, 0.0]) for name in names], device=self.accelerator.device)
        if names:
            sums = self.accelerator.reduce(sums, reduction="sum")
            for name, (total, count) in zip(names, sums.tolist(), strict=True):
                if count:
                    self._metrics[mode][name].append(total / count)
            mine.clear()
        super().log(logs, start_time)


def _rollout(prompts: list[Any], trainer: StepGRPOTrainer) -> dict[str, Any]:
    return trainer._play(prompts)


def _not_about_unscored_rows(record: logging.LogRecord) -> bool:
    # Stock code prints all of an unscored row's columns, for us a whole trajectory. It is counted by kind instead.
    return "All reward functions returned None" not in str(record.msg)  # accelerate puts the rank before it


class _NoStepWithoutRows(TrainerCallback):
    """An optimizer step that no row is left for must not move the policy, as Adam's momentum would."""

    def __init__(self, trainer: StepGRPOTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if sum(gather_object([self.trainer._rows_in_step])) == 0:
            model.zero_grad(set_to_none=True)
        self.trainer._rows_in_step = 0


class _EndWithoutSignal(TrainerCallback):
    """Ends training, with a checkpoint, after the update in which the group filter gave up."""

    def __init__(self, trainer: StepGRPOTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        steps_a_batch = args.steps_per_generation * self.trainer.num_iterations // args.gradient_accumulation_steps
        if self.trainer.no_signal and state.global_step % max(1, steps_a_batch) == 0:
            control.should_training_stop = control.should_save = True
