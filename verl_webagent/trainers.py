"""verl's trainers with trajectories in them: `trainer.v1.trainer_mode=webagent_sync`, `_colocate` or `_separate`.

Each is verl's own trainer of that mode, with what follows put in the place of its row-wise arithmetic:

- statistics are over trajectories: `Objective.plan` sees every session once, however many rows it has;
- a trajectory that is not valid is in no statistic, no denominator and no loss, and is counted by kind;
- one optimizer step a pass covers all rows of the batch, however many there are; each row's share sits in its
  coefficient, KL included, so padding, micro-batches and ranks change nothing;
- the plugin's own state is in the checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.tensordict_utils import assign_non_tensor_stack

from verl_webagent import group_filter  # whole: whoever imports that one first gets here in the middle of it
from verl_webagent.checks import check_config
from verl_webagent.loss import policy_loss, token_means, value_loss
from verl_webagent.recipe import node_of, recipe_of
from verl_webagent.replay import FIRST, STORED, entries_of, facts_of_failure, put_back
from verl_webagent.run_log import RunLog
from verl_webagent.sessions import (
    Columns,
    Session,
    facts_of,
    is_valid,
    order_of,
    outcome_of,
    plain,
    row_weights,
    sessions_of,
    status_of,
)
from webagent_core.episode.trajectory import ExitStatus
from webagent_core.objectives import Plan
from webagent_core.rewards.reward_manager import RewardError
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.stored import Stored

logger = logging.getLogger(__name__)

STATE = "webagent.pt"


class TrajectoryTrainer:
    """What the three modes share. `Objective` and numbers come from the recipe that `webagent.recipe` names."""

    def __init__(self, config: DictConfig) -> None:
        check_config(config)
        self.node = node_of(config)
        self.recipe = recipe_of(config)
        self.objective = self.recipe.load_objective()
        self.run_log = RunLog(self.node["out"], self.recipe) if self.node["out"] else None
        self.sampling = Sampling(self.recipe)
        self.batches_without_signal = 0
        # The batch's sessions, by key, where a buffer wants them; and what joined it without rows.
        self._entries: dict[str, Stored | None] = {}
        self._without_rows: list[Stored] = []
        self._drawn = 0  # prompts, by this process
        super().__init__(config)
        self.replay_buffer.poll_interval = self.node["poll_seconds"]

    def _build_replay_buffer(self) -> Any:
        """verl's; for a recipe that filters groups, one that knows what a group is."""
        if self.sampling.groups is None:
            return super()._build_replay_buffer()
        sampler = self.config.trainer.v1.sampler
        arguments: dict[str, Any] = {
            "trainer_mode": self.trainer_mode,
            "trainer_config": self.config.trainer.v1.get(self.trainer_mode, {}),
            "max_off_policy_threshold": sampler.max_off_policy_threshold,
            "max_off_policy_strategy": sampler.max_off_policy_strategy,
            "sampler_kwargs": sampler.sampler_kwargs,
            "refill_fn": self._add_prompts_to_generate,
        }
        if self.trainer_mode != "sync":
            return group_filter.FilteringBufferAsync(self.sampling.groups, **arguments)
        of_batch = {"train_batch_size": self.config.data.train_batch_size, "gen_batch_size": 1}
        return group_filter.FilteringBuffer(self.sampling.groups, **arguments, **of_batch)

    def on_init_end(self) -> None:
        super().on_init_end()
        self.actor_rollout_wg.set_loss_fn(partial(policy_loss, self.objective))
        if self.use_critic:
            self.critic_wg.set_loss_fn(partial(value_loss, self.objective))

    def _fetch_one_gen_batch(self) -> TensorDict:
        """verl's prompts, their names made to sort as they were drawn: a name that is chance alone orders nothing."""
        batch = super()._fetch_one_gen_batch()
        first, self._drawn = self._drawn, self._drawn + len(batch)
        names = [f"{self.global_steps:06d}-{number:08d}-{uid}" for number, uid in enumerate(batch["uid"], start=first)]
        assign_non_tensor_stack(batch, "uid", names)
        return batch

    def fit(self, agent_loop_manager: Any) -> None:
        if self.global_steps >= self.total_training_steps > 0:
            logger.warning(
                "resumed from step %d and trainer.total_training_steps = %d: nothing is left to train",
                self.global_steps,
                self.total_training_steps,
            )
        super().fit(agent_loop_manager)

    # ------------------------------------------------------------------------------------------------ statistics

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows are filled up to a multiple of this: one share a rank, each of whole micro-batches."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        if actor.use_dynamic_bsz:
            return dp_size
        sizes = [actor.ppo_micro_batch_size_per_gpu, rollout.log_prob_micro_batch_size_per_gpu]
        if self.use_reference_policy:
            sizes.append(self.config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu)
        if self.use_critic:
            critic = self.config.critic
            sizes += [critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu]
        return dp_size * math.lcm(*(size or 1 for size in sizes))

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        """Rows in the order drawn and played, not in that of their arrival: sums and draws come out alike in every run.

        Then, before they are dealt out to ranks, earlier sessions join them, where the recipe replays.
        """
        batch.reorder(order_of(batch.keys))
        if self.sampling.replay is not None:
            self._entries = entries_of(batch, self._batches_before())
            joined = self.sampling.join(list(self._entries.values()))
            self._without_rows = [entry for entry in joined if not entry.data]
            batch = put_back(batch, self._entries, [entry for entry in joined if entry.data])
        return super()._balance_batch(batch, metrics, *args, **kwargs)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        if any(int(key.rsplit("_", 2)[1]) >= FIRST for key in batch.keys):
            # Rollout against trainer: stored rows have no rollout of now, and verl's comparison does not know that.
            for name in [name for name in metrics if name.startswith("training/rollout_")]:
                del metrics[name]
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Advantages, value targets and coefficients of every row, from `Objective.plan` over the batch's sessions."""
        fields = ["response_mask", "rm_scores", "extra_fields", "values"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        columns = Columns(
            score=[float(row.sum()) for row in data["rm_scores"]],
            mask=[row.bool() for row in data["response_mask"]],
            extra=plain(data["extra_fields"]),
            values=list(data["values"]) if "values" in data.keys() else None,
        )
        sessions = sessions_of(batch.keys, batch.tags)
        facts = facts_of(self.objective, sessions, columns) + [facts_of_failure(entry) for entry in self._without_rows]
        plan = self.objective.plan(facts, update=self._batches_before())
        entries = [self._entries.get(session.key) for session in sessions]
        plan = Plan(self.sampling.choose(plan, entries + self._without_rows).trajectories[: len(sessions)])
        weights = row_weights(plan, sessions, columns.mask)
        self._count(batch, sessions, columns, plan, metrics)
        self.sampling.update += 1

        def ragged(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        laid_out = TensorDict(
            {
                "advantages": ragged(weights.advantages),
                "returns": ragged(weights.value_targets),
                "loss_coefficient": weights.coefficients,
                "value_coefficient": weights.value_coefficients,
            },
            batch_size=len(batch),
        )
        # What comes back lists the new columns; the workers fetch those that it lists.
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=laid_out)

    def _batches_before(self) -> int:
        return (self.global_steps - 1) * self.parameter_sync_step + self.local_trigger_step

    def _count(
        self, batch: KVBatchMeta, sessions: list[Session], columns: Columns, plan: Plan, metrics: dict
    ) -> None:
        """The trajectories' metrics, and the end of a run whose environment is broken.

        How good the policy is shows in all that was played: those that a group filter left out count here too.
        """
        if self.sampling.replay is not None:
            stored = [bool(columns.extra[session.rows[-1]].get(STORED)) for session in sessions]
            joined = [each for each, is_stored in zip(plan.trajectories, stored, strict=True) if is_stored]
            metrics["webagent/replay/stored"] = float(len(self.sampling.replay))
            metrics["webagent/replay/rows"] = float(sum(row.coefficient != 0 for each in joined for row in each.rows))
            plan = Plan([each for each, is_stored in zip(plan.trajectories, stored, strict=True) if not is_stored])
            sessions = [session for session, is_stored in zip(sessions, stored, strict=True) if not is_stored]
        filtering = isinstance(self.replay_buffer, group_filter.GroupsWithSignal)
        left_out = self.replay_buffer.take_dropped() if filtering else []
        others = [facts for _, members in left_out for facts in members]
        last = [columns.extra[session.rows[-1]] for session in sessions]
        for extra in last + others:
            if extra.get("fatal"):
                raise RewardError(extra["detail"]) from RuntimeError(extra["fatal"])
        good: list[tuple[float, float, int]] = []  # reward, outcome, steps
        for session, extra in zip(sessions, last, strict=True):
            if is_valid(extra):
                score, outcome = columns.score[session.rows[-1]], outcome_of(extra)
                good.append((score, score if outcome is None else outcome, len(session.rows)))
        good += [(each["reward"], each["outcome"], each["steps"]) for each in others if each["outcome"] is not None]
        statuses = Counter(status_of(extra) for extra in last + others)
        for status in ExitStatus:
            metrics[f"webagent/exit_status/{status}"] = float(statuses[status])
        dropped = Counter(each.dropped for each in plan.trajectories if each.dropped)
        for why, count in dropped.items():
            metrics[f"webagent/dropped/{why}"] = float(count)
        if filtering:
            kept = len({session.uid for session in sessions})
            metrics |= {"webagent/groups/kept": float(kept), "webagent/groups/played": float(kept + len(left_out))}
            for reason, count in Counter(drop.reason for drop, _ in left_out).items():
                metrics[f"webagent/groups/dropped/{reason}"] = float(count)
        metrics["webagent/trajectories"] = float(len(last) + len(others))
        metrics["webagent/invalid"] = metrics["webagent/trajectories"] - len(good)
        metrics["webagent/rows"] = float(sum(len(session.rows) for session in sessions))
        metrics["webagent/rows_padding"] = float(len(batch) - metrics["webagent/rows"])
        if good:
            for name, values in zip(("return", "success", "steps"), zip(*good, strict=True), strict=True):
                counted = [value >= 1.0 for value in values] if name == "success" else values
                metrics[f"webagent/{name}"] = sum(counted) / len(good)
        if self.run_log:
            advantages = [each.told for each in plan.trajectories]
            keys = [session.key for session in sessions] + [facts["key"] for facts in others]
            self.run_log.train(self.global_steps, keys, advantages + [None] * len(others))
        self.batches_without_signal = 0 if good else self.batches_without_signal + 1
        if not good:
            reasons = sorted({str(extra.get("detail") or status_of(extra)) for extra in last})
            logger.warning("no trajectory of this batch is valid: %s", "; ".join(reasons[:3]))
            if self.batches_without_signal >= self.node["broken_batches"]:
                raise RuntimeError(
                    f"{self.batches_without_signal} batches in a row without one valid trajectory; the last one's "
                    f"reasons: {'; '.join(reasons[:3])}"
                )

    # ------------------------------------------------------------------------------------------------ updates

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """One optimizer step a pass over the rows that have a part in the loss; none where no row has."""
        actor = self.config.actor_rollout_ref.actor
        rows = self._with_weight(batch, "loss_coefficient", need_advantage=not self.objective.uses_reference)
        metrics["webagent/rows_in_loss"] = float(rows.extra_info.pop("webagent_live"))
        if not metrics["webagent/rows_in_loss"]:
            return batch
        rows.extra_info.update(
            calculate_entropy=False,
            distillation_use_topk=False,
            distillation_only=False,
            global_batch_size=len(rows),
            num_mini_batch=1,
            epochs=actor.ppo_epochs,
            seed=actor.data_loader_seed,
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        out = rename_dict(self.actor_rollout_wg.update_actor(rows)["metrics"], "actor/")
        metrics.update(_reduced(out, "actor"))
        return batch

    def _update_critic(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        critic = self.config.critic
        rows = self._with_weight(batch, "value_coefficient", need_advantage=False)
        if not rows.extra_info.pop("webagent_live"):
            return batch
        rows.extra_info.update(
            global_batch_size=len(rows),
            num_mini_batch=1,
            epochs=critic.ppo_epochs,
            seed=critic.data_loader_seed,
            dataloader_kwargs={"shuffle": False},
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        out = rename_dict(self.critic_wg.train_mini_batch(rows).get()["metrics"], "critic/")
        metrics.update(_reduced(out, "critic"))
        return batch

    def _with_weight(self, batch: KVBatchMeta, coefficient: str, need_advantage: bool) -> KVBatchMeta:
        """The rows whose coefficient is not 0, filled up with others to what ranks and micro-batches ask for.

        Their number is left in `extra_info["webagent_live"]`. Rows without a reference term and with advantage 0 give
        no gradient either.
        """
        fields = [coefficient] + (["advantages"] if need_advantage else [])
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        weight = data[coefficient].tolist()
        live = [i for i, value in enumerate(weight) if value and (not need_advantage or data["advantages"][i].any())]
        others = iter(sorted(set(range(len(batch))) - set(live)))
        multiple = self._get_required_batch_multiple(self._data_parallel_size())
        chosen = live + [next(others) for _ in range(-len(live) % multiple)]
        # Ranks take consecutive shares: deal the rows out so that each gets long and short ones.
        chosen.sort(key=lambda i: -batch.tags[i]["seq_len"])
        ranks = self._data_parallel_size()
        chosen = [i for rank in range(ranks) for i in chosen[rank::ranks]]
        return KVBatchMeta(
            keys=[batch.keys[i] for i in chosen],
            tags=[batch.tags[i] for i in chosen],
            partition_id=batch.partition_id,
            fields=batch.fields,
            extra_info=dict(batch.extra_info) | {"webagent_live": len(live)},
        )

    def _data_parallel_size(self) -> int:
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _save_checkpoint(self) -> None:
        """verl's checkpoint with our state in it; verl names it the newest only after both are written."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        making = folder / f"{STATE}.making"
        torch.save(self.own_state(), making)
        os.replace(making, folder / STATE)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if trainer.resume_mode == "resume_path":
            folder = Path(trainer.resume_from_path)
        if not (folder / STATE).is_file():
            raise FileNotFoundError(
                f"{folder / STATE} is missing: the checkpoint was not written by trainer_mode="
                f"{trainer.v1.trainer_mode}; resume it with the trainer that wrote it, or set "
                "trainer.resume_mode=disable"
            )
        self.load_own_state(torch.load(folder / STATE, weights_only=True))

    def own_state(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.type,
            "batches_without_signal": self.batches_without_signal,
            "sampling": self.sampling.state_dict(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        if state["recipe"] != self.recipe.type:
            raise ValueError(f"the checkpoint is of recipe {state['recipe']!r}, and this run's is {self.recipe.type!r}")
        self.batches_without_signal = state["batches_without_signal"]
        self.sampling.load_state_dict(state["sampling"])
        if self.run_log and self.global_steps < self.total_training_steps:
            self.run_log.truncate_after(self.global_steps)

    # ------------------------------------------------------------------------------------------------ logs

    def _val_metrics_update(
        self,
        data_sources: list,
        sample_uids: list,
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list,
        **kwargs: Any,
    ) -> dict[str, float]:
        """Evaluation over the valid trajectories alone."""
        valid = reward_extra_infos_dict.pop("valid", None) or [True] * len(sample_uids)
        reward_extra_infos_dict.pop("exit_status", None)  # words, of which verl cannot take the mean

        def kept(values: list) -> list:
            return [value for value, ok in zip(values, valid, strict=True) if ok]

        metrics: dict[str, float] = {"webagent/val/invalid": float(len(valid) - sum(map(bool, valid)))}
        if any(valid):
            kwargs["expected_acc_counts"] = None  # counts what is missing as wrong
            metrics |= super()._val_metrics_update(
                kept(list(data_sources)),
                kept(list(sample_uids)),
                {name: kept(values) for name, values in reward_extra_infos_dict.items()},
                kept(list(sample_turns)),
                **kwargs,
            )
            rewards = kept(reward_extra_infos_dict["reward"])
            metrics["webagent/val/success"] = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        if self.run_log:
            self.run_log.evaluation(self.global_steps, self.total_training_steps)
        return metrics

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        if self.run_log:
            self.run_log.update(global_steps, metrics, timing_raw)


def _reduced(metrics: dict[str, Any], kind: str) -> dict[str, Any]:
    metrics[f"perf/mfu/{kind}"] = metrics.pop(f"{kind}/mfu", 0.0)
    return reduce_metrics(token_means(metrics, kind))


def mode(name: str) -> property:
    """verl compares `trainer_mode` with its own names, so a trainer registered under another must still read as its."""
    return property(lambda self: name, lambda self, value: None)


@register_trainer("webagent_sync")
class WebAgentSync(TrajectoryTrainer, PPOTrainerSync):
    trainer_mode = mode("sync")


@register_trainer("webagent_colocate")
class WebAgentColocate(TrajectoryTrainer, PPOTrainerColocateAsync):
    trainer_mode = mode("colocate_async")


@register_trainer("webagent_separate")
class WebAgentSeparate(TrajectoryTrainer, PPOTrainerSeparateAsync):
    trainer_mode = mode("separate_async")
