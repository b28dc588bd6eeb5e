"""From a recipe's section `reward` to the reward manager, and scoring beside other work."""

from __future__ import annotations

import json
import threading
import time

import pytest

from webagent_core.episode.actions import Action
from webagent_core.episode.trajectory import ExitStatus, FinalPage, Step, Trajectory
from webagent_core.recipe import load_recipe, shipped_recipes
from webagent_core.rewards import JudgeError, Reward, RewardError, RewardManager, Scoring, score_all
from webagent_core.rewards.for_recipe import MANAGERS, plays_for_the_page, rewards_for
from webagent_core.rewards.layers import Mixed
from webagent_core.rewards.local_judge import LocalJudge, read_chat

PAPERS = {
    "webgym": "rubric",
    "asyncwebrl": "rubric",
    "openwebrl": "judge",
    "zerogui": "votes",
    "arpo": "page",
    "uitars2": "mixed",
    "webrl": "outcome_model",
    "webagent_r1": "rules",
    "hiconagent": "gold_step",
    "agentq": "criteria",
}
GOAL = 'Click on the "Ok" button.'


@pytest.fixture
def judge(monkeypatch):
    with LocalJudge() as judge:
        monkeypatch.setenv("OPENAI_BASE_URL", judge.base_url)
        yield judge


def attempt(
    *responses: str | None,
    reward: float = 1.0,
    status=ExitStatus.ANSWERED,
    page: str = "Ok 1 <button>",
    answer: str | None = None,
    seed: int = 0,
) -> Trajectory:
    steps = [
        Step("http://a.test/", page, [], response or "hm", Action("click", element="1") if response else None)
        for response in responses or ("click(1)",)
    ]
    final = FinalPage("http://a.test/", "Thanks", screenshot=b"\xff\xd8\xff final")
    return Trajectory(
        "miniwob/click-button", seed, f"miniwob/click-button#{seed}", GOAL, steps,
        exit_status=status, reward=reward, answer=answer, final=final,
    )  # fmt: skip


def manager(recipe: str = "webagent_r1", profile: str | None = "embedded", **settings):
    settings = {f"reward.{name.replace('__', '.')}": value for name, value in settings.items()}
    return rewards_for(load_recipe(recipe, profile=profile, overrides=settings))


async def rewards(made: RewardManager, *trajectories: Trajectory) -> list[Reward]:
    return await score_all(made, list(trajectories))


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_names_its_papers_reward_and_plays_for_the_page_in_the_embedded_profile(name):
    assert load_recipe(name, profile=None).reward.manager == PAPERS.get(name, load_recipe(name).reward.manager)
    assert load_recipe(name).reward.manager == ("gold_step" if name == "hiconagent" else "page")
    assert set(PAPERS.values()) <= set(MANAGERS)


def test_only_a_plain_page_reward_needs_nobody_to_be_asked():
    plain = {name for name in shipped_recipes() if plays_for_the_page(load_recipe(name))}
    assert plain == set(shipped_recipes()) - {"arpo", "openwebrl", "hiconagent"}


async def test_arpos_format_reward_leaves_the_tasks_outcome_alone():
    tidy, untidy = attempt("click(1)"), attempt(None, "click(1)")
    for preset, value in (("paper", 0.0), ("released", 0.5)):
        made = rewards_for(load_recipe("arpo", preset))
        first, second = await rewards(made, tidy, untidy)
        assert (first.value, second.value, second.outcome) == (1.0, value, 1.0)


async def test_openwebrls_layers_stand_before_the_page_as_before_the_judge(judge):
    spoilt = attempt(None, None, reward=0.0, status=ExitStatus.FORMAT_ERROR)
    unfinished = attempt(reward=0.0, status=ExitStatus.STEP_LIMIT)
    for made in (
        manager("openwebrl"),
        manager("openwebrl", manager="judge", judge__model="rule", judge_vision=False),
    ):
        found = await rewards(made, spoilt, unfinished, attempt())
        assert [each.value for each in found] == [-1.0, 0.0, 1.0]
    assert judge.counts["rule"] == 1


async def test_a_length_penalty_shortens_the_reward_and_not_the_outcome():
    made = manager("uitars2", length_penalty=0.4, length_free=1, length_limit=5)
    short, long, failed = await rewards(made, attempt(), attempt(*["click(1)"] * 5), attempt(reward=0.0))
    assert (short.value, long.value, long.outcome, failed.value) == (1.0, 0.6, 1.0, 0.0)


async def test_the_recipes_votes_are_cast_at_its_temperature(judge):
    (reward,) = await rewards(manager("zerogui", manager="votes", judge__model="rule"), attempt())
    assert (reward.value, judge.counts["rule"], judge.last_request["temperature"]) == (1.0, 4, 1.0)
    changed = manager("zerogui", manager="votes", judge__model="rule", votes=2, vote_temperature=0.3)
    (reward,) = await rewards(changed, attempt(page="Cancel 1 <button>"))
    assert (reward.value, judge.counts["rule"], judge.last_request["temperature"]) == (0.0, 6, 0.3)


