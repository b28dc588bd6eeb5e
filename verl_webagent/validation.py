"""A configuration looked through before anything starts: verl's own validation, our checks, and every name in it.

verl's validation passes names that no register holds; they fail minutes later, in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from omegaconf import DictConfig, OmegaConf

from verl_webagent.checks import check_config


def validate(config: DictConfig) -> None:
    """Raise ValueError, in one line that names the setting, its value and what is allowed, or return."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    if config.trainer.v1.trainer_mode.startswith("webagent_"):
        check_config(config)
    for setting, (value, known) in names(config).items():
        if value not in known():
            raise ValueError(f"{setting} = {value!r} is not registered; there are {', '.join(sorted(known()))}")
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError) as error:
        raise ValueError(f"verl refuses this configuration: {error}") from None
    OmegaConf.to_container(config, resolve=True)


def names(config: DictConfig) -> dict[str, tuple[str, Callable[[], Iterable[str]]]]:
    """setting -> (its value, the names that verl would find)."""
    from verl.experimental.reward_loop.reward_manager import registry
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1 import trainer_base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return {
        "algorithm.adv_estimator": (
            config.algorithm.adv_estimator,
            lambda: [getattr(name, "value", name) for name in core_algos.ADV_ESTIMATOR_REGISTRY],
        ),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (
            actor.policy_loss.loss_mode,
            lambda: core_algos.POLICY_LOSS_REGISTRY,
        ),
        "trainer.v1.trainer_mode": (config.trainer.v1.trainer_mode, lambda: trainer_base.TRAINER_REGISTRY),
        "actor_rollout_ref.rollout.name": (rollout.name, lambda: RolloutReplicaRegistry._registry),
        "reward.reward_manager.name": (config.reward.reward_manager.name, lambda: registry.REWARD_MANAGER),
    }
