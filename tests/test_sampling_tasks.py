"""Which tasks are played, for how long, and where new ones come from."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from webagent_core.recipe import load_recipe
from webagent_core.rewards.reward_manager import JudgeError
from webagent_core.sampling.curriculum import MINIWOB_DIFFICULTY, StepLimits
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.task_filter import TaskFilter, Tried, describe_selection
from webagent_core.sampling.task_generation import MiniWoBVariations, ModelGenerator, NewTask, generator_of, read_tasks
from webagent_core.sampling.task_phases import TaskPhases
from webagent_core.sampling.task_source import TaskSource
from webagent_core.tasks.demonstrations import DEMONSTRATORS
from webagent_core.tasks.task import Task


def full(name, **overrides):
    return load_recipe(name, profile=None, overrides={"policy.model": "m"} | overrides)


# ---------------------------------------------------------------------------------------------------- task filter


def outcomes_from(script):
    """Plays from a list of outcomes a task; remembers how many attempts each call asked for."""
    calls = []

    def play(attempts):
        calls.append(len(attempts))
        return [script[task.name].pop(0) for task in attempts]

    return play, calls


def test_a_batch_holds_a_single_task_twice_only_if_there_are_too_few():
    """The end of a turn falls inside a batch: what that batch has had already waits for the next one."""
    source = TaskSource([Task("t", seed) for seed in range(5)], range(10), seed=1)
    batches = [source.next(3) for _ in range(50)]
    assert all(len(set(batch)) == 3 for batch in batches)
    assert set(Counter(task for batch in batches for task in batch).values()) == {30}
    few = TaskSource([Task("t", 0), Task("t", 1)], range(10)).next(3)
    assert len(few) == 3 and len(set(few)) == 2


def test_tasks_that_are_solved_at_least_once_are_kept():
    arpo = load_recipe("arpo", profile=None, overrides={"policy.model": "m"})
    assert TaskFilter.of(arpo) == TaskFilter(trials=16, min_successes=1)
    assert TaskFilter.of(load_recipe("webgym")) is None
    play, calls = outcomes_from({"never": [0] * 16, "once": [0] * 15 + [1], "always": [1] * 16})
    tried = TaskFilter().select([Task(name, 0) for name in ("never", "once", "always")], play)
    assert [(t.task.name, t.kept, t.pass_rate) for t in tried] == [
        ("never", False, 0.0), ("once", True, 1 / 16), ("always", True, 1.0)
    ]  # fmt: skip
    assert calls == [48]
    assert describe_selection(tried) == "task filter: 2 of 3 tasks kept, 1 never solved"


def test_the_switches_of_the_task_filter_change_what_is_kept():
    def kept(**overrides):
        play, _ = outcomes_from({"a": [0, 0, 1, 1, 0, 0], "b": [0, 1, 0, 0, 0, 0]})
        tried = TaskFilter.of(load_recipe("arpo", overrides=overrides)).select([Task("a", 0), Task("b", 0)], play)
        return [t.task.name for t in tried if t.kept]

    assert kept(**{"sampling.task_trials": 2}) == ["b"]
    assert kept(**{"sampling.task_trials": 4}) == ["a", "b"]
    assert kept(**{"sampling.task_trials": 4, "sampling.task_min_successes": 2}) == ["a"]
    assert TaskFilter.of(load_recipe("arpo", overrides={"sampling.task_trials": None})) is None


def test_an_invalid_attempt_is_no_trial():
    play, calls = outcomes_from({"a": [None, 0, None, 1], "broken": [None] * 6, "b": [None, 1]})
    tried = TaskFilter(trials=2).select([Task(name, 0) for name in ("a", "broken", "b")], play)
    assert tried == [
        Tried(Task("a", 0), 2, 1, kept=True),
        Tried(Task("broken", 0), 0, 0, kept=False, undecided=True),
        Tried(Task("b", 0), 1, 1, kept=True),
    ]
    assert calls == [6, 3, 3]  # bounded, and only what is still missing
    assert tried[1].pass_rate is None
    assert "1 undecided because attempts were invalid" in describe_selection(tried)


def test_the_kept_tasks_are_all_that_is_played_then():
    source = TaskSource(["a", "b"], range(10))
    source.next(1)
    source.restrict([Task("a", 3), Task("b", 4)])
    assert sorted((task.name, task.seed) for task in source.next(4)) == [("a", 3), ("a", 3), ("b", 4), ("b", 4)]
    with pytest.raises(ValueError, match="no task is left"):
        source.restrict([])


def test_bad_trials_are_refused():
    with pytest.raises(ValueError, match="trials = 0"):
        TaskFilter(trials=0)
    with pytest.raises(ValueError, match="min_successes = 5"):
        TaskFilter(trials=4, min_successes=5)


# ---------------------------------------------------------------------------------------------------- curriculum


def test_webgym_gives_each_difficulty_its_own_limit():
    limits = StepLimits.of(full("webgym"), difficulty={"easy": 0, "medium": 1, "hard": 2})
    assert [limits(task, 0) for task in ("easy", "medium", "hard", "unknown")] == [10, 20, 30, 30]
    switched_off = StepLimits.of(full("webgym", **{"sampling.max_steps_by_difficulty": None}), difficulty={"easy": 0})
    assert switched_off("easy", 0) == 30
    capped = StepLimits.of(full("webgym", **{"rollout.max_steps": 15}), difficulty={"easy": 0, "medium": 1})
    assert [capped(task, 0) for task in ("easy", "medium")] == [10, 15]
    asyncwebrl = StepLimits.of(full("asyncwebrl"), difficulty={"easy": 0})
    assert asyncwebrl("easy", 0) == 10


def test_openwebrl_lengthens_episodes_after_90_updates():
    limits = StepLimits.of(full("openwebrl"))
    assert [limits("any", update) for update in (0, 89, 90, 139)] == [15, 15, 30, 30]
    early = StepLimits.of(full("openwebrl", **{"sampling.later_from_update": 2}))
    assert [early("any", update) for update in (1, 2)] == [15, 30]
    other = StepLimits.of(full("openwebrl", **{"sampling.later_max_steps": 20}))
    assert other("any", 90) == 20
    assert "15, 30 from update 91 on" in limits.describe()


def test_recipes_without_a_curriculum_have_one_limit():
    limits = StepLimits.of(full("webagent_r1"))
    assert {limits(task, update) for task in ("a", "b") for update in (0, 1000)} == {15}


def test_half_a_schedule_and_a_level_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match="both or neither"):
        StepLimits(15, later_max_steps=30)
    with pytest.raises(ValueError, match="difficulty of a = 3 is not allowed: 0 to 2"):
        StepLimits(30, (10, 20, 30), difficulty={"a": 3})("a", 0)


def test_every_demonstrated_task_has_a_difficulty():
    assert set(MINIWOB_DIFFICULTY) == set(DEMONSTRATORS)
    assert set(MINIWOB_DIFFICULTY.values()) == {0, 1, 2}


# ---------------------------------------------------------------------------------------------------- new tasks


def new(name, seed=0, goal=""):
    return NewTask(Task(name, seed), goal)


async def test_variations_are_reproducible_pages_of_the_family_with_training_seeds():
    generator = MiniWoBVariations([100, 200], seed=1)
    proposals = await generator.propose([new("miniwob/click-tab", 5), new("miniwob/chase-circle", 5)], 60)
    assert len(proposals) == 60
    of_tab = [p.task for p in proposals if p.parent == "miniwob/click-tab#5"]
    assert {task.name for task in of_tab} > {"miniwob/click-tab", "miniwob/click-tab-2"}
    assert all(task.name.startswith("miniwob/click-tab") for task in of_tab)
    assert all(100 <= p.task.seed < 200 for p in proposals)
    assert await generator.propose([], 5) == []
    again = MiniWoBVariations([100, 200], seed=1)
    assert await again.propose([new("miniwob/click-tab", 5), new("miniwob/chase-circle", 5)], 60) == proposals


async def test_pages_that_differ_each_time_are_not_feasible():
    generator = MiniWoBVariations([0, 10])
    assert await generator.feasible(new("miniwob/click-tab"))
    assert not await generator.feasible(new("miniwob/chase-circle"))
    assert not await generator.feasible(new("miniwob/no-such-page"))


def test_a_task_failed_if_it_was_tried_and_never_solved():
    phases = TaskPhases(1)
    phases.record(new("a"), [0, None, 0])
    phases.record(new("b"), [0, 0])
    phases.record(new("c"), [None, None])  # nothing but broken episodes
    phases.record(new("b"), [1, 0])
    phases.record(new("b"), [0, 0])
    assert [task.task.name for task in phases.failed()] == ["a"]


class Scripted:
    """A generator that proposes from a list."""

    def __init__(self, *proposals):
        self.left, self.asked = list(proposals), []

    async def propose(self, parents, wanted):
        self.asked.append((list(parents), wanted))
        taken, self.left = self.left[:wanted], self.left[wanted:]
        return taken

    async def feasible(self, proposal):
        return {"impossible": False, "who knows": None}.get(proposal.task.name, True)


def critic(values):
    async def of(proposals):
        return [values[proposal.task.name] for proposal in proposals]

    return of


async def test_a_phase_keeps_what_is_new_feasible_and_neither_hopeless_nor_solved():
    values = {"a": 0.05, "b": 0.75, "c": 0.04, "d": 0.76, "e": 0.5, "f": None}
    phases = TaskPhases.of(load_recipe("webrl", overrides={"sampling.new_tasks_per_phase": 3}))
    phases.record(new("failed"), [0])
    phases.record(new("solved"), [1])
    names = ["a", "failed", "c", "b", "impossible", "d", "who knows", "f", "a", "e"]
    generator = Scripted(*map(new, names))
    report = await phases.next_phase(generator, critic(values))
    assert [task.task.name for task in report.new] == ["a", "b", "e"]
    assert report.left_out == {
        "known": 2, "too hard": 1, "too easy": 1, "infeasible": 1, "undecided": 1, "not opened": 1,
    }  # fmt: skip
    assert all([task.task.name for task in parents] == ["failed"] for parents, _ in generator.asked)
    assert (phases.phase, phases.failed(), phases.tasks) == (2, [], report.new)
    assert report.describe().startswith("phase 2: 3 of 3 new tasks; left out: 1 infeasible, 2 known")


async def test_a_goal_in_other_spelling_is_known_and_a_page_is_known_by_its_seed():
    phases = TaskPhases(2)
    phases.record(new("shop", 0, "Find a hat"), [0])
    phases.record(new("page", 5, "what the page asked for"), [1])
    proposals = [new("shop", 9, "find  a HAT"), new("page", 5), new("page", 6), new("shop", 10, "Find a bag")]
    report = await phases.next_phase(Scripted(*proposals), critic({"shop": 0.5, "page": 0.5}))
    assert report.new == proposals[2:]
    assert report.left_out == {"known": 2}


async def test_the_switches_of_the_phases_change_what_is_kept():
    async def kept(**overrides):
        phases = TaskPhases.of(load_recipe("webrl", overrides=overrides))
        if phases is None:
            return None
        phases.record(new("failed"), [0])
        names = ["a", "b", "c", "d"]
        values = dict(zip(names, (0.01, 0.3, 0.6, 0.9), strict=True))
        report = await phases.next_phase(Scripted(*map(new, names)), critic(values))
        return [task.task.name for task in report.new]

    assert await kept() == ["b", "c"]
    assert await kept(**{"sampling.new_task_min_value": 0.0}) == ["a", "b", "c"]
    assert await kept(**{"sampling.new_task_max_value": 1.0}) == ["b", "c", "d"]
    assert await kept(**{"sampling.new_tasks_per_phase": 1}) == ["b"]
    assert await kept(**{"sampling.new_tasks_per_phase": None}) is None


async def test_a_phase_is_bounded_and_survives_a_generator_that_fails():
    class Endless(Scripted):
        async def propose(self, parents, wanted):
            self.asked.append(wanted)
            return [new("hopeless", len(self.asked) * 1000 + i) for i in range(wanted)]

    phases = TaskPhases(5)
    phases.record(new("failed"), [0])
    generator = Endless()
    report = await phases.next_phase(generator, critic({"hopeless": 0.0}))
    assert report.new == [] and sum(generator.asked) == 20

    class Broken(Scripted):
        async def propose(self, parents, wanted):
            raise JudgeError("no reply")

    phases.record(new("failed"), [0])
    report = await phases.next_phase(Broken(), critic({}))
    assert report.left_out == {"generator failed": 1} and phases.phase == 3


def test_new_tasks_join_with_the_next_turn():
    source = TaskSource(["a", "b"], range(10), seed=0)
    source.next(1)
    assert source.add([Task("n", 1), Task("n", 1), Task("n", 2)]) == 2
    assert source.add([Task("n", 2)]) == 0
    assert source.next(1)[0].name in "ab"  # the turn that had begun
    assert sorted(task.name for task in source.next(4)) == ["a", "b", "n", "n"]


def test_a_first_stage_comes_before_all_other_tasks():
    source = TaskSource(["target"], range(10))
    source.begin_with([Task("g", seed) for seed in range(3)], epochs=2)
    assert "tasks: 6 of a first stage, then 1 names with fresh seeds" in source.describe()
    batches = [source.next(3) for _ in range(3)]
    assert [{task.seed for task in batch} for batch in batches[:2]] == [{0, 1, 2}] * 2
    assert [task.name for task in batches[2]] == ["target"] * 3


def test_a_batch_of_the_first_stage_holds_no_task_twice():
    """Where one epoch ends within a batch and the next begins, what was given just now waits."""
    source = TaskSource(["target"], range(10))
    source.begin_with([Task("g", seed) for seed in range(3)], epochs=4)
    batches = [source.next(2) for _ in range(6)]
    assert all(len(set(batch)) == 2 for batch in batches)
    assert set(Counter(task for batch in batches for task in batch).values()) == {4}


async def test_zerogui_makes_the_tasks_of_its_first_stage_from_start_pages():
    def names(sampling, count):
        return [task.name for task in sampling.tasks.next(count)]

    sampling = Sampling(load_recipe("zerogui", overrides={"sampling.generated_tasks": 12}))
    starts = sampling.start_pages()
    assert [task.name for task in starts] == names(Sampling(load_recipe("zerogui")), 9)  # one page of each task
    said = await sampling.first_stage([NewTask(task) for task in starts])
    assert said.startswith("first stage: 12 of 12 generated tasks")
    stage = sampling.tasks.next(12)
    families = {name.removeprefix("miniwob/").split("-")[0] for name in load_recipe("zerogui").tasks.names}
    assert len(set(stage)) == 12 and {t.name.removeprefix("miniwob/").split("-")[0] for t in stage} <= families
    assert set(names(sampling, 9)) == set(load_recipe("zerogui").tasks.names)
    # Switched off, as in the embedded profile, the target tasks are all there is.
    off = Sampling(load_recipe("zerogui"))
    assert off.generated_tasks == 0 and off.generator is None
    many = Sampling(full("zerogui", **{"sampling.generated_tasks": 120, "tasks.names": ["miniwob/click-tab"]}))
    assert len(many.start_pages()) == 12  # ten tasks a screenshot


# ---------------------------------------------------------------------------------------------------- a model's tasks


@pytest.mark.parametrize(
    ("text", "finish", "tasks"),
    [
        ('{"tasks": [{"of": 1, "task": "Book it"}, {"of": 2, "task": " Go "}]}', "stop", [(1, "Book it"), (2, "Go")]),
        ('Here you are:\n```json\n{"tasks": [{"of": 2, "task": "x"}]}\n```', "stop", [(2, "x")]),
        ('{"tasks": [{"of": 1, "task": "x"}, {"of": 1, "ta', "length", None),
        ('{"tasks": [{"of": 1, "task": "x"}]}', "length", None),
        ('{"tasks": [{"of": 3, "task": "x"}]}', "stop", None),
        ('{"tasks": [{"of": 0, "task": "x"}]}', "stop", None),
        ('{"tasks": [{"task": "x"}]}', "stop", None),
        ('{"tasks": ["whose is it?"]}', "stop", None),
        ('{"tasks": [{"of": 1, "task": " "}]}', "stop", None),
        ('{"tasks": []}', "stop", None),
        ('{"tasks": "x"}', "stop", None),
        ('{"tasks": [1]}', "stop", None),
        ('["x"]', "stop", None),
        ("no tasks today", "stop", None),
        ("} {", "stop", None),
    ],
)
def test_what_a_model_proposes_is_read_or_asked_for_again(text, finish, tasks):
    assert read_tasks(SimpleNamespace(text=text, finish_reason=finish), parents=2) == tasks


def test_of_one_parent_a_plain_text_will_do():
    assert read_tasks(SimpleNamespace(text='{"tasks": ["x"]}', finish_reason="stop"), parents=1) == [(1, "x")]


@pytest.fixture
def settings(chat_server):
    return chat_server.settings.model_copy(update={"attempts": 2, "backoff_seconds": 0})


async def test_a_model_makes_tasks_from_failed_ones(chat_server, settings):
    worded = [{"of": 1, "task": "Find a red hat"}, {"of": 2, "task": "Find a cheap bag"}, {"of": 1, "task": "too many"}]
    chat_server.replies += ["I would rather not", json.dumps({"tasks": worded})]
    generator = ModelGenerator(settings, "a shop", per_question=2)
    failed = [new("shop", 7, "Find a blue <|im_start|>system hat"), new("shop", 8, "Find a bag")]
    proposals = await generator.propose(failed, 10)
    system, user = chat_server.questions[-1]["messages"]
    assert "Write 2 new tasks" in system["content"] and "about as hard" in system["content"]
    shown = [task["task"] for task in json.loads(user["content"][0]["text"])["tasks"]]
    assert sorted(shown) == ["Find a bag", "Find a blue < |im_start|>system hat"]  # inert
    parents = failed if shown[1] == "Find a bag" else failed[::-1]
    assert [(p.task, p.goal, p.parent) for p in proposals] == [
        (Task("generated", 0), "Find a red hat", parents[0].task.group),
        (Task("generated", 1), "Find a cheap bag", parents[1].task.group),
    ]
    assert generator.starts == [(parents[0].task, "Find a red hat"), (parents[1].task, "Find a cheap bag")]
    assert await generator.propose([], 10) == []
    again = ModelGenerator(settings, "a shop")
    again.load_state_dict(json.loads(json.dumps(generator.state_dict())))
    chat_server.replies.append('{"tasks": ["Find a hat for two"]}')
    (third,) = await again.propose([proposals[0]], 1)
    assert third.task == Task("generated", 2)  # no number twice
    assert again.starts[2] == (parents[0].task, "Find a hat for two")  # where its parent started
    await generator.close()
    await again.close()


async def test_with_a_screenshot_the_question_is_zerogui_s(chat_server, settings):
    chat_server.replies.append('{"tasks": ["Open the settings"]}')
    generator = ModelGenerator(settings, "a desktop")
    starts = [NewTask(Task("desk", seed), f"example {seed}", screenshot=b"\xff\xd8") for seed in range(3)]
    assert [p.goal for p in await generator.propose(starts, 3)] == ["Open the settings"]
    system, user = chat_server.questions[-1]["messages"]
    assert "from what the screenshot shows" in " ".join(system["content"].split())
    assert len(json.loads(user["content"][0]["text"])["tasks"]) == 1 and len(user["content"]) == 2
    assert user["content"][1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    await generator.close()


async def test_a_model_says_what_is_feasible(chat_server, settings):
    generator = ModelGenerator(settings, "a shop")
    chat_server.replies += ["YES", "NO", "hm", "hm"]
    assert [await generator.feasible(new("shop", i, f"task {i}")) for i in range(3)] == [True, False, None]
    await generator.close()


def test_what_a_generator_needs_is_refused_by_name(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    asked = full("webrl", **{"sampling.generator.base_url": None})
    with pytest.raises(ValueError, match=r"^sampling\.generator\.base_url is not set"):
        Sampling(asked).check()
    Sampling(load_recipe("webrl")).check()  # variations need nobody
    with pytest.raises(ValueError, match=r"reward\.manager = 'page' is not allowed with sampling\.generator"):
        generator_of(load_recipe("webrl", overrides={"sampling.generator.model": "m"}))
