"""Groups without signal leave the batch and others take their place, up to a bound and with a clear end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from webagent_core.recipe import load_recipe
from webagent_core.sampling.filters import GroupFilter, NoSignal
from webagent_core.tasks.task import Task

CASES = json.loads((Path(__file__).parent / "cases" / "group_filter.json").read_text())


def refill(filtering, next_tasks, play, outcomes):
    """A whole batch, of groups whose outcomes follow from them."""
    batch = filtering.refill(next_tasks, lambda tasks: [(group, outcomes(group)) for group in play(tasks)])
    filtering.end(batch)
    return batch


def numbered():
    """Tasks t#0, t#1, ... and the numbers that were given out."""
    given: list[int] = []

    def next_tasks(count):
        start = len(given)
        given.extend(range(start, start + count))
        return [Task("t", seed) for seed in range(start, start + count)]

    return next_tasks, given


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['kind']}")
def test_the_cases(case):
    given, wanted = case["input"], case["expected"]["keep"]
    groups = given.get("outcomes", given["groups"])  # a shaped reward is not what the filter looks at
    filtering = GroupFilter(len(groups), most=len(groups))
    batch = filtering.batch()
    assert [batch.offer(Task("t", i), i, outcomes) for i, outcomes in enumerate(groups)] == wanted
    filtering.end(batch)  # one batch without anything left does not end a run
    assert batch.groups == [i for i, keep in enumerate(wanted) if keep]
    assert batch.metrics()["groups/played"] == len(groups)


def test_relatives_of_the_cases():
    def kept(*outcomes):
        return GroupFilter(1, most=1).batch().offer(Task("t", 0), None, outcomes)

    assert kept(1, None, None, 0)  # two valid members that differ, however many broke
    assert not kept(None, 1, 1)  # invalid members make no difference between equal ones
    assert not kept()
    assert not kept(1e9, 1e9 + 1e-3)
    assert kept(0.0, 1e-6)
    assert kept(0, -1, None)


def test_flat_groups_are_replaced_until_the_batch_is_full():
    next_tasks, given = numbered()
    rounds = []

    def play(tasks):
        rounds.append(len(tasks))
        return [(task, [1.0, 0.0] if task.seed % 3 == 0 else [0.0, 0.0]) for task in tasks]

    batch = refill(GroupFilter(4), next_tasks, play, lambda group: group[1])
    assert [group[0].seed for group in batch.groups] == [0, 3, 6, 9]
    assert batch.tasks == [group[0] for group in batch.groups]
    assert [group[0].seed for group in batch.others] == [1, 2, 4, 5, 7, 8]
    assert rounds == [4, 2, 2, 1, 1]  # never more than are missing
    assert given == list(range(10))
    assert batch.metrics() == {
        "groups/played": 10.0,
        "groups/kept": 4.0,
        "groups/missing": 0.0,
        "groups/dropped/flat": 6.0,
        "groups/dropped/lone": 0.0,
        "groups/dropped/stale": 0.0,
    }


def test_invalid_members_are_counted_apart_from_flat_groups():
    next_tasks, _ = numbered()
    outcomes = {0: [None, 1.0], 1: [None, 0.0, 0.0], 2: [None, 0.0, 1.0]}
    batch = refill(GroupFilter(1), next_tasks, lambda tasks: [t.seed for t in tasks], lambda seed: outcomes[seed])
    assert batch.groups == [2]
    assert (batch.metrics()["groups/dropped/lone"], batch.metrics()["groups/dropped/flat"]) == (1, 1)


def test_the_bound_ends_a_batch_that_is_not_full():
    next_tasks, given = numbered()
    batch = refill(
        GroupFilter(4, most=6), next_tasks, lambda tasks: list(tasks), lambda task: [0.0, float(task.seed == 2)]
    )
    assert [task.seed for task in batch.groups] == [2]
    assert len(given) == 6
    assert batch.metrics()["groups/missing"] == 3


def test_a_batch_ends_where_the_tasks_end():
    tasks = [Task("t", 0), Task("t", 1)]
    batch = refill(
        GroupFilter(4),
        lambda count: [tasks.pop() for _ in range(min(count, len(tasks)))],
        lambda tasks: list(tasks),
        lambda _: [0, 1],
    )
    assert len(batch.groups) == 2


