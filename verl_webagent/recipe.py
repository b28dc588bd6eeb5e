"""A recipe inside verl's configuration: which one, and its numbers wherever verl has a name for them.

The node `webagent` of the configuration says which recipe runs; `${webagent:rollout.group_size}` anywhere else is that
recipe's number. So a recipe states each number once, in its recipe.yaml, and verl's YAML only says where it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from webagent_core.cli import override
from webagent_core.recipe import Recipe, load_recipe
from webagent_core.rewards.for_recipe import plays_for_the_page

# What the node may hold, with the defaults.
NODE: dict[str, Any] = {
    "recipe": None,  # name of a shipped recipe, or a path
    "preset": "paper",
    "profile": "embedded",
    "seed": 0,
    "set": [],  # overrides, "section.key=value"
    "out": None,  # folder of the run: metrics, trajectories, report; none without
    "session_seconds": 1800.0,  # a session of any agent loop that takes longer is an env_error
    "poll_seconds": 0.1,  # how often the trainer looks for finished groups
    "broken_batches": 3,  # so many batches in a row without one valid trajectory end the run
}


WHICH = ("recipe", "preset", "profile", "seed", "set")  # the keys that choose a recipe; others may refer to it


def node_of(config: DictConfig, keys: Sequence[str] = tuple(NODE)) -> dict[str, Any]:
    """These keys of the `webagent` node, defaults filled in. Raises ValueError, in one line, for what is not known."""
    node = config.get("webagent")
    if node is None:
        raise ValueError("webagent is missing in the configuration: `webagent: {recipe: NAME}` says what to train")
    unknown = sorted(set(node) - set(NODE))
    if unknown:
        raise ValueError(f"webagent.{unknown[0]} is not known; there are {', '.join(NODE)}")
    if not node.get("recipe"):
        raise ValueError("webagent.recipe is missing: the name of a recipe (`webagent ls`), or a path to one")
    values = {key: node.get(key, NODE[key]) for key in keys}
    return {key: OmegaConf.to_container(v) if isinstance(v, ListConfig) else v for key, v in values.items()}


def recipe_of(config: DictConfig) -> Recipe:
    """The recipe that the configuration's `webagent` node names. Raises what `load_recipe` raises."""
    node = node_of(config, WHICH)
    name = str(node["recipe"])
    path = Path(name)
    return _load(
        str(path.resolve()) if path.exists() else name,
        node["preset"],
        node["profile"],
        (f"train.seed={node['seed']}", *(node["set"] or ())),
    )


@cache
def _load(name: str, preset: str, profile: str | None, overrides: Sequence[str]) -> Recipe:
    return load_recipe(name, preset, profile, dict(map(override, overrides)))


def value_of(recipe: Recipe, key: str) -> Any:
    """What `${webagent:KEY}` stands for: a setting of the recipe, or one of the few things that follow from several."""
    rollout, train = recipe.rollout, recipe.train
    match key:
        case "max_prompt_tokens":
            return rollout.max_context_tokens - rollout.max_response_tokens
        case "top_k":
            return rollout.top_k or -1
        case "save_freq":
            return train.save_every or train.updates
        case "test_freq":
            return train.eval_every or train.updates  # always after the last one
        case "warmup_ratio":
            return train.warmup_ratio or 0.0
        case "betas":
            return [train.adam_beta1, train.adam_beta2]
        case "critic_learning_rate":
            return (recipe.critic and recipe.critic.learning_rate) or train.learning_rate
        case "reward_manager":
            return "naive" if plays_for_the_page(recipe) else "webagent"  # verl asks neither where the loop knows
        case "uses_reference":
            return recipe.load_objective().uses_reference
        case "uses_critic":
            return recipe.load_objective().uses_critic
        case "drops_flat_groups":
            return bool(getattr(recipe.load_objective(), "drop_flat_groups", False))
        case "max_versions":  # verl counts the policy of now among them: data of this very update span one
            return (recipe.sampling.max_staleness or 0) + 1
        case "lora_rank":
            return recipe.policy.lora.r if recipe.policy.lora else 0
        case "lora_alpha":
            alpha = recipe.policy.lora.alpha if recipe.policy.lora else 16
            if alpha != int(alpha):
                raise ValueError(f"policy.lora.alpha = {alpha} is not allowed on verl: a whole number")
            return int(alpha)
        case "lora_target_modules":
            return recipe.policy.lora.target_modules if recipe.policy.lora else "all-linear"
    return setting_of(recipe, key)


def setting_of(recipe: Recipe, key: str) -> Any:
    """The recipe's value of "section.key"."""
    section, _, rest = key.partition(".")
    value: Any = recipe.load_objective() if section == "objective" else recipe
    for part in (rest if section == "objective" else key).split("."):
        if not hasattr(value, part):
            raise ValueError(f"${{webagent:{key}}}: the recipe {recipe.type} has no setting {key!r}")
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value
