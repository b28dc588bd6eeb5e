"""For a stock verl trainer, by configuration alone: a sampler that does the statistics before the trainer sees rows.

    trainer.v1.sampler.custom_sampler.path=pkg://verl_webagent.stock
    trainer.v1.sampler.custom_sampler.name=SessionSampler            # SessionSamplerAsync in the async modes
    trainer.v1.sampler.sampler_kwargs={recipe: openwebrl}
    algorithm.adv_estimator=openwebrl
    actor_rollout_ref.actor.policy_loss.loss_mode=openwebrl actor_rollout_ref.actor.loss_agg_mode=token-sum

A row's coefficient is positive, so it may ride in its advantage through clip and dual clip. What does not fit through
that door is refused with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_webagent import stock_state
from verl_webagent.estimators import STOCK
from verl_webagent.recipe import recipe_of
from verl_webagent.sessions import Columns, facts_of, plain, sessions_of
from webagent_core.objectives import Objective


class SessionStatistics:
    """The recipe in `sampler_kwargs`, applied to every training batch that is sampled."""

    def __init__(self, sampler_kwargs: Any = None, poll_interval: float = 0.1, **kwargs: Any) -> None:
        node = OmegaConf.create({"webagent": sampler_kwargs or {}})
        self.objective = check_stock(recipe_of(node).load_objective())
        super().__init__(sampler_kwargs=sampler_kwargs, poll_interval=poll_interval, **kwargs)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "val":
            return batch, metrics
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=partition_id, select_fields=["rm_scores", "response_mask", "extra_fields"]
        )
        columns = Columns(
            score=[float(row.sum()) for row in data["rm_scores"]],
            mask=[row.bool() for row in data["response_mask"]],
            extra=plain(data["extra_fields"]),
        )
        sessions = sessions_of(batch.keys, batch.tags)
        facts = facts_of(self.objective, sessions, columns)
        plan = self.objective.plan(facts, update=global_steps - 1)
        weights = [0.0] * len(batch)
        for session, planned in zip(sessions, plan.trajectories, strict=True):
            for row, weight in zip(session.rows, planned.rows, strict=True):
                weights[row] = weight.coefficient * float(weight.advantage)
        folded = [torch.zeros(len(mask)) for mask in columns.mask]
        for row, weight in zip(folded, weights, strict=True):
            row[-1] = weight
        scores = TensorDict(
            {"rm_scores": torch.nested.as_nested_tensor(folded, layout=torch.jagged)}, batch_size=len(batch)
        )
        batch = tq.kv_batch_put(keys=batch.keys, partition_id=partition_id, fields=scores)
        stock_state.prepared(self.objective.name)
        valid = [fact.reward for fact in facts if fact.usable]
        metrics["webagent/invalid"] = len(facts) - len(valid)
        if valid:  # critic/score shows the folded values from here on
            metrics["webagent/return"] = sum(valid) / len(valid)
            metrics["webagent/success"] = sum(reward >= 1.0 for reward in valid) / len(valid)
        return batch, metrics


class SessionSampler(SessionStatistics, ReplayBuffer):
    pass


class SessionSamplerAsync(SessionStatistics, ReplayBufferAsync):
    pass


def check_stock(objective: Objective) -> Objective:
    """`objective`, or ValueError with the reason why a stock trainer would compute something else."""
    remedy = "use trainer.v1.trainer_mode=webagent_sync"
    if objective.uses_critic:
        raise ValueError(f"{objective.name} cannot run on a stock trainer, whose GAE ends with each row; {remedy}")
    if objective.uses_reference:
        raise ValueError(
            f"{objective.name} with beta = {objective.beta:g} cannot run on a stock trainer, which does not weigh the "
            f"KL term by row; set objective.beta=0, or {remedy}"
        )
    if objective.name not in STOCK:
        raise ValueError(
            f"{objective.name} cannot run on a stock trainer, whose loss is not given what it needs "
            f"({', '.join(objective.required_logps) or 'a loss of its own'}); {remedy}"
        )
    return objective
