"""The class that users override, and the driver that holds them to what they may return."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from webagent_core.episode.actions import Action
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.rewards import JudgeError, Reward, RewardError, RewardManager, record, score_all, trl_reward
from webagent_core.rewards.counts import form_counts, reward_metrics
from webagent_core.rewards.layers import Layered, LengthPenalty, WithFormat
from webagent_core.rewards.rules import EnvironmentReward, GoldStepReward, step_score, token_f1


def attempt(
    seed: int = 0, status: ExitStatus = ExitStatus.ANSWERED, reward: float | None = 1.0, **fields
) -> Trajectory:
    steps = fields.pop("steps", [step("Action: stop()", Action("stop", answer=""))])
    return Trajectory("site/buy", seed, f"site/buy#{seed}", exit_status=status, reward=reward, steps=steps, **fields)


def step(response: str = "", action: Action | None = None, **fields) -> Step:
    return Step(url="http://a.test/", observation="", messages=[], response=response, action=action, **fields)


class Constant(RewardManager):
    def __init__(self, result):
        self.result = result

    def score(self, trajectory):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


async def only(manager: RewardManager, trajectory: Trajectory | None = None) -> Reward:
    return (await score_all(manager, [trajectory or attempt()]))[0]


@pytest.mark.parametrize(
    "result", [math.nan, math.inf, None, "1.0", True, [1.0], np.float32("nan"), np.bool_(True), Reward, 1j]
)
async def test_what_is_no_reward_is_an_error_that_names_class_task_and_seed(result):
    with pytest.raises(RewardError, match=r"Constant\.score of site/buy \(seed 7\) returned .*allowed is"):
        await only(Constant(result), attempt(seed=7))


@pytest.mark.parametrize(("result", "value"), [(1, 1.0), (-0.5, -0.5), (np.float32(0.25), 0.25), (Reward(2), 2.0)])
async def test_a_plain_number_is_a_reward(result, value):
    assert await only(Constant(result)) == Reward(value)


async def test_a_mistake_of_the_class_ends_the_run_and_is_named():
    with pytest.raises(RewardError, match=r"Constant\.score of site/buy \(seed 3\) raised KeyError: 'x'") as caught:
        await only(Constant(KeyError("x")), attempt(seed=3))
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_mistake_inside_a_wrapped_manager_names_the_inner_class():
    with pytest.raises(RewardError, match=r"^Constant\.score"):
        await only(WithFormat(Constant("no")))


async def test_a_class_without_score_says_what_to_override():
    with pytest.raises(RewardError, match="override score"):
        await only(RewardManager())


@pytest.mark.parametrize(
    "error", [JudgeError("busy", [{"said": "?"}]), ConnectionResetError("gone"), TimeoutError("slow")]
)
async def test_a_judge_that_fails_makes_the_trajectory_invalid(error):
    reward = await only(Constant(error))
    assert (reward.value, reward.invalid) == (None, ExitStatus.JUDGE_ERROR)
    assert str(error) in reward.reasons[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"value": 1.0, "invalid": "judge_error"},
        {"invalid": "answered"},
        {"value": math.nan},
        {"value": 1.0, "outcome": math.inf},
        {"value": 1.0, "outcome": True},
    ],
)
def test_a_reward_is_a_number_or_a_reason(fields):
    with pytest.raises(ValueError, match="(value|invalid|outcome) = "):
        Reward(**fields)


async def test_what_no_policy_caused_is_not_scored():
    class Never(RewardManager):
        def score(self, trajectory):
            raise AssertionError("asked")

    broken = [attempt(status=status, reward=None) for status in ("env_error", "judge_error", "cancelled")]
    rewards = await score_all(Never(), broken)
    assert [reward.invalid for reward in rewards] == ["env_error", "judge_error", "cancelled"]


async def test_order_is_kept_and_concurrency_is_bounded():
    running, most = 0, 0

    class Slow(RewardManager):
        async def score(self, trajectory):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001 * (trajectory.seed % 3))
            running -= 1
            return trajectory.seed

    attempts = [attempt(seed) for seed in range(50)]
    rewards = await score_all(Slow(), attempts, concurrency=5)
    assert [reward.value for reward in rewards] == list(range(50))
    assert most == 5


async def test_the_others_are_stopped_when_one_is_a_mistake():
    ended = []

    class Mixed(RewardManager):
        async def score(self, trajectory):
            if trajectory.seed == 0:
                return "wrong"
            await asyncio.sleep(30)
            ended.append(trajectory.seed)

    with pytest.raises(RewardError):
        await score_all(Mixed(), [attempt(seed) for seed in range(4)])
    assert ended == []


async def test_no_trajectories_and_no_concurrency():
    assert await score_all(Constant(1), []) == []
    with pytest.raises(ValueError, match="concurrency = 0"):
        await score_all(Constant(1), [attempt()], concurrency=0)


async def test_rewards_are_recorded_in_the_trajectories():
    good, bad = attempt(reward=0.0), attempt(reward=0.0, detail="page closed")
    record([good, bad], [Reward(1, evidence=({"said": "yes"},)), Reward(invalid="judge_error", reasons=("busy",))])
    assert (good.success, good.evidence, good.exit_status) == (True, [{"said": "yes"}], ExitStatus.ANSWERED)
    assert (bad.valid, bad.exit_status, bad.detail) == (False, ExitStatus.JUDGE_ERROR, "busy")


async def test_success_is_of_the_outcome_where_the_reward_holds_more():
    spoilt = [attempt(steps=[step("?")], reward=reward) for reward in (1.0, 0.0)]
    rewards = await score_all(WithFormat(EnvironmentReward()), spoilt)
    record(spoilt, rewards)
    assert [(each.reward, each.score, each.success) for each in spoilt] == [(0.0, 1.0, True), (-1.0, 0.0, False)]
    record(spoilt, [Reward(1.0), Reward(invalid="judge_error")])
    assert [(each.score, each.success) for each in spoilt] == [(1.0, True), (None, False)]


def test_trl_takes_a_manager_as_a_reward_function():
    class Odd(RewardManager):
        async def score(self, trajectory):
            if trajectory.seed == 2:
                raise JudgeError("busy")
            return trajectory.seed % 2

    reward = trl_reward(Odd())
    batch = [attempt(seed) for seed in range(4)]
    assert reward(trajectory=batch, prompts=["p"] * 4, completions=["c"] * 4) == [0.0, 1.0, None, 1.0]
    assert reward(trajectory=batch[:1]) == [0.0]
    assert reward.__name__ == "Odd"
    assert batch[2].exit_status is ExitStatus.JUDGE_ERROR


# ------------------------------------------------------------------------------------------------ layers


async def test_the_environments_reward_stands_and_a_missing_one_is_a_mistake():
    assert (await only(EnvironmentReward(), attempt(reward=0.0))).value == 0.0
    with pytest.raises(RewardError, match="gave no reward"):
        await only(EnvironmentReward(), attempt(reward=None))


async def test_the_first_layer_with_something_to_say_decides():
    def no_answer(trajectory):
        return 0.0 if trajectory.answer is None else None

    layered = Layered(no_answer, last=Constant(1.0))
    assert (await only(layered, attempt())).value == 0.0
    assert (await only(layered, attempt(answer="42"))).value == 1.0


@pytest.mark.parametrize(("weight", "value"), [(1.0, 0.0), (0.5, 0.5)])
async def test_format_adds_its_penalty_once(weight, value):
    spoilt = attempt(steps=[step("?"), step("?"), step("", Action("back"))])
    assert (await only(WithFormat(Constant(1.0), weight=weight), spoilt)).value == value
    assert (await only(WithFormat(Constant(1.0), weight=weight))).value == 1.0


@pytest.mark.parametrize(("steps", "value"), [(2, 1.0), (4, 0.75), (6, 0.5), (9, 0.5)])
async def test_length_costs_between_free_and_limit(steps, value):
    long = attempt(steps=[step("", Action("back"))] * steps)
    assert (await only(LengthPenalty(Constant(1.0), free=2, limit=6), long)).value == value
    assert (await only(LengthPenalty(Constant(0.0), free=2, limit=6), long)).value == 0.0


async def test_an_invalid_part_makes_the_whole_invalid():
    for wrap in (WithFormat, lambda inner: LengthPenalty(inner, free=0, limit=1), lambda inner: Layered(last=inner)):
        assert (await only(wrap(Constant(JudgeError("busy"))), attempt(steps=[step("?")]))).invalid == "judge_error"


@pytest.mark.parametrize(
    "bad", [{"free": 3, "limit": 3}, {"free": 0, "limit": 1, "of": "words"}, {"free": 0, "limit": 1, "most": -1}]
)
def test_a_length_penalty_that_makes_no_sense_is_named(bad):
    with pytest.raises(ValueError, match="not allowed"):
        LengthPenalty(Constant(1.0), **bad)


def test_form_is_counted_step_by_step():
    steps = [step("?"), step("", Action("back"), error="no earlier page"), step("?"), step("?", response_ids=[1, 2])]
    untidy = attempt(steps=steps)
    counts = form_counts(untidy)
    assert (counts.steps, counts.format_errors, counts.failed_actions, counts.response_tokens) == (4, 3, 1, 2)
    assert reward_metrics([untidy, attempt(), untidy]) == {"format_errors": 6, "failed_actions": 2}
    assert reward_metrics([]) == {"format_errors": 0, "failed_actions": 0}


# ------------------------------------------------------------------------------------------------ gold steps


def test_token_f1_is_over_multisets():
    assert token_f1("a a b", "a b b") == pytest.approx(2 * 2 / 6)
    assert token_f1("Red, apple", "red apple") == 1.0
    assert token_f1("", "") == 1.0
    assert token_f1("", "x") == 0.0


@pytest.mark.parametrize(
    ("predicted", "gold", "parts"),
    [
        (None, Action("back"), (0, 0, 0)),
        (Action("back"), Action("stop", answer=""), (1, 0, 0)),
        (Action("back"), Action("back"), (1, 1, 1)),
        (Action("click", x=500, y=500), Action("click", x=500, y=500), (1, 1, 1)),
        (Action("click", x=300, y=400), Action("click", x=0, y=0), (1, 1, 0.5)),
        (Action("click", x=1000, y=1000), Action("click", x=0, y=0), (1, 1, 0)),
        (Action("click", element="7"), Action("click", x=0, y=0), (1, 1, 0)),
        (Action("click", element="7"), Action("click", element="7"), (1, 1, 1)),
        (Action("click", element="8"), Action("click", element="7"), (1, 1, 0)),
        (Action("type", text="red apple"), Action("type", text="red apple pie"), (1, 1, 1)),
        (Action("type", text="red"), Action("type", text="red apple pie"), (1, 1, 0)),  # F1 = 0.5 is not above 0.5
        (Action("scroll", direction="up"), Action("scroll", direction="down"), (1, 1, 0)),
        (Action("type", element="8", text="red"), Action("type", element="7", text="red"), (1, 1, 0)),
    ],
)
def test_a_step_is_scored_by_format_type_and_value(predicted, gold, parts):
    assert step_score(predicted, gold) == pytest.approx(parts)


async def test_gold_steps_are_scored_from_responses_with_the_papers_and_the_released_weights():
    gold = {"site/buy": Action("click", element="7")}
    right, wrong = attempt(steps=[step("Action: click(7)")]), attempt(steps=[step("Action: click(8)")])
    nothing = attempt(steps=[step("I do not know")])
    paper = await score_all(GoldStepReward(gold), [right, wrong, nothing])
    released = await score_all(GoldStepReward(gold, weights=(0.5, 0.5, 0.5)), [right, wrong, nothing])
    assert [reward.value for reward in paper] == [3.0, 2.0, 0.0]
    assert [reward.value for reward in released] == [1.5, 1.0, 0.0]


async def test_a_gold_step_is_wanted_for_every_task_and_one_step_a_trajectory():
    with pytest.raises(RewardError, match="gold action: none for task 'site/buy'"):
        await only(GoldStepReward({}))
    with pytest.raises(RewardError, match="2 steps, allowed is 1"):
        await only(GoldStepReward({"site/buy": Action("back")}), attempt(steps=[step(), step()]))
