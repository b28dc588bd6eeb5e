"""Every recipe's train_verl.sh with --smoke and nothing else.

They run in this checkout's .venv, which `bash tests/run.sh --smoke` has made.
"""

from __future__ import annotations

import json

import pytest
from smoke_runs import RECIPES, cache, run_small

pytest.importorskip("verl")

__all__ = ["cache"]  # a fixture of this module too
ON_VERL = sorted(RECIPES.glob("*/train_verl.sh"))


def test_eight_recipes_have_a_script():
    assert len(ON_VERL) == 8


@pytest.mark.smoke
@pytest.mark.parametrize("script", ON_VERL, ids=lambda script: script.parent.name)
def test_a_recipe_runs_small_on_verl(script, tmp_path, cache):
    run_small(["bash"], script, tmp_path / "run", cache)


# Tasks that a hardly warmed-up policy does now and then, sampled hot: groups with both kinds of outcome.
MIXED = {
    "tasks.names": "[miniwob/click-dialog-2, miniwob/click-tab, miniwob/click-option, miniwob/click-collapsible]",
    "rollout.temperature": "1.3",
    "train.updates": "5",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", ON_VERL, ids=lambda script: script.parent.name)
def test_a_recipe_takes_five_updates_on_verl_from_the_rows_that_were_played(script, tmp_path, cache):
    settings = MIXED | ({"objective.pretrain_updates": "2"} if script.parent.name == "uitars2" else {})
    arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    trained = run_small(["bash"], script, tmp_path / "run", cache, *arguments)
    assert [line["update"] for line in trained] == [1, 2, 3, 4, 5]
    assert any(line.get("grad_norm", 0.0) > 0 for line in trained)
    played = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    for line in trained:
        trajectories = [t for t in played if (t["phase"], t["update"]) == ("train", line["update"])]
        assert line["trajectories"] == len(trajectories)
        if "groups/kept" in line:  # the others were left out before there were rows
            trajectories = [t for t in trajectories if t["advantage"] is not None]
        assert line["rows"] == sum(len(t["steps"]) for t in trajectories) > 0
