"""Every recipe's train_trl.py with --smoke and nothing else."""

from __future__ import annotations

import sys

import pytest
from smoke_runs import RECIPES, cache, run_small

__all__ = ["cache"]  # a fixture of this module too
ON_TRL = sorted(RECIPES.glob("*/train_trl.py"))


def test_all_eleven_recipes_have_a_script():
    assert len(ON_TRL) == 11


@pytest.mark.smoke
@pytest.mark.parametrize("script", ON_TRL, ids=lambda script: script.parent.name)
def test_a_recipe_runs_small_on_trl(script, tmp_path, cache):
    run_small([sys.executable], script, tmp_path / "run", cache)
