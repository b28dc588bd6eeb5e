"""HiconAgent's script as a user runs it: on demonstrations that it records itself, and on recorded steps of others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from trl_webagent.command_line import main

RECIPE = Path(__file__).parents[1] / "recipes" / "hiconagent"
SETTINGS = {
    "train.num_iterations": 1,
    "rollout.temperature": 1.3,
    "policy.warm_up.demonstrations": 12,
    "policy.warm_up.steps": 12,
    "tasks.names": "[miniwob/click-dialog-2, miniwob/click-option, miniwob/enter-text]",
}


def run(out: Path, cache: Path, *arguments: str, **changed: Any) -> str:
    command = [sys.executable, str(RECIPE / "train_trl.py"), "--smoke", "--out", str(out), *arguments]
    for key, value in (SETTINGS | changed).items():
        command += ["--set", f"{key}={value}"]
    environment = os.environ | {"WEBAGENT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def lines(out: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


@pytest.mark.slow
def test_the_script_trains_on_answers_to_steps_and_measures_on_real_pages(tmp_path):
    cache = tmp_path / "cache"
    saved = {"train.updates": 3, "train.save_every": 2}
    said = run(tmp_path / "run", cache, **saved)
    logged = lines(tmp_path / "run", "metrics.jsonl")
    assert [line["phase"] for line in logged] == ["before", "train", "train", "train", "after"]
    before, *trained, after = logged
    for line in (before, after):
        assert line["episodes"] == 3  # played, one page a task
        assert line["held_out_steps"] >= 3
        assert 0 <= line["step_score"] <= 3 and 0 <= line["step_success"] <= 1
    for line in trained:
        assert line["trajectories"] == 2 * 4 and line["rows"] == 8 and line["steps"] == 1.0
        assert "browser_steps_per_second" not in line
    assert "success on held-out seeds:" in said.splitlines()[-1]
    assert (tmp_path / "run" / "report.html").is_file() and (tmp_path / "run" / "learning_curve.png").is_file()
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["sampling"]["training_steps"] == {"value": 24, "from": "override"}

    answers = [line for line in lines(tmp_path / "run", "trajectories.jsonl") if line["phase"] == "train"]
    assert len(answers) == 3 * 2 * 4
    for update in (1, 2, 3):
        groups = {line["group"] for line in answers if line["update"] == update}
        assert len(groups) == 2
        # Of a first step both branches have the same prompt.
        assert (trained[update - 1]["consistency"] > 0) == any(not group.endswith("/0") for group in groups)
    for line in answers:
        (step,) = line["steps"]
        (evidence,) = line["evidence"]
        assert line["reward"] == evidence["format"] + evidence["type"] + evidence["value"]
        assert line["success"] == (line["reward"] == 3)
        assert step["screenshot"]  # of the recorded page, for the report

    # A folder of somebody's own recordings instead: here the one that was just made.
    recorded = max(cache.glob("recorded-*"), key=lambda folder: len(list((folder / "instruction_anno").iterdir())))
    run(tmp_path / "other", cache, **{"sampling.recorded_steps": recorded, "train.updates": 1})
    before, only, after = lines(tmp_path / "other", "metrics.jsonl")
    assert only["trajectories"] == 8 and before["held_out_steps"] > 0

    # Going on from the checkpoint, the third update sees the same steps after the same histories.
    whole = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-3")
    said = run(tmp_path / "run", cache, "--resume", **saved)
    assert "resumed from update 2 of 3: going on with update 3" in said
    again = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())
    times = {"seconds": 0, "tokens_per_second": 0}
    assert [line | times for line in lines(tmp_path / "run", "metrics.jsonl")[1:4]] == [
        line | times for line in trained
    ]


def test_points_in_another_space_than_the_recorded_ones_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(
            RECIPE,
            ["--out", str(tmp_path), "--set", "context.observation=screenshot", "--set", "policy.coordinates=pixel"]
            + ["--set", "tasks.names=[miniwob/click-test]", "--set", "policy.warm_up=null"]
            + ["--set", "policy.model=tiny_vision"],
        )
    assert "policy.coordinates = 'pixel' is not allowed: recorded points are norm1000" in str(stopped.value)
