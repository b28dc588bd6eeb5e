"""Replay: what is kept, when it is offered, which steps are taken, and that all of it survives a checkpoint."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from webagent_core.episode.actions import Action
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.objectives import TrajectoryFacts, evaluate, load_objective
from webagent_core.recipe import load_recipe
from webagent_core.sampling.replay import PerplexityReplay, RecentReplay, SuccessReplay, perplexity
from webagent_core.sampling.rows import choose_rows, draw_single_steps, keep_rows, weighted_choice
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.stored import Stored, record_of, store, trajectory_of

torch.set_num_threads(1)

CASES = json.loads((Path(__file__).parent / "cases" / "replay.json").read_text())


def of_method(method):
    found = [case for case in CASES if case["input"]["method"] == method]
    assert found
    return [pytest.param(case["input"], case["expected"], id=f"{case['id']}-{case['kind']}") for case in found]


def through_a_file(state):
    """A state as another process would read it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("given", "expected"), [c for c in of_method("arpo") if "task" in c.values[0]])
def test_arpo_cases(given, expected):
    recipe = load_recipe("arpo", overrides={"objective.replay": given.get("enable_replay", True)})
    buffer = Sampling(recipe).replay
    outcomes = given["task_rewards"]
    if not given.get("enable_replay", True):
        assert buffer is None
        offered = None
    else:
        for task, entries in given["buffer"].items():
            for entry in entries:
                buffer.add(Stored(entry["id"], task, 0, entry["reward"]))
        offered = buffer.offer(given["task"], outcomes)
    assert (offered and offered.id) == expected["inject"]

    # The group as the objective makes it, with the offer beside its own members.
    rewards = given.get("total_rewards", outcomes)
    facts = [
        TrajectoryFacts("t1", reward, outcome is not None, [1], outcome=outcome)
        for reward, outcome in zip(rewards, outcomes, strict=True)
    ]
    stored = [TrajectoryFacts("t1", offered.outcome, True, [1], stored=True)] if offered else []
    plan = recipe.load_objective().plan(facts + stored)
    replaced = [i for i, each in enumerate(plan.trajectories) if each.dropped == "replaced"]
    assert len(replaced) == expected.get("replaced", 1 if expected["inject"] else 0)
    assert all(facts[i].valid for i in replaced)
    if expected["inject"]:
        assert plan.trajectories[-1].advantage > 0
        assert sum(each.kept for each in plan.trajectories) == expected.get("group_size", plan_size(outcomes))


def plan_size(outcomes):
    return sum(outcome is not None for outcome in outcomes)


@pytest.mark.parametrize(("given", "expected"), of_method("arpo_buffer"))
def test_arpo_buffer_cases(given, expected):
    buffer = SuccessReplay(given["capacity"])
    for task, name, outcome in given["adds"]:
        buffer.add(Stored(name, task, 0, outcome))
    if given.get("then"):
        state = through_a_file(buffer.state_dict())
        buffer = SuccessReplay(given["capacity"])
        buffer.load_state_dict(state)
    assert {task: [entry.id for entry in kept] for task, kept in buffer.tasks.items()} == expected


@pytest.mark.parametrize(("given", "expected"), [c for c in of_method("arpo") if "logp_now" in c.values[0]])
def test_the_ratio_of_a_replayed_row_begins_at_1(given, expected):
    with pytest.raises(ValueError, match="computed anew"):  # a buffer takes no log-probability of an earlier policy
        Stored("old", "t1", 0, 1.0, data={"old_logp": given["stored_logp_old"]})
    now = torch.tensor(given["logp_now"], dtype=torch.float64, requires_grad=True)
    fresh = {"logp": torch.zeros(1, dtype=torch.float64), "old_logp": torch.zeros(1, dtype=torch.float64)}
    result = evaluate(
        "arpo",
        trajectories=[
            {"group": "t1", "reward": 0, "steps": [fresh]},
            {"group": "t1", "reward": 0, "steps": [fresh]},
            {"group": "t1", "reward": 1, "stored": True, "steps": [{"logp": now}]},
        ],
    )
    ratio = result.metrics["ratio"]
    assert float(ratio.sum / ratio.count) == pytest.approx(1.0, abs=expected["tol"])
    result.loss.backward()
    assert (now.grad < 0).all()  # it is pulled up