async def test_the_page_at_the_end_is_what_the_last_screenshot_shows(judge):
    made = manager("openwebrl", manager="judge", judge__model="rule", judge_screenshots=1)
    await rewards(made, attempt())
    shown = [part for part in judge.last_request["messages"][1]["content"] if part["type"] == "image_url"]
    assert len(shown) == 1
    made = manager("openwebrl", manager="judge", judge__model="rule", judge_screenshots=1, judge_vision=False)
    await rewards(made, attempt())
    _, material = read_chat(judge.last_request["messages"])
    assert material["page 2"] == "Thanks" and "page 1" not in material


async def test_rubrics_come_from_the_facts_by_group_before_task(judge, tmp_path):
    facts = tmp_path / "facts.json"
    facts.write_text(
        json.dumps({"miniwob/click-button": ['It says "Thanks"'], "miniwob/click-button#7": ['It says "Sorry"']})
    )
    chosen = {"manager": "rubric", "facts": str(facts), "judge__model": "rule", "judge_vision": False}
    recipe = load_recipe(
        "webgym",
        overrides={f"reward.{name.replace('__', '.')}": value for name, value in chosen.items()}
        | {"tasks.names": ["miniwob/click-button"]},
    )
    found = await rewards(rewards_for(recipe), attempt(), attempt(seed=7))
    assert [each.value for each in found] == [1.0, 0.0]


async def test_rules_and_votes_count_as_the_preset_says(judge, tmp_path):
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"miniwob/click-button": {"reference_answers": {"must_include": ["12"]}}}))
    rules = {"reward.facts": str(facts), "reward.manager": "rules", "tasks.names": ["miniwob/click-button"]}
    votes = {"reward.manager": "votes", "reward.judge.model": "rule", "reward.judge.attempts": 1}
    for preset, loophole, one_unread in (("paper", 0.0, None), ("released", 1.0, 1.0)):
        ruled = rewards_for(load_recipe("webagent_r1", preset, overrides=rules))
        assert [each.value for each in await rewards(ruled, attempt(answer="112"))] == [loophole]
        judge.faults.append("prose")
        voted = rewards_for(load_recipe("zerogui", preset, overrides=votes))
        assert [each.value for each in await rewards(voted, attempt())] == [one_unread]


async def test_mixed_scores_each_task_by_what_there_is_for_it():
    class Says(RewardManager):
        def __init__(self, value):
            self.value = value

        def score(self, trajectory):
            return self.value

    facts = {"miniwob/click-button#1": "42", "miniwob/click-button#2": None}
    made = Mixed(facts, program=Says(0.1), reference=Says(0.2), outcome_model=Says(0.3))
    found = await rewards(made, attempt(seed=0), attempt(seed=1), attempt(seed=2))
    assert [each.value for each in found] == [0.1, 0.2, 0.3]
    with pytest.raises(RewardError, match="nothing is there to score it with"):
        await rewards(Mixed(facts, program=Says(0.1)), attempt(seed=2))


async def test_mixed_builds_the_judge_only_where_a_task_has_a_reference(judge, tmp_path):
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"miniwob/click-button#1": "42"}))
    made = manager("uitars2", manager="mixed", facts=str(facts), judge__model="rule")
    found = await rewards(made, attempt(), attempt(seed=1, answer="It is 42."), attempt(seed=1, answer="41"))
    assert [each.value for each in found] == [1.0, 1.0, 0.0]
    assert judge.counts["rule"] == 2


class Own(RewardManager):
    def score(self, trajectory):
        return 0.25


async def test_a_class_of_ones_own_is_named_by_module_and_class():
    (reward,) = await rewards(manager(manager="test_rewards_for_recipe:Own"), attempt())
    assert reward.value == 0.25
    for name in ("test_rewards_for_recipe:Missing", "no_such_module:Own", "json:loads", "pathlib:Path"):
        with pytest.raises(ValueError, match=f"reward.manager = '{name}'"):
            manager(manager=name)


# ------------------------------------------------------------------------------------------------ scoring


def test_scoring_starts_when_an_episode_ends_and_nobody_waits_for_it():
    release, begun = threading.Event(), threading.Event()

    class Slow(RewardManager):
        def score(self, trajectory):  # as blocking as a class can be
            begun.set()
            release.wait(10)
            if trajectory.seed == 1:
                raise JudgeError("busy", [{"said": "?"}])
            return trajectory.seed

    scoring, attempts = Scoring(Slow()), [attempt(seed=seed) for seed in range(3)]
    started = time.monotonic()
    for each in attempts[:2]:
        scoring.submit(each)
    assert time.monotonic() - started < 1 and begun.wait(10)
    release.set()
    found = scoring.finish(attempts)
    assert [each.value for each in found] == [0.0, None, 2.0]
    assert [each.exit_status for each in attempts] == ["answered", "judge_error", "answered"]
    assert [each.reward for each in attempts] == [0.0, None, 2.0] and attempts[1].evidence == [{"said": "?"}]
    assert [each.success for each in attempts] == [False, False, True]


def test_scoring_ends_with_the_first_mistake():
    class Wrong(RewardManager):
        def score(self, trajectory):
            return None

    with pytest.raises(RewardError, match=r"Wrong\.score of miniwob/click-button \(seed 4\) returned None"):
        Scoring(Wrong()).finish([attempt(seed=4)])
    with pytest.raises(ValueError, match="concurrency = 0"):
        Scoring(Wrong(), concurrency=0)
