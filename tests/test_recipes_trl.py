"""Each recipe's TRL script on real pages, small: the whole walk, and what the recipe's sampling does on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_run_trl import lines

from trl_webagent.command_line import main
from webagent_core.command_line import NO_SIGNAL, SMOKE

RECIPES = Path(__file__).parents[1] / "recipes"
# Tasks that a hardly warmed-up policy does now and then, sampled hot: groups with both kinds of outcome.
NAMES = "[miniwob/click-dialog-2, miniwob/click-tab, miniwob/click-option, miniwob/click-collapsible]"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(name: str, out: Path, cache: Path, *arguments: str, **settings: Any) -> subprocess.CompletedProcess:
    command = [sys.executable, str(RECIPES / name / "train_trl.py"), "--smoke", "--out", str(out)]
    command += arguments or ("--seed", "5")
    for key, value in settings.items():
        command += ["--set", f"{key.replace('__', '.')}={value}"]
    environment = os.environ | {"WEBAGENT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


def trained(out: Path) -> list[dict]:
    return [line for line in lines(out, "metrics") if line["phase"] == "train"]


def played(out: Path, update: int) -> list[dict]:
    return [t for t in lines(out, "trajectories") if t["phase"] == "train" and t["update"] == update]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["webgym", "asyncwebrl", "openwebrl", "zerogui", "arpo"])
def test_a_recipe_runs_from_start_to_report(name, tmp_path, cache):
    out = tmp_path / name
    horizon = {"rollout__max_steps": 1, "sampling__later_max_steps": 3, "sampling__later_from_update": 1}
    done = run(
        name, out, cache, rollout__temperature=1.3, tasks__names=NAMES, **(horizon if name == "openwebrl" else {})
    )
    assert done.returncode == 0, done.stderr[-3000:]
    phases = [(line["phase"], line["update"]) for line in lines(out, "metrics")]
    assert phases == [("before", 0), ("train", 1), ("train", 2), ("after", 2)]
    assert (out / "report.html").is_file() and (out / "policy" / "model.safetensors").is_file()
    first, second = trained(out)
    of_update = {update: played(out, update) for update in (1, 2)}
    assert second["success"] == pytest.approx(sum(t["success"] for t in of_update[2]) / len(of_update[2]))
    if name in ("asyncwebrl", "openwebrl", "zerogui"):
        for line in (first, second):
            batches = 2 if name == "asyncwebrl" and line["update"] == 1 else 1  # one of them waits
            assert len(of_update[line["update"]]) == line["trajectories"] == 4 * line["groups/played"]
            assert line["groups/kept"] + line["groups/missing"] == 2 * batches
            left_out = line["groups/dropped/flat"] + line["groups/dropped/lone"]
            assert line["groups/kept"] + left_out == line["groups/played"]
        rewards: dict[str, set[float]] = {}
        compared = [t for trajectories in of_update.values() for t in trajectories if t["advantage"] is not None]
        for trajectory in compared:
            rewards.setdefault(trajectory["group"], set()).add(trajectory["reward"])
        assert all(len(of_group) > 1 for of_group in rewards.values())
    if name == "asyncwebrl":
        assert [line["staleness"] for line in (first, second)] == [0, 1]
    if name == "openwebrl":
        assert {len(t["steps"]) for t in of_update[1]} == {1}
        assert 1 < max(len(t["steps"]) for t in of_update[2]) <= 3
    if name == "webgym":
        successes = [sum(t["success"] for t in trajectories) for trajectories in of_update.values()]
        assert [line["replay/stored"] for line in (first, second)] == [successes[0], sum(successes)]
        assert all(t["advantage"] == t["success"] for t in [*of_update[1], *of_update[2]])
    if name == "arpo":
        assert "of 4 tasks kept" in done.stdout
        both = [*of_update[1], *of_update[2]]
        assert len({t["group"] for t in both}) <= 4
        assert second["replay/stored"] == sum(t["success"] for t in both)


# A form that one step cannot fill in: all attempts fail.
NEVER = {"tasks__names": "[miniwob/login-user]", "rollout__max_steps": 1, "policy__warm_up": "null"}
# Every recipe that drops groups, tasks or pairs without signal: its settings, and what is said.
FLAT = r"no group has signal in 3 batches in a row: 12 groups played, 12 groups flat at .*miniwob/login-user 12"
NO_SIGNAL_AT_ALL = {
    "asyncwebrl": ({"sampling__max_staleness": 0}, FLAT),
    "openwebrl": ({"sampling__later_max_steps": 1}, FLAT),
    "zerogui": ({}, FLAT),
    "webagent_r1": ({"objective__drop_flat_groups": True}, FLAT),
    "arpo": ({}, "task filter: 0 of 4 tasks kept, 4 never solved: no task is left to train on"),
    "agentq": ({"pairs__rounds": 1, "search__iterations": 1}, "no pair in 1 round"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_SIGNAL_AT_ALL)
def test_a_run_whose_tasks_give_no_signal_ends_with_one_line_and_its_own_exit_code(name, tmp_path, cache):
    out, (settings, said) = tmp_path / "run", NO_SIGNAL_AT_ALL[name]
    sizes = {"rollout__groups_per_update": 1, "train__updates": 9, "train__save_every": 9}
    group = {} if name == "agentq" else {"rollout__group_size": 2, "train__num_iterations": 2}
    settings = NEVER | sizes | group | settings
    done = run(name, out, cache, **settings)
    assert done.returncode == NO_SIGNAL, done.stderr[-3000:]
    (line,) = done.stderr.strip().splitlines()
    assert re.match(f"stopped: {said}", line) and line.endswith(f"What was done is in {out}")
    updates = [1, 2, 3] if said is FLAT else []
    assert [(each["phase"], each["update"]) for each in lines(out, "metrics")] == [
        ("before", 0), *(("train", update) for update in updates), ("after", 9 if name == "agentq" else len(updates)),
    ]  # fmt: skip
    assert (out / "report.html").is_file() and (out / "policy" / "model.safetensors").is_file()
    assert (out / "checkpoints" / "checkpoint-6" / "sampling-0.pt").is_file() == (said is FLAT)
    if name == "openwebrl":
        other = run(name, out, cache, "--seed", "6", "--resume", **settings)
        assert other.returncode == 1
        assert other.stderr == "error: the sampling state's seed is 5, and this run's is 6\n"


@pytest.mark.parametrize("name", ["webagent_r1", "webgym", "asyncwebrl", "openwebrl", "zerogui", "arpo"])
def test_smoke_takes_what_the_recipe_has_and_a_setting_of_ones_own_wins(name, tmp_path, capsys):
    main(RECIPES / name, ["--smoke", "--dry-run", "--set", "train.updates=7", "--out", str(tmp_path / "run")])
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["train"]["updates"] == {"value": 7, "from": "override"}
    assert resolved["rollout"]["groups_per_update"]["value"] == SMOKE["rollout.groups_per_update"]
    assert ("candidate_tasks" in resolved.get("sampling", {})) == (name == "arpo")
    assert not (tmp_path / "run").exists()


def test_help_says_what_smoke_sets_and_what_exit_codes_mean(capsys):
    with pytest.raises(SystemExit):
        main(RECIPES / "arpo", ["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{setting}={value}" in said for setting, value in SMOKE.items())
    assert f"{NO_SIGNAL} ended early because no task gives signal" in said
