"""Every script of every recipe with --smoke and nothing else, as a user first runs it.

train_verl.sh runs in this checkout's .venv, which `bash tests/run.sh --smoke` has made.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "recipes"
ON_TRL = sorted(RECIPES.glob("*/train_trl.py"))
ON_VERL = sorted(RECIPES.glob("*/train_verl.sh"))


def test_all_eleven_recipes_have_a_script_and_eight_have_two():
    assert (len(ON_TRL), len(ON_VERL)) == (11, 8)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs here keep and find their warmed-up policy."""
    return tmp_path_factory.mktemp("cache")


def run(command: list[str], script: Path, out: Path, cache: Path, *arguments: str) -> list[dict]:
    """The script to its end: every loss a number, the policy measured before and after, and the report.

    Returns the metrics of its updates."""
    environment = os.environ | {"WEBAGENT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(script), "--smoke", "--out", str(out), *arguments],
        env=environment, cwd=out.parent, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert "success on held-out seeds" in done.stdout.splitlines()[-1]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["phase"] == "before" and lines[-1]["phase"] == "after"
    trained = [line for line in lines if line["phase"] == "train"]
    assert trained
    assert all(math.isfinite(line.get("loss", 0.0)) for line in trained)
    assert (out / "report.html").is_file() and (out / "learning_curve.png").is_file()
    return trained


@pytest.mark.smoke
@pytest.mark.parametrize("script", ON_TRL, ids=lambda script: script.parent.name)
def test_a_recipe_runs_small_on_trl(script, tmp_path, cache):
    run([sys.executable], script, tmp_path / "run", cache)


@pytest.mark.smoke
@pytest.mark.parametrize("script", ON_VERL, ids=lambda script: script.parent.name)
def test_a_recipe_runs_small_on_verl(script, tmp_path, cache):
    pytest.importorskip("verl")
    run(["bash"], script, tmp_path / "run", cache)


# Tasks that a hardly warmed-up policy does now and then, sampled hot: groups with both kinds of outcome.
MIXED = {
    "tasks.names": "[miniwob/click-dialog-2, miniwob/click-tab, miniwob/click-option, miniwob/click-collapsible]",
    "rollout.temperature": "1.3",
    "train.updates": "5",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", ON_VERL, ids=lambda script: script.parent.name)
def test_a_recipe_takes_five_updates_on_verl_from_the_rows_that_were_played(script, tmp_path, cache):
    pytest.importorskip("verl")
    settings = MIXED | ({"objective.pretrain_updates": "2"} if script.parent.name == "uitars2" else {})
    arguments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    trained = run(["bash"], script, tmp_path / "run", cache, *arguments)
    assert [line["update"] for line in trained] == [1, 2, 3, 4, 5]
    assert any(line.get("grad_norm", 0.0) > 0 for line in trained)
    played = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    for line in trained:
        trajectories = [t for t in played if (t["phase"], t["update"]) == ("train", line["update"])]
        assert line["trajectories"] == len(trajectories)
        if "groups/kept" in line:  # the others were left out before there were rows
            trajectories = [t for t in trajectories if t["advantage"] is not None]
        assert line["rows"] == sum(len(t["steps"]) for t in trajectories) > 0