@pytest.mark.parametrize(("given", "expected"), of_method("webrl"))
def test_webrl_cases(given, expected):
    buffer = PerplexityReplay.of(load_recipe("webrl"))
    for index, outcome in enumerate(given["outcomes"]):
        buffer.add(Stored(str(index), "t", 0, outcome))
    chosen = buffer.choose(given["n_current_actions"], lambda entries: [[p] for p in given["perplexities"]])
    assert [int(each.entry.id) for each in chosen] == expected["eligible"]
    assert buffer.most(given["n_current_actions"]) == expected["max_taken"]


# ---------------------------------------------------------------------------------------------------- the cases' kinds

SOME = settings(max_examples=150, deadline=None)
members = st.lists(st.none() | st.sampled_from([0.0, 1.0, 0.5]), min_size=1, max_size=8)


@SOME
@given(members, st.sets(st.sampled_from(["t1", "t2"])), st.booleans(), st.integers(0, 9))
def test_a_group_gets_one_success_of_its_task_exactly_when_all_its_valid_members_failed(outcomes, stored, on, seed):
    recipe = load_recipe("arpo", overrides={"objective.replay": on, "train.seed": seed})
    buffer = Sampling(recipe).replay
    assert (buffer is not None) == on
    for task in sorted(stored) if on else ():
        buffer.add(Stored(f"of {task}", task, 0, 1.0))
    offered = buffer.offer("t1", outcomes) if on else None
    valid = [outcome for outcome in outcomes if outcome is not None]
    assert (offered is not None) == (on and "t1" in stored and bool(valid) and max(valid) < 1)
    assert offered is None or offered.id == "of t1"

    # A penalty on the format makes a reward lower and decides nothing.
    facts = [
        TrajectoryFacts("t1", None if o is None else o - index % 2, o is not None, [1], outcome=o)
        for index, o in enumerate(outcomes)
    ]
    joins = [TrajectoryFacts("t1", 1.0, True, [1], outcome=1.0, stored=True)] if offered else []
    plan = recipe.load_objective().plan(facts + joins)
    replaced = [fact for fact, each in zip(facts, plan.trajectories, strict=False) if each.dropped == "replaced"]
    assert len(replaced) == len(joins) and all(fact.valid for fact in replaced)
    assert sum(each.kept for each in plan.trajectories) in (len(valid), 0)  # one left has no group, nor has a lone one


@SOME
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.floats(0.01, 1.0)), max_size=12),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.floats(0, 3),
    st.integers(0, 5),
)
def test_replayed_actions_are_of_successes_within_the_window_and_at_most_so_many(stored, one, other, ratio, new):
    low, high = sorted((one, other))
    buffer = PerplexityReplay(low, high, ratio)
    for number, (outcome, _) in enumerate(stored):
        buffer.add(Stored(str(number), "t", 0, outcome))
    probabilities = {str(number): probability for number, (_, probability) in enumerate(stored)}
    chosen = buffer.choose(new, lambda entries: [[1 / probabilities[entry.id]] for entry in entries])
    eligible = {
        str(number)
        for number, (outcome, probability) in enumerate(stored)
        if outcome == 1 and low * (1 - 1e-9) <= probability <= high * (1 + 1e-9)
    }
    taken = {each.entry.id for each in chosen}
    assert taken <= eligible and len(taken) == min(len(eligible), math.floor(ratio * new))


# ---------------------------------------------------------------------------------------------------- ARPO


def test_failures_are_never_kept_and_tasks_do_not_mix():
    buffer = SuccessReplay(2)
    assert not buffer.add(Stored("a", "t1", 0, 0.0))
    assert not buffer.add(Stored("b", "t1", 0, 0.99))
    assert buffer.offer("t1", [0, 0]) is None
    buffer.add(Stored("c", "t2", 0, 1.0))
    assert buffer.offer("t1", [0, 0]) is None
    assert buffer.offer("t2", [0, 0]).id == "c"


def test_an_all_invalid_group_is_no_evidence_of_failure():
    buffer = SuccessReplay(2)
    buffer.add(Stored("a", "t", 0, 1.0))
    assert buffer.offer("t", [None, None]) is None
    assert buffer.offer("t", []) is None
    assert buffer.offer("t", [None, 0]).id == "a"


