"""All that one run needs of sampling, made from its recipe, with one state for its checkpoints.

    sampling = Sampling(recipe)
    batch = sampling.groups.refill(sampling.tasks.next, play)              # where the recipe filters groups
    earlier = sampling.join(entries)                                       # where it replays: planned beside the batch
    plan = sampling.choose(objective.plan(facts), entries + earlier)       # where it trains on some of the rows
    sampling.update += 1                                                   # the update is finished
    checkpoint["sampling"] = sampling.state_dict()

A run that is resumed from this state makes the same choices as one that was never stopped. Save between updates, or
anywhere else: the state is that of the moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from webagent_core.objectives import Plan
from webagent_core.recipe import Recipe
from webagent_core.sampling.curriculum import MINIWOB_DIFFICULTY, StepLimits
from webagent_core.sampling.filters import GroupFilter
from webagent_core.sampling.generated_goals import GeneratedGoals
from webagent_core.sampling.progress import Progress
from webagent_core.sampling.random_state import load_rng, rng_state
from webagent_core.sampling.replay import Perplexities, PerplexityReplay, RecentReplay, SuccessReplay
from webagent_core.sampling.rows import choose_rows, keep_rows
from webagent_core.sampling.stored import Stored
from webagent_core.sampling.task_filter import TaskFilter
from webagent_core.sampling.task_generation import (
    Generator,
    ModelGenerator,
    NewTask,
    collect,
    describe_left_out,
    generator_of,
)
from webagent_core.sampling.task_phases import PhaseReport, TaskPhases, Values
from webagent_core.sampling.task_source import TaskSource
from webagent_core.tasks.task import Task, TaskSet

VERSION = 2

Replay = SuccessReplay | PerplexityReplay | RecentReplay


class Sampling:
    """A run's sampling. A part is None where the recipe does not have it, or has it switched off.

    Attributes:
        update: finished updates.
        tasks: what is played next.
        step_limits: how long an episode may get.
        groups: the filter that refills a batch.
        staleness: batches between the play of a batch and the update that it is for.
        replay: the buffer of earlier successes.
        task_filter: the choice of tasks before training; put what it keeps into `tasks.restrict`.
        candidates: the single tasks that it chooses from.
        updates_per_phase: length of a phase; None: the whole run is one.
        phases: new tasks after each phase, see `next_phase`.
        generated_tasks: new tasks before all others, see `first_stage`; 0: none.
        generator: what makes new tasks.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        generator: Generator | None = None,
        difficulty: Mapping[str, int] = MINIWOB_DIFFICULTY,
    ) -> None:
        self.recipe, self.seed = recipe.type, recipe.train.seed
        self.updates = recipe.train.updates
        self.update = 0
        self.tasks = TaskSource.of(recipe)
        self.step_limits = StepLimits.of(recipe, difficulty)
        self.groups = GroupFilter.of(recipe)
        self.staleness = (recipe.sampling.max_staleness if recipe.sampling else None) or 0
        buffers = (kind.of(recipe) for kind in (SuccessReplay, PerplexityReplay, RecentReplay))
        self.replay: Replay | None = next((buffer for buffer in buffers if buffer is not None), None)
        self.task_filter = TaskFilter.of(recipe)
        count = (recipe.sampling.candidate_tasks if recipe.sampling else None) or len(recipe.tasks.names)
        self.candidates = TaskSource.of(recipe).next(count) if self.task_filter else []
        self.updates_per_phase = recipe.sampling.updates_per_phase if recipe.sampling else None
        self.phases = TaskPhases.of(recipe)
        self.generated_tasks = (recipe.sampling.generated_tasks if recipe.sampling else None) or 0
        self.generated_epochs = (recipe.sampling.generated_epochs if recipe.sampling else None) or 1
        self.generator = generator or generator_of(recipe)
        self._starts = TaskSource.of(recipe)
        # Where a buffer draws the rows it has its own limit.
        of_recipe = recipe.sampling.rows_per_update if recipe.sampling else None
        self.rows_per_update = None if isinstance(self.replay, RecentReplay) else of_recipe
        self.rng = random.Random(f"rows/{self.seed}")
        self._replayed: dict[str, tuple[int, ...]] = {}  # of the batch at hand: by id, the steps that were chosen
        self._parts = {
            "tasks": self.tasks,
            "groups": self.groups,
            "replay": self.replay,
            "phases": self.phases,
            "generator": self.generator,
        }

    @property
    def progress(self) -> Progress:
        return Progress(self.update, self.updates)

    @property
    def phase_start(self) -> int:
        """How many updates came before the phase that the next update belongs to."""
        return self.update - self.update % self.updates_per_phase if self.updates_per_phase else 0

    @property
    def between_phases(self) -> bool:
        """Whether the last update ended a phase and another one follows."""
        return 0 < self.update == self.phase_start

    # ------------------------------------------------------------------------------------------------ new tasks

    def check(self) -> None:
        """Raises ValueError where the model that is to word tasks cannot be asked."""
        if isinstance(self.generator, ModelGenerator):
            self.generator.client  # noqa: B018

    def task_set(self, pages: TaskSet) -> TaskSet:
        """The task set that plays the run's tasks, those included that a model words."""
        return GeneratedGoals(pages, self.generator) if isinstance(self.generator, ModelGenerator) else pages

    def start_pages(self) -> list[Task]:
        """Pages to look at before `first_stage`: each task's, and more of them where many tasks are to be made."""
        per_page = self.generator.per_question if isinstance(self.generator, ModelGenerator) else math.inf
        return self._starts.next(max(len(self._starts.entries), math.ceil(self.generated_tasks / per_page)))

    async def first_stage(self, starts: Sequence[NewTask]) -> str:
        """ZeroGUI's first stage: make tasks from start pages, to be played before all others. Returns what came of it.

        Args:
            starts: `start_pages` with goal and screenshot, as `look_at` sees them.
        """
        known: set[Task | str] = {start.wording for start in starts}
        new, left_out = await collect(self.generator, starts, self.generated_tasks, known)
        await self.generator.close()
        self.tasks.begin_with([each.task for each in new], self.generated_epochs)
        rest = describe_left_out(left_out)
        return f"first stage: {len(new)} of {self.generated_tasks} generated tasks; left out: {rest}"

    def played(self, task: Task, outcomes: Sequence[float | None], goal: str = "") -> None:
        """What came of a group's attempts, None for an invalid one, for the tasks of the next phase."""
        if self.phases is not None:
            self.phases.record(NewTask(task, goal), outcomes)

    async def next_phase(self, values: Values) -> PhaseReport | None:
        """Between two phases: make new tasks from what failed and let them join; None where the recipe makes none.

        Args:
            values: the critic's value of each proposal's first state, None where its page did not open.
        """
        if self.phases is None:
            return None
        report = await self.phases.next_phase(self.generator, values)
        await self.generator.close()
        self.tasks.add([new.task for new in report.new])
        return report

    # ------------------------------------------------------------------------------------------------ a batch

    def join(self, batch: Sequence[Stored | None], perplexities: Perplexities | None = None) -> list[Stored]:
        """Earlier trajectories to plan beside a batch, whose own successes go into the buffer.

        ARPO: a stored success for each group that wants one. WebGym: what is left of the iterations before this one.
        WebRL: successes of earlier phases with actions that are neither too familiar nor too strange.

        Args:
            batch: its scored trajectories, None for an invalid one.
            perplexities: under the policy that starts the phase; None: WebRL's buffer gives nothing.
        """
        entries = [entry for entry in batch if entry is not None]
        if isinstance(self.replay, SuccessReplay):
            groups: dict[str, list[float]] = {}
            for entry in entries:
                groups.setdefault(entry.task, []).append(entry.outcome)
            offered = [self.replay.offer(task, outcomes) for task, outcomes in groups.items()]
            for entry in entries:
                self.replay.add(entry)
            return [entry for entry in offered if entry is not None]
        if isinstance(self.replay, RecentReplay):
            self.replay.add_iteration(self.update, entries)
            new = {entry.id for entry in entries}
            return [entry for entry in self.replay.entries() if entry.id not in new]
        if isinstance(self.replay, PerplexityReplay):
            new_actions = sum(entry.steps for entry in entries)
            chosen = self.replay.choose(new_actions, perplexities, self.phase_start) if perplexities else []
            for entry in entries:
                self.replay.add(entry)
            self._replayed = {each.entry.id: each.steps for each in chosen}
            return [each.entry for each in chosen]
        return []

    def choose(self, plan: Plan, entries: Sequence[Stored | None]) -> Plan:
        """The plan with the rows that are trained on: WebGym's draw from recent iterations, WebRL's chosen actions of
        what joined, else `subset`.

        Args:
            entries: of the plan's trajectories, in order, as `join` took and gave them. Not read by `subset`.
        """
        if isinstance(self.replay, PerplexityReplay):
            every = [range(len(each.rows)) for each in plan.trajectories]
            ids = [entry.id if entry is not None else None for entry in entries]
            return keep_rows(plan, [self._replayed.get(id, steps) for id, steps in zip(ids, every, strict=True)])
        if not isinstance(self.replay, RecentReplay):
            return self.subset(plan)
        live = {
            entry.id: [step for step, row in enumerate(each.rows) if row.coefficient]
            for entry, each in zip(entries, plan.trajectories, strict=True)
            if entry is not None
        }
        drawn = {chosen.entry.id: chosen.steps for chosen in self.replay.draw(live)}
        return keep_rows(plan, [drawn.get(entry.id, ()) if entry is not None else () for entry in entries])

    def subset(self, plan: Plan) -> Plan:
        """The plan with at most `sampling.rows_per_update` rows in the loss; the same plan without that setting."""
        if self.rows_per_update is None:
            return plan
        return keep_rows(plan, choose_rows(plan, self.rows_per_update, self.rng))

    def describe(self) -> str:
        """For people: one line a part, more for a buffer."""
        lines = [f"{self.recipe}: {self.update} of {self.updates} updates done", self.step_limits.describe()]
        lines += [part.describe() for part in self._parts.values() if part is not None and part is not self.generator]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """Plain data, which `torch.load(weights_only=True)` reads."""
        parts = {name: part.state_dict() for name, part in self._parts.items() if part is not None}
        return {
            "version": VERSION,
            "recipe": self.recipe,
            "seed": self.seed,
            "update": self.update,
            "rng": rng_state(self.rng),
            "parts": parts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises ValueError, in one line, for one of another version, recipe or seed, or with
        other parts (a switch was turned since); nothing is loaded then."""
        mine = {"version": VERSION, "recipe": self.recipe, "seed": self.seed}
        for name, value in mine.items():
            if state.get(name) != value:
                raise ValueError(f"the sampling state's {name} is {state.get(name)!r}, and this run's is {value!r}")
        parts = {name: part for name, part in self._parts.items() if part is not None}
        if set(parts) != set(state["parts"]):
            there, here = (", ".join(sorted(names)) for names in (state["parts"], parts))
            raise ValueError(f"the sampling state has {there}, and this run has {here}: a switch was turned since")
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
        load_rng(self.rng, state["rng"])
        self.update = state["update"]
