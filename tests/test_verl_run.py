"""`python -m verl_webagent.train`: the whole walk on real pages, resumed, and with a reward class of one's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

from reward_runs import (
    NO_VERDICT,
    WRONG,
    check_baselines,
    check_counted,
    check_named,
    check_rewards_are_verdicts,
    readme_class,
    untrained_policy,
)

from webagent_core.rewards.local_judge import LocalJudge

__all__ = ["untrained_policy"]  # a fixture of this module too

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ["train.updates=3", "train.save_every=2", "train.num_iterations=1", "rollout.groups_per_update=3",
            "policy.warm_up.demonstrations=40", "policy.warm_up.steps=40", "train.eval_episodes=1"]  # fmt: skip


def train(out: Path, *arguments: str, recipe: str = "webagent_r1", cwd: Path = ROOT) -> subprocess.CompletedProcess:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return subprocess.run(
        [sys.executable, "-m", "verl_webagent.train", str(ROOT / "recipes" / recipe), "--smoke", "--out", str(out),
         *settings, *arguments],
        cwd=cwd, env=os.environ | {"PYTHONPATH": os.pathsep.join([".", str(ROOT), str(ROOT / "tests")])},
        capture_output=True, text=True, timeout=3600,
    )  # fmt: skip


def metrics(out: Path) -> dict[tuple[str, int], dict]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {(line["phase"], line["update"]): line for line in lines}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("verl") / "run"
    done = train(out)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "success on held-out seeds: " in done.stdout.splitlines()[-1]
    return out


@pytest.mark.slow
def test_the_whole_walk_leaves_what_a_trl_run_leaves(run):
    lines = metrics(run)
    assert set(lines) == {("before", 0), ("train", 1), ("train", 2), ("train", 3), ("after", 3)}
    for update in (1, 2, 3):
        line = lines["train", update]
        assert line["trajectories"] == 12 and line["exit_status/env_error"] == 0
        assert sum(value for key, value in line.items() if key.startswith("exit_status/")) == 12
    for name in ("config.yaml", "report.html", "learning_curve.png", "trajectories.jsonl"):
        assert (run / name).stat().st_size > 0
    trajectories = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    played = [t for t in trajectories if t["phase"] == "train" and t["update"] == 1]
    assert len(played) == 12 and len({t["group"] for t in played}) == 3
    for trajectory in played:
        assert trajectory["steps"] and (run / trajectory["steps"][0]["screenshot"]).is_file()


@pytest.mark.slow
def test_a_seed_makes_the_same_run_twice(run, tmp_path):
    """To the last digit, although sessions end in another order every time."""
    again = tmp_path / "run"
    done = train(again)
    assert done.returncode == 0, done.stderr[-3000:]
    for key, line in metrics(run).items():
        for name in ("success", "rows", "loss", "grad_norm", "entropy"):
            assert metrics(again)[key].get(name) == line.get(name), (key, name)


@pytest.mark.slow
def test_a_resumed_run_takes_the_update_that_the_uninterrupted_run_took(run, tmp_path):
    """From the checkpoint after update 2, in a fresh process: update 3 is the same one."""
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed, symlinks=True)
    shutil.rmtree(resumed / "checkpoints" / "global_step_3")
    (resumed / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    done = train(resumed, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = metrics(run)["train", 3], metrics(resumed)["train", 3]
    assert after["success"] == before["success"] and after["rows"] == before["rows"]
    assert before["grad_norm"] > 0
    for name in ("loss", "grad_norm", "learning_rate"):
        assert after[name] == before[name], name

    done = train(resumed, "--resume")  # past the end
    assert done.returncode == 0 and "nothing is left to train" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_checkpoint_without_our_state_is_refused(run, tmp_path):
    resumed = tmp_path / "run"
    shutil.copytree(run, resumed, symlinks=True)
    (resumed / "checkpoints" / "global_step_3" / "webagent.pt").unlink()
    done = train(resumed, "--resume")
    assert done.returncode != 0 and "webagent.pt is missing" in done.stderr


@pytest.fixture(scope="module")
def unlearned(untrained_policy) -> list[str]:
    """Settings of a short run where it does not matter how good the policy is."""
    chosen = (f"policy.model={untrained_policy}", "policy.warm_up=null", "train.updates=2")
    return ["trainer.val_before_train=false", *(part for setting in chosen for part in ("--set", setting))]


def train_phase(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "train"]


@pytest.mark.slow
def test_the_class_that_readme_shows_trains_by_the_command_that_it_shows(tmp_path, unlearned):
    out = tmp_path / "run"
    done = train(out, *unlearned, *readme_class(tmp_path, "train_verl.sh"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(len(line["steps"]) for line in train_phase(out)) > 1
    for line in train_phase(out):
        assert line["reward"] + 0.05 * len(line["steps"]) == pytest.approx(1.0 if line["success"] else 0.0)
    for line in map(json.loads, (out / "trajectories.jsonl").read_text().splitlines()):
        if line["phase"] == "after":  # held-out tasks are measured by their own program
            assert line["reward"] == (1.0 if line["success"] else 0.0)


@pytest.mark.slow
def test_no_failure_of_the_judge_is_ever_a_reward_and_the_run_goes_on(tmp_path, unlearned):
    """The judge fails in turn while the first twelve are scored, and is well from then on."""
    out = tmp_path / "run"
    with LocalJudge() as judge:
        judge.faults.extend(["", "not_success", *NO_VERDICT, "not_success"])
        settings = {"base_url": judge.base_url, "model": "rule", "attempts": 1, "timeout_seconds": 8}
        asked = [f"reward.judge.{name}={value}" for name, value in settings.items()]
        chosen = ["reward.manager=judge", *asked, "train.save_every=0"]
        done = train(out, *unlearned, *(part for setting in chosen for part in ("--set", setting)))
        counts = judge.counts
    assert done.returncode == 0, done.stderr[-3000:]
    trained = train_phase(out)
    told = {update: line for (phase, update), line in metrics(out).items() if phase == "train"}
    failed = check_rewards_are_verdicts(trained, counts)
    check_baselines(trained)
    check_counted(trained, told)
    assert sorted(told) == [1, 2] and {line["update"] for line in failed} == {1}
    assert told[1]["judge/longest_seconds"] >= 8 > 4 > told[2]["judge/longest_seconds"]
    assert told[2]["invalid"] == told[2]["judge/failed_requests"] == 0 and told[2]["judge/requests"] == 12
    assert "judge_error" in (out / "report.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), WRONG)
def test_a_class_that_is_wrong_ends_the_run_and_is_named_with_the_trajectory(tmp_path, unlearned, name, said):
    done = train(tmp_path / "run", *unlearned, "--set", f"reward.manager=reward_runs:{name}")
    assert done.returncode != 0
    check_named(done.stderr, name, said)


def test_a_bad_setting_ends_in_one_line_before_anything_starts(tmp_path):
    done = train(tmp_path / "run", "--set", "rollout.group_size=1")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "rollout.group_size = 1" in done.stderr and not (tmp_path / "run").exists()