def test_the_released_rule_looks_at_mean_and_spread():
    released = SuccessReplay.of(load_recipe("arpo", "released"))
    paper = SuccessReplay.of(load_recipe("arpo"))
    for buffer in (released, paper):
        buffer.add(Stored("a", "t", 0, 1.0))
    half_done = [0.5, 0.5, 0.5]
    assert paper.offer("t", half_done) is not None  # no success among them
    assert released.offer("t", half_done) is None  # their mean is not below 0.2
    assert paper.capacity == released.capacity == 8


def test_the_draw_among_several_is_seeded_and_goes_on_after_a_checkpoint():
    def filled(seed):
        buffer = SuccessReplay(8, seed=seed)
        for i in range(8):
            buffer.add(Stored(str(i), "t", i, 1.0))
        return buffer

    def draws(buffer, count=20):
        return [buffer.offer("t", [0, 0]).id for _ in range(count)]

    whole = draws(filled(0), 40)
    assert whole == draws(filled(0), 40) != draws(filled(1), 40)
    assert len(set(whole)) > 4
    first = filled(0)
    draws(first)
    second = SuccessReplay(8)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert draws(second) == whole[20:]


def test_a_smaller_capacity_on_resume_keeps_the_newest():
    buffer = SuccessReplay(3)
    for i in range(3):
        buffer.add(Stored(str(i), "t", i, 1.0))
    smaller = SuccessReplay(2)
    smaller.load_state_dict(buffer.state_dict())
    assert [entry.id for entry in smaller.tasks["t"]] == ["1", "2"]
    assert "2 successes of 1 tasks" in smaller.describe() and "t: 2, of updates 2, 3" in smaller.describe()


def test_the_capacity_is_the_recipe_s():
    for capacity in (1, 3):
        buffer = SuccessReplay.of(load_recipe("arpo", overrides={"sampling.replay_capacity": capacity}))
        for i in range(5):
            buffer.add(Stored(str(i), "t", i, 1.0))
        assert [entry.id for entry in buffer.tasks["t"]] == ["0", "1", "2", "3", "4"][-capacity:]
    assert SuccessReplay.of(load_recipe("arpo", overrides={"sampling.replay_capacity": None})) is None


def played(prompts, *, reward=1.0, status=ExitStatus.ANSWERED):
    steps = [
        Step(
            url="http://127.0.0.1/",
            observation="page",
            messages=[{"role": "user", "content": "page"}],
            response="go",
            action=Action("hotkey", keys=("ctrl", "c")) if i else Action("click", element="3"),
            screenshot=b"\xff\xd8jpeg",
            prompt_ids=prompt,
            response_ids=[90 + i, 7],
        )
        for i, prompt in enumerate(prompts)
    ]
    return Trajectory("t", 5, "t#5", "a goal", steps, status, reward)


def test_a_stored_trajectory_has_the_very_tokens_it_was_played_with():
    grows = played([[1, 2, 3], [1, 2, 3, 90, 7, 4], [1, 2, 3, 90, 7, 4, 91, 7, 5]])
    anew = played([[1, 2, 3], [1, 9, 9], [1, 2, 3]])
    for trajectory in (grows, anew):
        entry = store(trajectory, update=2, number=11, pictures=True)
        assert (entry.task, entry.update, entry.outcome, entry.steps) == ("t#5", 2, 1.0, 3)
        back = trajectory_of(through_a_file(entry.data))
        assert [step.prompt_ids for step in back.steps] == [step.prompt_ids for step in trajectory.steps]
        assert [step.response_ids for step in back.steps] == [step.response_ids for step in trajectory.steps]
        assert [step.action for step in back.steps] == [step.action for step in trajectory.steps]
        assert back.steps[0].screenshot == b"\xff\xd8jpeg"
        assert back.success
    kept = record_of(grows)
    assert [step["prompt_ids"] for step in kept["steps"]] == [[1, 2, 3], [4], [5]]  # what came before is kept once
    json.dumps(kept)  # and without pictures it is JSON


def test_the_outcome_and_not_a_shaped_reward_makes_a_success():
    buffer = SuccessReplay(1)
    assert buffer.add(store(played([[1]], reward=0.5), 0, 0, outcome=1.0))  # a penalty on its format
    assert not buffer.add(store(played([[1]], reward=1.5), 0, 1, outcome=0.0))


