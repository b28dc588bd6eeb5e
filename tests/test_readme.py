"""README.md: its examples run and print what it says, and what it names is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from webagent_core.cli import app, override
from webagent_core.episode.trajectory import NOT_THE_POLICY, ExitStatus
from webagent_core.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def example(marker: str) -> str:
    """The one Python block that holds `marker`."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if marker in block]
    return found


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_evaluate_example_prints_what_the_page_says():
    code = example("evaluate(")
    printed = re.search(r"```text\n(.*?)```", README[README.index(code) :], re.DOTALL)[1]
    assert run(code) == printed


def test_the_numbers_of_the_evaluate_example_are_those_worked_by_hand():
    from math import exp, sqrt

    advantage = 0.5 / (sqrt(0.5) + 1e-6)
    success = -(exp(0.1) + 1.28) / 2 * advantage  # two tokens, the second clipped
    failure = advantage + exp(-0.1) * advantage  # two steps of one token
    assert f"paper loss {(success + failure) / 2:.4f}" in README
    assert f"released loss {(success + failure) / 3:.4f}" in README
    assert f"[{-exp(0.1) * advantage / 2 / 3:.4f},  0.0000]" in README


def test_exit_statuses_are_the_vocabulary():
    table = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", README, re.MULTILINE))
    assert table == {str(status): "no" if status in NOT_THE_POLICY else "yes" for status in ExitStatus}


def test_files_and_folders_that_the_page_names_exist():
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOT / link).exists(), link
    tree = re.search(r"```text\n(webagent_core/.*?)```", README, re.DOTALL)[1]
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else ROOT / name
        assert (folder / name if line.startswith(" ") else folder).exists(), line


def test_commands_that_the_page_names_exist():
    used = set(re.findall(r"^webagent (\w+)", README, re.MULTILINE))
    assert used == {command.name or command.callback.__name__ for command in app.registered_commands}
    for script in re.findall(r"^bash (\S+)", README, re.MULTILINE):
        assert (ROOT / script).is_file(), script


def test_settings_and_options_that_the_page_names_exist():
    given = re.findall(r"--set (?:'([^']+)'|([a-z_.]+=[^\s`]+))", README)
    assert len(given) > 9
    load_recipe("webagent_r1", overrides=dict(override(quoted or plain) for quoted, plain in given))
    settings = load_recipe("webagent_r1").model_dump()
    for section, key in re.findall(r"`(rollout|train|policy|browser)\.(\w+)", README):
        assert key in settings[section], key
    options = subprocess.run(
        [sys.executable, "recipes/webagent_r1/train_trl.py", "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    used = re.findall(
        r"^(?:bash recipes/quickstart.sh|python recipes/webagent_r1/train_trl.py) .*", README, re.MULTILINE
    )
    for option in set(re.findall(r"--[a-z-]+", " ".join(used))):
        assert f"{option} " in options, option


def test_the_tasks_are_as_many_as_the_page_says():
    assert len(load_recipe("webagent_r1").tasks.names) == 9
    assert "nine MiniWoB++ tasks" in README


def test_the_reward_class_example_scores():
    code = example("class Brisk") + """
from webagent_core.rewards import trl_reward
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory

steps = [Step(url="", observation="", messages=[]) for _ in range(2)]
good = Trajectory("t", 1, "t#1", steps=steps, exit_status=ExitStatus.ANSWERED, reward=1.0)
gone = Trajectory("t", 2, "t#2", exit_status=ExitStatus.ENV_ERROR)
print(trl_reward(Brisk())(trajectory=[good, gone]), good.success)
"""
    assert run(code) == "[0.9, None] True\n"


@pytest.mark.slow
def test_the_trainer_example_trains(tmp_path):
    """With an untrained policy in place of the quickstart's, and two updates."""
    from webagent_core.policy.tiny import build_policy
    from webagent_core.policy.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(["click type select 1 2 3 Task: button page"] * 3)
    tokenizer.save_pretrained(tmp_path / "policy")
    build_policy(tokenizer, seed=0).save_pretrained(tmp_path / "policy")
    code = example("StepGRPOTrainer(")
    for written, here in (
        ('"runs/webagent_r1-paper-seed0/policy"', repr(str(tmp_path / "policy"))),
        ('"my_run"', repr(str(tmp_path / "run"))),
        ("max_steps=5", "max_steps=2"),
        ("logging_steps=1,", "logging_steps=1, save_strategy='no',"),
    ):
        assert code.count(written) == 1
        code = code.replace(written, here)
    code += "\nlogs = [line['trajectories'] for line in trainer.state.log_history if 'loss' in line]"
    code += "\nprint(trainer.state.global_step, logs)"
    printed = run(code, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1").splitlines()
    assert printed[-1] == "2 [16.0, 16.0]"
