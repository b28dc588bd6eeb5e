"""Advantage estimators and policy losses under verl's own names for them, one of each a recipe.

A registered estimator is given rows and a prompt id each: it cannot tell two steps of one trajectory from two
trajectories. So the statistics are done before it, over whole trajectories: by the `webagent_*` trainer modes, which do
not call it, or on a stock trainer by the sampler `verl_webagent.stock.SessionSampler`, which leaves every row's
advantage times coefficient where its score was. What is registered here spreads that over the row's tokens, and refuses
to run where nobody has put it there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

from verl_webagent import stock_state
from webagent_core.objectives import OBJECTIVES, RowTensors, load_objective

# On-policy and clipped methods, whose loss needs nothing beside what a stock loss is given.
STOCK = ("webgym", "openwebrl", "zerogui", "arpo", "webagent_r1")
ESTIMATORS = (*STOCK, "asyncwebrl", "hiconagent", "uitars2", "webrl")


def folded(
    name: str, token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """(M, L) advantages and returns: what the sampler left on each row, on all of its tokens."""
    if not stock_state.take(name):
        raise RuntimeError(
            f"algorithm.adv_estimator = {name!r} on a stock trainer needs the sampler that knows which rows are one "
            "trajectory: set trainer.v1.sampler.custom_sampler.path=pkg://verl_webagent.stock, .name=SessionSampler "
            "and trainer.v1.sampler.sampler_kwargs.recipe, or use trainer.v1.trainer_mode=webagent_sync"
        )
    advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages


def folded_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The recipe's clipped surrogate summed over tokens; every normalisation is in `advantages` already."""
    if loss_agg_mode != "token-sum":
        raise ValueError(
            f"actor_rollout_ref.actor.loss_agg_mode = {loss_agg_mode!r}: must be 'token-sum' for loss_mode={name!r}, "
            "whose advantages hold the recipe's own denominators"
        )
    clip = {"eps_low": config.clip_ratio_low, "eps_high": config.clip_ratio_high}
    fields = OBJECTIVES[name].model_fields
    settings: dict[str, Any] = {key: float(value) for key, value in clip.items() if key in fields}
    if "beta" in fields:
        settings["beta"] = 0.0  # a stock trainer adds its own KL term, see actor.use_kl_loss
    objective = load_objective(name, **settings)
    out = objective.loss(
        RowTensors(
            logp=log_prob,
            mask=response_mask.bool(),
            advantage=advantages,
            coefficient=log_prob.new_ones(len(log_prob)),
            old_logp=old_log_prob,
        )
    )
    means = {f"actor/{key}": float(m.sum) / max(float(m.count), 1.0) for key, m in out.metrics.items()}
    return out.loss * config.global_batch_info["dp_size"], means


for _name in ESTIMATORS:
    register_adv_est(_name)(partial(folded, _name))
for _name in STOCK:
    register_policy_loss(_name)(partial(folded_loss, _name))
