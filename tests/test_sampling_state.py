"""A run that is stopped anywhere and resumed makes the choices of one that was never stopped."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import webagent_core.recipe as recipe_sections
import webagent_core.sampling
from webagent_core.recipe import load_recipe
from webagent_core.sampling.progress import Progress, check_checkpoint
from webagent_core.sampling.search import SearchSettings
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.stored import Stored
from webagent_core.sampling.task_generation import NewTask
from webagent_core.tasks.schedule import training_tasks

torch.set_num_threads(1)

CASES = {case["kind"]: case for case in json.loads((Path(__file__).parent / "cases" / "resume.json").read_text())}


def written_and_read(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def one_update(sampling):
    """A made-up update: attempts whose outcomes follow from the task, with everything that draws."""
    log = []

    def play(tasks):
        return [(task, [float((task.seed >> i) % 3 == 0) for i in range(4)]) for task in tasks]

    if sampling.groups:
        batch = sampling.groups.refill(sampling.tasks.next, lambda tasks: [(each, each[1]) for each in play(tasks)])
        sampling.groups.end(batch)
        groups = batch.groups
    else:
        groups = play(sampling.tasks.next(3))
    for number, (task, outcomes) in enumerate(groups):
        log.append((task, outcomes))
        entries = [
            Stored(f"{sampling.update}/{number}/{i}", task.name, sampling.update, outcome, steps=3)
            for i, outcome in enumerate(outcomes)
        ]
        if hasattr(sampling.replay, "offer"):
            offered = sampling.replay.offer(task.name, [0.0, 0.0])
            log.append(offered and offered.id)
        if hasattr(sampling.replay, "add"):
            for entry in entries:
                sampling.replay.add(entry)
        if sampling.phases:
            sampling.phases.record(NewTask(task), outcomes)
    if hasattr(sampling.replay, "add_iteration"):
        sampling.replay.add_iteration(sampling.update, entries)
        log.append([(each.entry.id, each.steps) for each in sampling.replay.draw()])
    if hasattr(sampling.replay, "choose"):
        chosen = sampling.replay.choose(2, lambda entries: [[1.2, 1.5, 9.0] for _ in entries])
        log.append([(each.entry.id, each.steps) for each in chosen])
    log.append(sampling.step_limits("miniwob/enter-text", sampling.update))
    sampling.update += 1
    return log


async def one_phase(sampling):
    async def values(proposals):
        return [(task.task.seed % 10) / 10 for task in proposals]

    report = await sampling.phases.next_phase(sampling.generator, values)
    sampling.tasks.add([new.task for new in report.new])
    return report.new


RECIPES = {
    "asyncwebrl": {"rollout.groups_per_update": 3},
    "arpo": {"sampling.replay_capacity": 3},
    "webgym": {"sampling.rows_per_update": 4},
    "webrl": {"sampling.new_tasks_per_phase": 5},
    "zerogui": {"rollout.groups_per_update": 2},
    "openwebrl": {"rollout.groups_per_update": 2, "sampling.later_from_update": 4},
}


async def played(name, seed, stops):
    """What eight updates of a recipe choose, stopped and resumed before some of them."""
    recipe = load_recipe(name, overrides=RECIPES[name] | {"train.seed": seed})
    sampling, log = Sampling(recipe), []
    for update in range(8):
        if update in stops:
            state, sampling = written_and_read(sampling.state_dict()), Sampling(recipe)
            sampling.load_state_dict(state)
        log.append(one_update(sampling))
        if sampling.phases and update % 3 == 2:  # stops fall into the middle of a phase and between two
            log.append(await one_phase(sampling))
    return log, sampling.describe()


@pytest.mark.parametrize("name", RECIPES)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), stops=st.sets(st.integers(0, 7), min_size=1))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(name, seed, stops):
    assert asyncio.run(played(name, seed, ())) == asyncio.run(played(name, seed, stops))


def test_the_next_batch_in_the_middle_of_a_turn_is_the_same():
    recipe = load_recipe("webrl")
    whole = Sampling(recipe).tasks.next(40)
    first = Sampling(recipe)
    assert first.tasks.next(13) == whole[:13]
    second = Sampling(recipe)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.tasks.next(27) == whole[13:]


def test_the_order_of_tasks_is_that_of_the_schedule():
    for name in ("webagent_r1", "asyncwebrl"):
        recipe = load_recipe(name, overrides={"train.seed": 3})
        planned = training_tasks(recipe)
        assert Sampling(recipe).tasks.next(len(planned)) == planned


def test_a_state_without_buffers_is_small():
    assert len(json.dumps(Sampling(load_recipe("openwebrl")).state_dict())) < 20_000


@pytest.mark.parametrize(
    ("overrides", "recipe", "message"),
    [
        ({}, "webgym", "the sampling state's recipe is 'arpo', and this run's is 'webgym'"),
        ({"train.seed": 1}, "arpo", "the sampling state's seed is 0, and this run's is 1"),
        (
            {"objective.replay": False},
            "arpo",
            "the sampling state has replay, tasks, and this run has tasks: a switch was turned since",
        ),
    ],
)
def test_another_runs_state_is_refused_in_one_line(overrides, recipe, message):
    state = Sampling(load_recipe("arpo")).state_dict()
    other = Sampling(load_recipe(recipe, overrides=overrides))
    before = other.state_dict()
    with pytest.raises(ValueError) as error:
        other.load_state_dict(state)
    assert str(error.value) == message
    assert other.state_dict() == before


def test_every_setting_of_the_sections_is_read_by_this_room():
    room = Path(webagent_core.sampling.__file__).parent
    code = "\n".join(path.read_text() for path in room.glob("*.py") if path.name != "rows.py")
    unread = [name for name in recipe_sections.Sampling.model_fields if f"sampling.{name}" not in code]
    # The settings of recorded steps are arguments of this room's functions.
    of_recorded_steps = (room.parents[1] / "trl_webagent" / "recorded_steps_run.py").read_text()
    assert [name for name in unread if f".{name}" not in of_recorded_steps] == []
    assert len(unread) <= 4
    assert set(recipe_sections.Search.model_fields) <= set(SearchSettings.__dataclass_fields__)


def test_a_state_of_another_version_is_refused():
    sampling = Sampling(load_recipe("arpo"))
    with pytest.raises(ValueError, match="version is 0, and this run's is 2"):
        sampling.load_state_dict(sampling.state_dict() | {"version": 0})


def test_describe_says_what_a_person_asks():
    recipe = load_recipe("arpo")
    sampling = Sampling(recipe)
    sampling.replay.add(Stored("a", "miniwob/enter-text#4", 2, 1.0))
    text = sampling.describe()
    assert f"arpo: 0 of {recipe.train.updates} updates done" in text
    assert "replay: 1 successes of 1 tasks, at most 8 of one" in text
    assert "miniwob/enter-text#4: 1, of updates 3" in text


# ---------------------------------------------------------------------------------------------------- the cases


def trained(sampling, until, saves=None, every=None):
    """Updates until `until` or the end; a state is written after those that `every` divides."""
    while sampling.progress.remaining and sampling.update < until:
        one_update(sampling)
        if every and sampling.update % every == 0:
            saves[sampling.update] = written_and_read(sampling.state_dict())


def resumed(recipe, saves, update):
    sampling = Sampling(recipe)
    sampling.load_state_dict(saves[update])
    assert check_checkpoint(update, sampling.update) == update
    return sampling


def recipe_of(updates):
    return load_recipe("webgym", overrides={"train.updates": updates, "sampling.rows_per_update": 2})


def epochs(given):
    return Progress(given["saved_at"], given["steps_per_epoch"] * given["total_epochs"], given["steps_per_epoch"])


def test_epoch_boundary():
    case = CASES["epoch_boundary"]
    progress = epochs(case["input"])
    assert progress.remaining == case["expected"]["remaining_steps"]
    assert (progress.next, progress.skip_in_epoch) == (61, 0)


def test_mid_epoch():
    case = CASES["mid_epoch"]
    progress = epochs(case["input"])
    assert {
        "remaining_steps": progress.remaining,
        "next_step": progress.next,
        "skip_batches_in_epoch": progress.skip_in_epoch,
    } == case["expected"]


def test_finished():
    case = CASES["finished"]
    progress = epochs(case["input"])
    assert progress.remaining == case["expected"]["remaining_steps"]
    assert progress.next is None
    assert progress.describe() == "resumed from update 10 of 10: nothing is left to train"
    assert Progress(12, 10).remaining == 0  # the total was lowered: not a negative number of updates


def test_extend():
    case = CASES["extend"]["input"]
    saves = {}
    first = Sampling(recipe_of(case["total_steps"]))
    trained(first, case["saved_at"], saves, every=case["saved_at"])
    longer = resumed(recipe_of(case["new_total_steps"]), saves, case["saved_at"])
    assert longer.progress.remaining == CASES["extend"]["expected"]["remaining_steps"]


def test_last_save_before_interrupt_and_second_resume():
    interrupt, second = CASES["last_save_before_interrupt"], CASES["second_resume"]
    recipe, saves = recipe_of(60), {}
    trained(Sampling(recipe), interrupt["input"]["interrupted_at"], saves, every=interrupt["input"]["save_every"])
    again = resumed(recipe, saves, max(saves))
    assert again.update == interrupt["expected"]["resumes_at"]
    assert again.progress.next == interrupt["expected"]["next_step"]

    older = resumed(recipe, saves, second["input"]["saves"][0])
    trained(older, second["input"]["saves"][1], saves, every=5)
    again = resumed(recipe, saves, max(saves))
    assert again.progress.next == second["expected"]["next_step"]

    uninterrupted = Sampling(recipe)
    trained(uninterrupted, 45)
    assert one_update(again) == one_update(uninterrupted)


def test_path_vs_state():
    case = CASES["path_vs_state"]["input"]
    with pytest.raises(ValueError, match="folder is of update 40, and the state in it of update 35"):
        check_checkpoint(case["dir_step"], case["state_step"])


def test_every_kind_of_resume_case_has_its_test():
    assert set(CASES) == {
        "epoch_boundary", "mid_epoch", "finished", "extend", "last_save_before_interrupt", "second_resume",
        "path_vs_state",
    }  # fmt: skip


async def test_the_first_stage_is_part_of_the_state():
    recipe = load_recipe("zerogui", overrides={"sampling.generated_tasks": 5})
    whole, first, second = Sampling(recipe), Sampling(recipe), Sampling(recipe)
    for sampling in (whole, first):
        await sampling.first_stage([NewTask(task) for task in sampling.start_pages()])
    played = first.tasks.next(3)
    second.load_state_dict(written_and_read(first.state_dict()))
    assert played + second.tasks.next(6) == whole.tasks.next(9)
    assert second.state_dict() == whole.state_dict()