def test_a_broken_trajectory_cannot_be_stored():
    with pytest.raises(ValueError, match="exit_status = env_error"):
        store(played([[1]], status=ExitStatus.ENV_ERROR), update=0, number=0)


# ---------------------------------------------------------------------------------------------------- WebRL


def test_the_window_is_closed_also_for_computed_perplexities():
    buffer = PerplexityReplay(0.5, 0.95)
    assert buffer.eligible(perplexity(math.log(0.95)))
    assert buffer.eligible(perplexity(math.log(0.5)))
    assert not buffer.eligible(perplexity(math.log(0.951)))
    assert not buffer.eligible(perplexity(math.log(0.499)))
    assert not buffer.eligible(math.inf)


def test_only_actions_of_successes_and_at_most_twice_the_new_ones():
    buffer = PerplexityReplay(seed=3)
    for i in range(10):
        buffer.add(Stored(str(i), "t", i, float(i % 2), steps=3))
    assert len(buffer) == 5
    asked = []

    def perplexities(entries):
        asked.append([entry.id for entry in entries])
        return [[1.01, 1.5, 1.9] for _ in entries]

    chosen = buffer.choose(4, perplexities)
    assert asked == [["1", "3", "5", "7", "9"]]
    assert sum(len(each.steps) for each in chosen) == 8
    assert all(0 not in each.steps for each in chosen)
    assert buffer.choose(0, perplexities) == []
    assert sum(len(each.steps) for each in buffer.choose(50, perplexities)) == 10


def test_webrl_switches_change_what_is_taken():
    def taken(**overrides):
        buffer = PerplexityReplay.of(load_recipe("webrl", overrides=overrides))
        if buffer is None:
            return None
        for i in range(9):
            buffer.add(Stored(str(i), "t", 0, 1.0))
        chosen = buffer.choose(2, lambda entries: [[1 / p] for p in (0.1, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 0.96, 1.0)])
        return [int(each.entry.id) for each in chosen]

    assert taken() == [3, 4, 5, 6]
    assert len(taken(**{"sampling.replay_ratio": 1.0})) == 2
    assert taken(**{"sampling.replay_ratio": 0.0}) is None
    assert taken(**{"sampling.replay_max_probability": 0.65}) == [3]
    assert set(taken(**{"sampling.replay_min_probability": 0.3, "sampling.replay_max_probability": 0.5})) == {1, 2}


def test_a_replayed_action_weighs_as_much_as_a_new_one():
    objective = load_objective("webrl")
    values = [torch.tensor([0.5])] * 3
    facts = [TrajectoryFacts(g, 1.0, True, [2, 2, 2], values=values) for g in ("new", "stored")]
    plan = keep_rows(objective.plan(facts), [{0, 1, 2}, {1}])
    assert [row.coefficient for row in plan.rows] == pytest.approx([0.25, 0.25, 0.25, 0, 0.25, 0])
    assert [row.value_coefficient for row in plan.rows] == pytest.approx([0.25, 0.25, 0.25, 0, 0.25, 0])


# ---------------------------------------------------------------------------------------------------- WebGym


def test_recent_iterations_count_more_and_old_ones_leave():
    buffer = RecentReplay(rows=300, power=2.0, window=4)
    for update in range(6):
        entries = [Stored(f"{update}/{i}", "t", update, float(i < 50), steps=10) for i in range(60)]
        buffer.add_iteration(update, entries)
    assert [update for update, _ in buffer.iterations] == [2, 3, 4, 5]
    assert len(buffer) == 200
    chosen = buffer.draw()
    taken = Counter()
    for each in chosen:
        taken[each.entry.update] += len(each.steps)
        assert len(set(each.steps)) == len(each.steps)
    assert sum(taken.values()) == 300
    # Weights 1, 4, 9, 16 of 30, less what is drawn without replacement.
    assert taken[2] < taken[3] < taken[4] < taken[5]
    assert taken[2] == pytest.approx(11, abs=9) and taken[5] == pytest.approx(145, abs=25)


