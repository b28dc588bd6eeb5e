"""What verl would run and what would compute something else than the recipe: refused before anything starts.

verl's own validation knows neither our names nor our needs, and not every name of its own either.
"""

from __future__ import annotations

from importlib.util import find_spec

from omegaconf import DictConfig

from verl_webagent.recipe import recipe_of, setting_of
from webagent_core.recipe import Recipe
from webagent_core.rewards.for_recipe import check_rewards, plays_for_the_page

# Methods that verl cannot host, with the reason that recipe pages give as well.
NOT_HOSTED = {
    "uitars": "it trains on pairs of responses (DPO), and verl's trainers know rollouts only: run it on TRL",
    "agentq": "it trains on pairs of responses (DPO), and verl's trainers know rollouts only: run it on TRL",
}

# Settings that a TRL run reads and a verl run does not, by what they belong to; of `sampling.generator` all it has.
NOT_READ = {
    "the choice of tasks before training": ("sampling.task_trials", "sampling.task_min_successes"),
    "tasks made before training": (
        "sampling.generated_tasks", "sampling.generated_epochs", "sampling.generator", "sampling.site",
    ),
    "phases": (
        "sampling.updates_per_phase", "sampling.new_tasks_per_phase", "sampling.new_task_min_value",
        "sampling.new_task_max_value", "sampling.replay_min_probability", "sampling.replay_max_probability",
        "sampling.replay_ratio",
    ),
    "the critic's own schedule": (
        "critic.rows_per_step", "critic.passes", "critic.pretrain_passes", "critic.min_gain",
    ),
    "forward passes, which verl sizes by tokens": ("train.max_rows_per_forward",),
}  # fmt: skip


def is_read(setting: str) -> bool:
    """Whether a verl run looks at this setting of a recipe."""
    return not any(f"{setting}.".startswith(f"{name}.") for names in NOT_READ.values() for name in names)


def left_to_trl(recipe: Recipe) -> list[str]:
    """What a TRL run of this recipe would do and a verl run does not: keys of NOT_READ whose first setting is on."""
    sections = {"sampling": recipe.sampling, "critic": recipe.critic}
    on = {f"{part}.{name}" for part, section in sections.items() if section for name, value in section if value}
    return [what for what, (first, *_) in NOT_READ.items() if first in on]


def check_config(config: DictConfig) -> None:
    """Raise ValueError, in one line that names the setting, its value and what is allowed, or return."""
    recipe = recipe_of(config)
    objective = recipe.load_objective()
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if recipe.type in NOT_HOSTED:
        raise ValueError(f"webagent.recipe = {recipe.type!r} cannot run on verl: {NOT_HOSTED[recipe.type]}")
    for setting, source in recipe.provenance.items():
        if source == "override" and not is_read(setting) and (value := setting_of(recipe, setting)):
            raise ValueError(
                f"{setting} = {value!r} is not read on verl: leave it out, or run the recipe on TRL"
            )
    if recipe.policy.lora and recipe.policy.lora.dropout:
        raise ValueError(
            f"policy.lora.dropout = {recipe.policy.lora.dropout} is not allowed on verl, whose adapters have none: 0"
        )
    check_rewards(recipe)
    asked = config.reward.reward_manager.name
    if asked != "webagent" and not plays_for_the_page(recipe):
        raise ValueError(
            f"reward.reward_manager.name = {asked!r}: must be webagent for this recipe's reward "
            f"(reward.manager = {recipe.reward.manager!r})"
        )
    if getattr(objective, "hcpo", False):
        raise ValueError(
            "objective.hcpo = True cannot run on verl: the compressed branch needs a second forward pass of each "
            "answer in the same gradient, and verl's engines run one; set objective.hcpo=false for the full branch "
            "alone, or run it on TRL"
        )
    if recipe.policy.reference is not None:
        raise ValueError(
            f"policy.reference = {recipe.policy.reference!r} cannot run on verl: its reference worker loads the model "
            "that the actor starts from; leave it null, or run it on TRL"
        )
    if objective.uses_reference and not actor.use_kl_loss:
        raise ValueError(
            f"actor_rollout_ref.actor.use_kl_loss = {actor.use_kl_loss}: must be true for {recipe.type}, whose loss "
            "compares with the reference policy; its strength is the recipe's beta, kl_loss_coef is not read"
        )
    if objective.uses_critic and config.critic.get("enable") is not True:
        raise ValueError(
            f"critic.enable = {config.critic.get('enable')}: must be true for {recipe.type}, which learns a critic"
        )
    if "behave_logp" in objective.required_logps and not rollout.calculate_log_probs:
        raise ValueError(
            f"actor_rollout_ref.rollout.calculate_log_probs = {rollout.calculate_log_probs}: must be true for "
            f"{recipe.type}, which weighs by the policy that played"
        )
    refused = {
        "algorithm.use_kl_in_reward": (config.algorithm.use_kl_in_reward, False),
        "actor_rollout_ref.actor.entropy_coeff": (actor.entropy_coeff, 0),
    }
    for name, (value, allowed) in refused.items():
        if value != allowed:
            raise ValueError(
                f"{name} = {value!r}: must be {allowed!r} in the webagent trainer modes, whose loss is the recipe's"
            )
    if actor.strategy not in ("fsdp", "fsdp2"):
        raise ValueError(f"actor_rollout_ref.actor.strategy = {actor.strategy!r}: allowed are fsdp, fsdp2")
    if rollout.n < 2 and "group_size" in type(recipe.rollout).model_fields and not objective.uses_critic:
        raise ValueError(f"actor_rollout_ref.rollout.n = {rollout.n}: must be at least 2, a group is the baseline")


def check_pictures(recipe: Recipe) -> None:
    """Raise ModuleNotFoundError if the policy sees and this machine lacks what verl opens pictures with."""
    pictures = recipe.context is not None and recipe.context.observation == "screenshot"
    if pictures and find_spec("torchvision") is None:
        raise ModuleNotFoundError(
            "context.observation = 'screenshot' needs torchvision on verl: install the extra `vision` "
            "(bash recipes/setup.sh trl verl vision)"
        )
