"""The script a user runs, in a process of its own and on real pages: what it leaves, repeats, survives and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_browser import alive, descendants
from transformers import AutoTokenizer

from trl_webagent.command_line import main
from webagent_core.browser.chromium import find_chromium
from webagent_core.policy.tiny import BASE, build_policy
from webagent_core.policy.tokenizer import build_tokenizer
from webagent_core.recipe import load_recipe
from webagent_core.report.run_directory import PHASES

RECIPE = Path(__file__).parents[1] / "recipes" / "webagent_r1"
SCRIPT = RECIPE / "train_trl.py"
# Tasks that a hardly warmed-up policy does now and then, sampled hot: groups with both kinds of outcome.
SETTINGS = {
    "train.updates": 4,
    "train.num_iterations": 1,  # so that a checkpoint has the number of its update
    "train.save_every": 2,
    "train.eval_every": 2,
    "rollout.group_size": 6,
    "rollout.temperature": 1.3,
    "tasks.names": "[miniwob/click-dialog-2, miniwob/click-tab, miniwob/click-option, miniwob/click-collapsible]",
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs here keep and find their warmed-up policy."""
    return tmp_path_factory.mktemp("cache")


def start(out: Path, cache: Path, *arguments: str, script: Path = SCRIPT, **changed: Any) -> subprocess.Popen:
    command = [sys.executable, str(script), "--smoke", "--seed", "5", "--out", str(out), *arguments]
    for key, value in (SETTINGS | changed).items():
        command += ["--set", f"{key}={value}"]
    environment = os.environ | {"WEBAGENT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen, seconds: float = 300) -> tuple[str, str]:
    stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == 0, stderr[-3000:]
    return stdout, stderr


def lines(out: Path, name: str) -> list[dict]:
    """The whole lines of one of a run's .jsonl files, also while it is being written."""
    file = out / f"{name}.jsonl"
    written = file.read_bytes() if file.exists() else b""
    return [json.loads(line) for line in written[: written.rfind(b"\n") + 1].splitlines()]


def updates_done(out: Path) -> int:
    return sum(line["phase"] == "train" for line in lines(out, "metrics"))


def wait_for(process: subprocess.Popen, condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def untimed(out: Path) -> tuple[list[dict], list[dict]]:
    """Metrics and trajectories without what the clock of the machine decides."""
    metrics = [
        {key: value for key, value in line.items() if key != "seconds" and not key.endswith("_per_second")}
        for line in lines(out, "metrics")
    ]
    trajectories = [line | {"seconds": 0} for line in lines(out, "trajectories")]
    for trajectory in trajectories:
        for page in [*trajectory["steps"], *([trajectory["final"]] if "final" in trajectory else [])]:
            del page["url"]  # the port
    return metrics, trajectories


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, str, str]:
    """Folder and output of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, *finish(start(out, cache))


# --- A run -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_all_that_it_promises(whole):
    out, stdout, stderr = whole
    assert stderr == ""
    metrics, trajectories = lines(out, "metrics"), lines(out, "trajectories")
    assert [(line["phase"], line["update"]) for line in metrics] == [
        ("before", 0), ("train", 1), ("train", 2), ("during", 2), ("train", 3), ("train", 4), ("after", 4),
    ]  # fmt: skip
    assert "group_size" in (out / "config.yaml").read_text()
    counts = {phase: sum(line["phase"] == phase for line in trajectories) for phase in PHASES}
    assert counts == {"before": 4, "train": 4 * 2 * 6, "during": 4, "after": 4}
    pictures = [step["screenshot"] for line in trajectories for step in line["steps"]]
    assert len(pictures) == len(set(pictures)) == len(list((out / "screenshots").glob("*.jpg")))
    assert all(Image.open(out / picture).size == (160, 210) for picture in pictures[:5])
    assert Image.open(out / "learning_curve.png").size[0] > 400
    report = (out / "report.html").read_text()
    assert "miniwob/click-tab" in report and "<script src" not in report
    assert {folder.name for folder in (out / "checkpoints").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert (out / "policy" / "model.safetensors").is_file()
    said = stdout.splitlines()
    assert sum(line.startswith("update ") for line in said) == 4
    assert "before" in said[-1] and "after" in said[-1] and "seed 5" in said[-1]


@pytest.mark.slow
def test_a_run_learns_from_groups_with_both_kinds_of_outcome(whole):
    """Or the runs compared below would be equal because nothing ever happens in them."""
    out, *_ = whole
    trained = [line for line in lines(out, "metrics") if line["phase"] == "train"]
    assert any(line["grad_norm"] > 0 and line["loss"] != 0 for line in trained)
    assert any(trajectory["advantage"] for trajectory in lines(out, "trajectories"))
    for line in trained:
        of_update = [t for t in lines(out, "trajectories") if t["phase"] == "train" and t["update"] == line["update"]]
        assert line["success"] == pytest.approx(sum(t["success"] for t in of_update) / len(of_update))
        assert line["rows"] == sum(len(t["steps"]) for t in of_update)
        assert line["trajectories"] == len(of_update) == 12


@pytest.mark.slow
def test_the_same_seed_gives_the_same_tasks_trajectories_and_metrics(whole, tmp_path):
    """From demonstrations and warm-up on: this run finds nothing that the first one made."""
    stdout, _ = finish(start(tmp_path / "again", tmp_path / "cache"))
    assert "kept from an earlier run" not in whole[1] + stdout
    first, second = untimed(whole[0]), untimed(tmp_path / "again")
    assert second[0] == first[0]
    assert second[1] == first[1]


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_checkpoint_and_ends_as_one_that_was_not(whole, tmp_path, cache):
    out = tmp_path / "killed"
    process = start(out, cache)
    wait_for(process, lambda: updates_done(out) == 3)
    started = descendants(process.pid)
    process.kill()
    process.communicate()
    assert (out / "checkpoints" / "checkpoint-2").is_dir()
    end = time.monotonic() + 20
    while (left := [pid for pid in started if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, started  # neither browser nor page server outlives the run

    stdout, stderr = finish(start(out, cache, "--resume"))
    assert "resumed from update 2 of 4" in stdout and stderr == ""
    assert "warm-up: kept from an earlier run" in stdout
    resumed, expected = untimed(out), untimed(whole[0])
    assert resumed[0] == expected[0]
    assert resumed[1] == expected[1]
    pictures = {step["screenshot"] for line in lines(out, "trajectories") for step in line["steps"]}
    assert {f"screenshots/{picture.name}" for picture in (out / "screenshots").iterdir()} == pictures


@pytest.mark.slow
def test_a_run_that_is_interrupted_says_how_to_go_on(tmp_path, cache):
    out = tmp_path / "interrupted"
    process = start(out, cache)
    wait_for(process, lambda: (out / "checkpoints" / "checkpoint-2" / "trainer_state.json").exists())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.strip().splitlines() == [
        f"interrupted: what was done is in {out}; --resume goes on from its last checkpoint"
    ]


@pytest.mark.slow
def test_chromium_killed_in_mid_run_costs_the_affected_episodes_alone(tmp_path, cache):
    out = tmp_path / "browserless"
    process = start(out, cache, **{"train.updates": 6})
    name, killed = os.path.basename(find_chromium()), 0
    for update in (1, 2, 3):
        wait_for(process, lambda update=update: updates_done(out) >= update)
        time.sleep(0.7)  # into the episodes of the next one
        for pid, command in descendants(process.pid).items():
            if os.path.basename(command[0]) == name and not any(part.startswith("--type=") for part in command):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    finish(process)
    assert killed >= 2
    metrics = [line for line in lines(out, "metrics") if line["phase"] == "train"]
    assert [line["update"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    trajectories = [line for line in lines(out, "trajectories") if line["phase"] == "train"]
    broken = [line for line in trajectories if line["exit_status"] == "env_error"]
    assert 0 < len(broken) <= killed * 8  # at most the eight pages that were open, each time
    assert all(line["reward"] is None and line["advantage"] is None and not line["valid"] for line in broken)
    for line in metrics:
        of_update = [t for t in trajectories if t["update"] == line["update"]]
        valid = [t for t in of_update if t["valid"]]
        assert line["invalid"] == line["exit_status/env_error"] == len(of_update) - len(valid)
        assert len(of_update) == 12
        if valid:
            assert line["success"] == pytest.approx(sum(t["success"] for t in valid) / len(valid))
    assert lines(out, "metrics")[-1]["phase"] == "after" and lines(out, "metrics")[-1]["exit_status/env_error"] == 0


def test_what_a_recipe_says_of_sampling_and_optimiser_reaches_the_trainer(tmp_path):
    from trl_webagent.run import Run

    tokenizer = build_tokenizer(["Press OK"])
    for part in (tokenizer, build_policy(tokenizer, hidden=16, layers=1, heads=2)):
        part.save_pretrained(tmp_path / "policy")
    said = {
        "rollout.top_k": 7,
        "rollout.top_p": 0.9,
        "rollout.temperature": 1.5,
        "rollout.max_response_tokens": 9,
        "train.warmup_updates": 3,
        "train.num_iterations": 2,
        "train.lr_schedule": "linear",
        "train.weight_decay": 0.02,
        "train.max_grad_norm": 0.5,
        "train.updates": 11,
        "objective.beta": 0.25,
    }
    trainer = Run(load_recipe(RECIPE, overrides=said), tmp_path / "run", False)._trainer(str(tmp_path / "policy"))
    sampling, arguments = trainer.generation_config, trainer.args
    assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.max_new_tokens) == (7, 0.9, 1.5, 9)
    assert (arguments.max_steps, arguments.warmup_steps, arguments.lr_scheduler_type) == (22, 6, "linear")
    assert (arguments.weight_decay, arguments.max_grad_norm) == (0.02, 0.5)
    assert trainer.objective.beta == 0.25 and trainer.ref_model is not None


def test_another_model_in_a_known_folder_is_another_model_to_the_kept_warm_ups(tmp_path):
    from trl_webagent.warm_up import _files_of

    (tmp_path / "model.safetensors").write_bytes(b"first")
    first = _files_of(str(tmp_path))
    assert first and _files_of(str(tmp_path)) == first
    (tmp_path / "model.safetensors").write_bytes(b"second")
    assert _files_of(str(tmp_path)) != first
    assert _files_of("a-name/on-the-hub") == []


# --- Bad input -------------------------------------------------------------------------------------------------------

BAD_INPUT = {
    "task": (["--set", "tasks.names=[miniwob/click-buton]"], ["'miniwob/click-buton'", "miniwob/click-button"]),
    "task without a demonstrator": (
        ["--set", "tasks.names=[miniwob/book-flight]"],
        ["'miniwob/book-flight'", "demonstrator", "miniwob/click-tab"],
    ),
    "section": (["--set", "rolout.group_size=8"], ["rolout", "rollout"]),
    "key": (["--set", "rollout.groupsize=8"], ["rollout.groupsize", "group_size"]),
    "hyperparameter": (["--set", "objective.epsilon=0.2"], ["unknown key epsilon", "eps_low"]),
    "no key": (["--set", "group_size"], ["'group_size'", "=VALUE"]),
    "preset": (["--preset", "peper"], ["preset = 'peper'", "paper", "released"]),
    "profile": (["--profile", "laptop"], ["profile = 'laptop'", "embedded"]),
    "model": (["--set", "policy.model=models/none"], ["policy.model = 'models/none'", "config.json"]),
    "reference": (["--set", "policy.reference=models/none"], ["policy.reference = 'models/none'", "config.json"]),
    "group of one": (["--set", "rollout.group_size=1"], ["rollout.group_size = 1 ", ">= 2"]),
    "no steps": (["--set", "rollout.max_steps=0"], ["rollout.max_steps = 0 ", ">= 1"]),
    "no sampling": (["--set", "rollout.temperature=0"], ["rollout.temperature = 0", "> 0"]),
    "seed below 0": (["--seed", "-1"], ["train.seed = -1 ", ">= 0"]),
    "value out of range": (["--set", "objective.eps_low=1.5"], ["eps_low = 1.5 ", "< 1"]),
    "nothing to resume": (["--resume"], ["--resume", "no checkpoint"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_answered_in_one_line_that_names_field_value_and_what_is_allowed(case, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments, named = BAD_INPUT[case]
    started = time.process_time()
    with pytest.raises(SystemExit) as refused:
        main(RECIPE, [*arguments, "--out", str(tmp_path / "run")])
    assert isinstance(refused.value.code, str) and "\n" not in refused.value.code
    assert refused.value.code.startswith("error: ")
    for part in named:
        assert part in refused.value.code
    assert not (tmp_path / "run").exists() and time.process_time() - started < 5


def test_a_reference_of_another_shape_is_refused_before_a_browser_starts(tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    build_policy(tokenizer, hidden=64, layers=2).save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    monkeypatch.setattr("trl_webagent.run.BrowserRollout", None)
    with pytest.raises(SystemExit, match="^error: policy.reference = .*wide' is not allowed: its parameters must be"):
        main(RECIPE, ["--set", f"policy.reference={tmp_path / 'wide'}", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_a_run_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit) as refused:
        main(RECIPE, ["--smoke", "--out", str(tmp_path)])
    assert str(tmp_path) in refused.value.code and "--resume" in refused.value.code and "\n" not in refused.value.code
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_a_missing_chromium_is_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("WEBAGENT_CHROMIUM", str(tmp_path / "chromium"))
    with pytest.raises(SystemExit) as refused:
        main(RECIPE, ["--smoke", "--out", str(tmp_path / "run")])
    assert "WEBAGENT_CHROMIUM" in refused.value.code and "\n" not in refused.value.code
    assert not (tmp_path / "run").exists()


def test_the_script_refuses_before_it_imports_or_starts_anything_heavy(tmp_path):
    command = [sys.executable, "-X", "importtime", str(SCRIPT), "--set", "rollout.max_steps=0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    imported = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert [line for line in done.stderr.splitlines() if line not in imported] == [
        "error: webagent_r1: rollout.max_steps = 0 is not allowed: a whole number >= 1"
    ]
    assert done.returncode == 1 and done.stdout == "" and list(tmp_path.iterdir()) == []
    modules = {line.rsplit("|", 1)[1].strip() for line in imported}
    assert "webagent_core.recipe" in modules
    assert not modules & {"trl", "transformers", "datasets", "peft", "accelerate"}
