"""Rewards inside real training runs on TRL: a judge that fails in every way, README's own class, wrong classes.

The same on verl is in test_verl_run.py.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
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
from test_run_trl import lines, start, updates_done, wait_for

from trl_webagent.command_line import main
from webagent_core.recipe import load_recipe
from webagent_core.rewards.for_recipe import check_rewards
from webagent_core.rewards.local_judge import LocalJudge

TESTS = Path(__file__).parent
RECIPE = TESTS.parent / "recipes" / "webagent_r1"
PATIENCE = 3600  # seconds: the machine may have more to do
TIMEOUT = 8  # seconds that the judge has for an answer
IN_TURN = [fault for each in (*NO_VERDICT, "not_success") for fault in (each, "")]  # "": an answer between them


__all__ = ["untrained_policy"]  # a fixture of this module too


def begin(out: Path, policy: Path, *arguments: str, **changed) -> subprocess.Popen:
    """A run of three groups of six an update."""
    settings = {"policy.model": policy, "policy.warm_up": "null", "rollout.groups_per_update": 3,
                "train.updates": 1, "train.eval_every": 0}  # fmt: skip
    return start(out, policy, *arguments, **(settings | changed))


def finish(run: subprocess.Popen) -> str:
    stdout, stderr = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, stderr[-3000:]
    return stdout


@pytest.mark.slow
def test_no_failure_of_the_judge_is_ever_a_reward_and_the_run_goes_on(tmp_path, untrained_policy, monkeypatch):
    """The judge is well in update 1, fails in turn in 2 and 3, and is well again from 4 on."""
    verdicts = itertools.cycle(["Verdict: SUCCESS", "Verdict: NOT SUCCESS", "Verdict: SUCCESS"])
    monkeypatch.setattr("webagent_core.rewards.local_judge.judge", lambda _: next(verdicts))
    out = tmp_path / "run"
    with LocalJudge() as judge:
        settings = {"base_url": judge.base_url, "model": "m", "attempts": 1, "concurrency": 1}
        asked = {f"reward.judge.{name}": value for name, value in settings.items()}
        asked["reward.judge.timeout_seconds"] = TIMEOUT
        run = begin(out, untrained_policy, **asked, **{"reward.manager": "judge", "train.updates": 6})
        wait_for(run, lambda: updates_done(out) >= 1, PATIENCE)
        judge.faults.extend(IN_TURN * 100)
        wait_for(run, lambda: updates_done(out) >= 3, PATIENCE)
        judge.faults.clear()
        stdout = finish(run)
        counts = judge.counts
    assert "success on held-out seeds: " in stdout.splitlines()[-1]

    trained = [line for line in lines(out, "trajectories") if line["phase"] == "train"]
    metrics = {line["update"]: line for line in lines(out, "metrics") if line["phase"] == "train"}
    failed = check_rewards_are_verdicts(trained, counts)
    check_baselines(trained)
    check_counted(trained, metrics)
    assert sorted(metrics) == [1, 2, 3, 4, 5, 6]
    assert {2, 3} <= {line["update"] for line in failed} <= {2, 3, 4}
    for update, line in metrics.items():  # no row of a failed one, nor of a group without a baseline, was trained on
        with_baseline = [each for each in trained if each["update"] == update and each["advantage"] is not None]
        assert line["rows"] == sum(len(each["steps"]) for each in with_baseline)
    assert max(metrics[update]["judge/longest_seconds"] for update in (2, 3)) >= TIMEOUT
    # Well again, the judge gives every trajectory its verdict at once, and nobody waits for one.
    for update in (5, 6):
        line = metrics[update]
        assert line["invalid"] == line["judge/failed_requests"] == 0 and line["judge/requests"] == 18
        assert line["judge/longest_seconds"] < TIMEOUT / 2 and line["seconds"]["rewards"] < TIMEOUT / 2
    report = (out / "report.html").read_text("utf-8")
    assert "judge_error" in report and "HTTP 500" in report  # what the judge did is there to be read


@pytest.mark.slow
def test_the_class_that_readme_shows_trains_by_the_command_that_it_shows(tmp_path, untrained_policy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", str(TESTS.parent)]))
    out = tmp_path / "run"
    finish(begin(out, untrained_policy, *readme_class(tmp_path, "train_trl.py")))
    trajectories = lines(out, "trajectories")
    assert {line["phase"] for line in trajectories} == {"before", "train", "after"}
    for line in trajectories:
        paid = line["reward"] + (0.05 * len(line["steps"]) if line["phase"] == "train" else 0)
        assert paid == pytest.approx(1.0 if line["success"] else 0.0)
    assert max(len(line["steps"]) for line in trajectories) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), WRONG)
def test_a_class_that_is_wrong_ends_the_run_and_is_named_with_the_trajectory(
    tmp_path, untrained_policy, monkeypatch, name, said
):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    run = begin(tmp_path / "run", untrained_policy, **{"reward.manager": f"reward_runs:{name}"})
    _, stderr = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1
    check_named(stderr, name, said)


REFUSED = {
    "no judge": (["reward.manager=votes"], ["'votes'", "reward.judge.base_url", "$OPENAI_BASE_URL"]),
    "no model": (
        ["reward.manager=votes", "reward.judge.base_url=http://127.0.0.1:1/v1"],
        ["reward.judge.model is not set"],
    ),
    "no address": (["reward.judge.base_url=judge.test"], ["reward.judge.base_url = 'judge.test'", "http(s)://"]),
    "no key": (
        ["reward.manager=criteria", "reward.judge.base_url=https://judge.test/v1", "reward.judge.model=m",
         "reward.judge.api_key_env=NO_SUCH_KEY"],
        ["reward.judge.api_key_env = 'NO_SUCH_KEY'", "null"],
    ),
    "unknown": (["reward.manager=vote"], ["reward.manager = 'vote'", "votes", "package.module:Class"]),
    "no class": (["reward.manager=reward_runs:Missing"], ["'reward_runs:Missing'", "package.module:Class"]),
    "no manager": (["reward.manager=json:JSONDecoder"], ["'json:JSONDecoder'", "subclass of"]),
    "no facts": (["reward.manager=rubric"], ["'rubric'", "reward.facts"]),
    "no file": (["reward.manager=rules", "reward.facts=no.json"], ["reward.facts = 'no.json'", "no such file"]),
    "no model folder": (["reward.manager=outcome_model"], ["reward.outcome_model", "train_outcome_model"]),
    "no recorded steps": (["reward.manager=gold_step"], ["'gold_step'", "hiconagent"]),
    "no room": (["reward.length_penalty=0.5", "reward.length_free=8"], ["reward.length_free = 8", "8 steps"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_reward_that_cannot_be_had_is_refused_in_one_line_before_a_browser_starts(case, tmp_path, monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "NO_SUCH_KEY"):
        monkeypatch.delenv(name, raising=False)
    settings, named = REFUSED[case]
    arguments = [part for setting in settings for part in ("--set", setting)]
    with pytest.raises(SystemExit) as refused:
        main(RECIPE, ["--smoke", *arguments, "--out", str(tmp_path / "run")])
    said = refused.value.code
    assert isinstance(said, str) and said.startswith("error: ") and "\n" not in said
    for part in named:
        assert part in said
    assert not (tmp_path / "run").exists()


def test_facts_must_cover_every_task(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    facts = tmp_path / "facts.json"
    chosen = {"reward.manager": "rubric", "reward.judge.model": "rule", "reward.facts": str(facts)}
    facts.write_text(json.dumps({"miniwob/click-tab": ["The tab is open"], "miniwob/click-link#3": ["It is followed"]}))
    with pytest.raises(ValueError, match="says nothing of task 'miniwob/click-button'"):
        check_rewards(load_recipe("webagent_r1", overrides=chosen))
    check_rewards(
        load_recipe("webagent_r1", overrides=chosen | {"tasks.names": ["miniwob/click-tab", "miniwob/click-link"]})
    )
    for damage in ("[]", "{", '"x"'):
        facts.write_text(damage)
        with pytest.raises(ValueError, match="reward.facts = "):
            check_rewards(load_recipe("webagent_r1", overrides=chosen))
