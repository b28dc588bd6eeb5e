"""What tests of rewards in real runs share, whichever trainer plays them."""

from __future__ import annotations

import re
import shlex
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from test_readme import README, example
from toy_policy import random_policy

from webagent_core.rewards import RewardManager

NO_VERDICT = ("http_500", "hang", "truncated_json", "prose", "empty_body")


@pytest.fixture(scope="module")
def untrained_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one that has learnt nothing, for runs where it does not matter how good it is."""
    return random_policy(tmp_path_factory.mktemp("policy"), ["click type select stop 1 2 3 Task: button page ok"])


def readme_class(folder: Path, script: str) -> list[str]:
    """Writes README's reward class where its commands look for it, and gives the arguments of the one for `script`."""
    code = example("class Brisk")
    (folder / "my_rewards.py").write_text(code)
    commands = re.search(r"```bash\n(export PYTHONPATH=\.\s.*?)```", README[README.index(code) :], re.DOTALL)[1]
    (arguments,) = re.findall(rf"(?m)^(?:python|bash) recipes/webagent_r1/{re.escape(script)} (.*)$", commands)
    return shlex.split(arguments)


class Raises(RewardManager):
    def score(self, trajectory):
        return {}[trajectory.task]


class NotANumber(RewardManager):
    def score(self, trajectory):
        return float("nan")


class Nothing(RewardManager):
    async def score(self, trajectory):
        return None


class Text(RewardManager):
    def score(self, trajectory):
        return "1.0"


WRONG = [
    ("Raises", "raised KeyError: 'miniwob/"),
    ("NotANumber", "returned nan, allowed is a finite number or a Reward"),
    ("Nothing", "returned None, allowed is a finite number or a Reward"),
    ("Text", "returned '1.0', allowed is a finite number or a Reward"),
]


def check_named(stderr: str, name: str, said: str) -> None:
    """Class, task and seed stand in what a run that ended said last."""
    named = rf"{name}\.score of miniwob/[\w-]+ \(seed \d+\) {re.escape(said)}"
    assert re.search(named, stderr.strip().splitlines()[-1]), stderr[-2000:]


def check_rewards_are_verdicts(trained: list[dict], asked: Counter[str]) -> list[dict]:
    """With one attempt a question: each request without a verdict is an invalid trajectory, and each reward is what the
    judge said in so many words.

    Args:
        trained: the lines of the run's trajectories.jsonl that it trained on.
        asked: what the judge did to the requests, `LocalJudge.counts`.

    Returns:
        the lines without a verdict.
    """
    assert all(asked[fault] for fault in (*NO_VERDICT, "not_success", "rule")), asked
    failed = [line for line in trained if line["exit_status"] == "judge_error"]
    assert len(failed) == sum(asked[fault] for fault in NO_VERDICT)
    for line in failed:
        assert line["reward"] is None and line["advantage"] is None and not line["valid"]
        assert line["evidence"] and "no verdict" in line["detail"]
    judged = [line for line in trained if line["valid"]]
    assert len(judged) == asked["rule"] + asked["not_success"]
    for line in judged:
        (reply,) = line["evidence"]
        assert line["reward"] == (0.0 if reply["text"].endswith("Verdict: NOT SUCCESS") else 1.0)
    return failed


def check_baselines(trained: list[dict]) -> None:
    """Advantages are z-scores over the valid members of each group; a group without two has none."""
    groups = defaultdict(list)
    for line in trained:
        groups[line["update"], line["group"]].append(line)
    for members in groups.values():
        valid = [line for line in members if line["valid"]]
        if len(valid) < 2:
            assert all(line["advantage"] is None for line in members)
            continue
        rewards = [line["reward"] for line in valid]
        spread = statistics.stdev(rewards)
        expected = [(reward - statistics.mean(rewards)) / spread if spread else 0.0 for reward in rewards]
        assert [line["advantage"] for line in valid] == pytest.approx(expected, abs=1e-5)


def check_counted(trained: list[dict], metrics: dict[int, dict]) -> None:
    """The metrics of each update agree with its trajectories: what was asked, what failed, who succeeded."""
    for update, line in metrics.items():
        mine = [each for each in trained if each["update"] == update]
        valid = [each for each in mine if each["valid"]]
        assert line["trajectories"] == len(mine) and line["invalid"] == len(mine) - len(valid)
        assert line["exit_status/judge_error"] == sum(each["exit_status"] == "judge_error" for each in mine)
        assert line["judge/requests"] == sum(bool(each["evidence"]) for each in mine)
        assert line["success"] == pytest.approx(sum(each["success"] for each in valid) / len(valid))
