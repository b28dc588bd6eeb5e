"""`${webagent:SETTING}` in verl's configuration. Apart from recipe.py, so that it costs nothing unused."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf


def setting_of_the_recipe(key: str, *, _root_: DictConfig) -> Any:
    from verl_webagent.recipe import recipe_of, value_of

    value = value_of(recipe_of(_root_), key)
    return OmegaConf.create(value) if isinstance(value, list) else value


OmegaConf.register_new_resolver("webagent", setting_of_the_recipe, replace=True)