def test_no_signal_ends_the_run_after_a_few_batches_and_says_what_was_played():
    filtering = GroupFilter(2, most=3, patience=2)
    names = iter(["hard", "hard", "easy", "hard", "broken", "hard"])
    outcomes = {"hard": [0.0, 0.0], "easy": [1.0, 1.0, None], "broken": [None, 1.0]}

    def again():
        return refill(
            filtering,
            lambda count: [Task(next(names), 0) for _ in range(count)],
            lambda tasks: tasks,
            lambda t: outcomes[t.name],
        )

    assert again().groups == []  # one such batch is trained on not at all
    with pytest.raises(NoSignal) as end:
        again()
    assert str(end.value) == (
        "no group has signal in 2 batches in a row: 6 groups played, 4 groups flat at reward 0 (hard 4); 1 group flat"
        " at reward 1 (easy 1); 1 group with fewer than two valid members (broken 1)"
    )


def test_a_batch_with_signal_starts_the_count_anew():
    filtering = GroupFilter(1, most=1, patience=2)
    for outcomes in ([0, 0], [0, 1], [0, 0]):
        refill(filtering, lambda count: [Task("t", 0)], lambda tasks: tasks, lambda _, o=outcomes: o)
    assert filtering.empty_batches == 1
    with pytest.raises(NoSignal, match="2 groups flat at reward 0"):
        refill(filtering, lambda count: [Task("t", 0)], lambda tasks: tasks, lambda _: [0, 0])


def test_the_count_of_empty_batches_survives_a_checkpoint():
    first = GroupFilter(1, most=1, patience=2)
    refill(first, lambda count: [Task("t", 0)], lambda tasks: tasks, lambda _: [-1, -1])
    second = GroupFilter(1, most=1, patience=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    with pytest.raises(NoSignal, match=r"flat at reward -1 \(t 1\); 1 group flat at reward 0 \(t 1\)"):
        refill(second, lambda count: [Task("t", 0)], lambda tasks: tasks, lambda _: [0, 0])


def test_no_tasks_at_all_is_said_as_such():
    filtering = GroupFilter(2, patience=1)
    with pytest.raises(NoSignal, match="no tasks to play"):
        refill(filtering, lambda count: [], lambda tasks: tasks, lambda _: [])


def test_a_group_that_is_too_old_is_stale():
    filtering = GroupFilter.of(load_recipe("asyncwebrl", profile=None, overrides={"policy.model": "m"}))
    assert filtering.max_staleness == 2
    batch = filtering.batch()
    assert batch.offer(Task("t", 0), "new enough", [0, 1], lag=2)
    assert not batch.offer(Task("t", 1), "too old", [0, 1], lag=3)
    assert batch.metrics()["groups/dropped/stale"] == 1
    unbounded = GroupFilter.of(load_recipe("asyncwebrl", overrides={"sampling.max_staleness": None}))
    assert unbounded.batch().offer(Task("t", 1), "old", [0, 1], lag=3)


def test_recipes_that_filter_and_the_switch():
    full = {name: GroupFilter.of(load_recipe(name, profile=None, overrides={"policy.model": "m"})) for name in FILTERS}
    assert {name: f.wanted for name, f in full.items()} == {"asyncwebrl": 16, "openwebrl": 48, "zerogui": 16}
    for name in FILTERS:
        assert GroupFilter.of(load_recipe(name, overrides={"objective.drop_flat_groups": False})) is None
    for name in ("webagent_r1", "arpo", "webgym", "webrl", "uitars2"):
        assert GroupFilter.of(load_recipe(name)) is None
    assert GroupFilter.of(load_recipe("webagent_r1", overrides={"objective.drop_flat_groups": True})) is not None


FILTERS = ("asyncwebrl", "openwebrl", "zerogui")


def test_what_a_backend_does_wrong_is_said():
    with pytest.raises(ValueError, match="play returned 1 groups for 2 tasks"):
        refill(GroupFilter(2), numbered()[0], lambda tasks: tasks[:1], lambda _: [0, 1])
    with pytest.raises(ValueError, match="next_tasks returned 3 tasks, and was asked for 2"):
        refill(GroupFilter(2), lambda count: [Task("t", 0)] * 3, lambda tasks: tasks, lambda _: [0, 1])
    with pytest.raises(ValueError, match="most = 1"):
        GroupFilter(2, most=1)