def test_webgym_switches_change_the_draw():
    def taken(**overrides):
        buffer = RecentReplay.of(load_recipe("webgym", overrides={"sampling.rows_per_update": 100} | overrides))
        for update in range(4):
            buffer.add_iteration(update, [Stored(f"{update}/{i}", "t", update, 1.0, steps=10) for i in range(10)])
        counts = Counter()
        for each in buffer.draw():
            counts[each.entry.update] += len(each.steps)
        return counts

    assert sum(taken().values()) == 100
    assert taken()[3] > 2 * taken()[1]
    even = taken(**{"sampling.recency_power": 0.0})
    assert min(even.values()) > 12
    assert taken(**{"sampling.recency_window": 1}) == {3: 100}
    assert sum(taken(**{"sampling.rows_per_update": 30}).values()) == 30
    assert sum(taken(**{"sampling.rows_per_update": 1800}).values()) == 400


def test_an_action_that_changed_nothing_is_not_drawn():
    buffer = RecentReplay(rows=10)
    buffer.add_iteration(0, [Stored("a", "t", 0, 1.0, steps=3), Stored("b", "t", 0, 1.0, steps=2)])
    chosen = buffer.draw({"a": {0, 2}})
    assert [(each.entry.id, each.steps) for each in chosen] == [("a", (0, 2))]


def test_the_recent_draw_goes_on_after_a_checkpoint():
    def run(stop_at):
        buffer, draws = RecentReplay(rows=7, seed=1), []
        for update in range(8):
            if update == stop_at:
                state, buffer = through_a_file(buffer.state_dict()), RecentReplay(rows=7, seed=1)
                buffer.load_state_dict(state)
            buffer.add_iteration(update, [Stored(f"{update}/{i}", "t", update, 1.0, steps=4) for i in range(5)])
            draws.append([(each.entry.id, each.steps) for each in buffer.draw()])
        return draws

    assert run(None) == run(3) == run(6)


# ---------------------------------------------------------------------------------------------------- rows


def test_weighted_choice_draws_in_proportion_without_replacement():
    import random

    rng = random.Random(0)
    first = Counter(weighted_choice([1, 3], 1, rng)[0] for _ in range(4000))
    assert first[1] / 4000 == pytest.approx(0.75, abs=0.03)
    assert weighted_choice([1, 0, 2], 5, rng) == [0, 2]
    assert weighted_choice([], 5, rng) == []


def test_zerogui_trains_on_a_random_part_of_its_rows():
    def subset(**overrides):
        recipe = load_recipe("zerogui", overrides=overrides)
        facts = [TrajectoryFacts("g", float(i % 2), True, [3] * 5) for i in range(8)]
        flat = [TrajectoryFacts("flat", 0.0, True, [3] * 5)] * 2
        plan = recipe.load_objective().plan(facts + flat)
        return plan, Sampling(recipe).subset(plan)

    plan, part = subset(**{"sampling.rows_per_update": 10})
    live = [row for row in part.rows if row.coefficient]
    assert len(live) == 10
    assert sum(row.coefficient for row in live) == pytest.approx(sum(row.coefficient for row in plan.rows))
    assert all(not row.coefficient for each in part.trajectories[8:] for row in each.rows)
    assert subset(**{"sampling.rows_per_update": 10})[1] == part  # seeded
    plan, part = subset(**{"sampling.rows_per_update": None})
    assert part == plan
    plan, part = subset()  # 16384: more than there are
    assert [r.coefficient for r in part.rows] == pytest.approx([r.coefficient for r in plan.rows])


def test_all_rows_of_a_small_plan_stay():
    import random

    plan = load_objective("zerogui").plan([TrajectoryFacts("g", r, True, [1, 1]) for r in (0.0, 1.0)])
    assert choose_rows(plan, None, random.Random(0)) == [{0, 1}, {0, 1}]
    nothing = keep_rows(plan, [set(), set()])
    assert all(row.coefficient == 0 for row in nothing.rows)


def test_hiconagent_draws_single_steps():
    recipe = load_recipe("hiconagent", profile=None, overrides={"policy.model": "m"})
    drawn = draw_single_steps(40_000, recipe.sampling.training_steps, recipe.train.seed)
    assert len(drawn) == len(set(drawn)) == 3000 and drawn == sorted(drawn) and drawn[-1] < 40_000
    assert drawn == draw_single_steps(40_000, 3000, recipe.train.seed) != draw_single_steps(40_000, 3000, 1)
    assert draw_single_steps(5, 3000, 0) == draw_single_steps(5, None, 0) == [0, 1, 2, 3, 4]
