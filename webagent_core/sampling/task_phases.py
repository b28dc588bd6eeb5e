"""WebRL's phases: what failed in one becomes new tasks of the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from webagent_core.recipe import Recipe
from webagent_core.sampling.task_generation import Generator, NewTask, collect, describe_left_out
from webagent_core.tasks.task import Task

# The critic's value of each proposal's first state; None where its page did not open.
Values = Callable[[Sequence[NewTask]], Awaitable[Sequence[float | None]]]


@dataclass
class PhaseReport:
    """A phase's new tasks, and what became of the other proposals."""

    phase: int
    wanted: int
    new: list[NewTask] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        rest = describe_left_out(self.left_out)
        return f"phase {self.phase}: {len(self.new)} of {self.wanted} new tasks; left out: {rest}"


class TaskPhases:
    """WebRL (ICLR 2025), curriculum: at the end of a phase, what failed in it becomes new tasks of the next.

    A proposal is kept if it is new, feasible, and the critic's value of its first state lies in the closed window
    [min_value, max_value]: neither hopeless nor solved.
    """

    def __init__(self, wanted: int, min_value: float = 0.05, max_value: float = 0.75) -> None:
        if wanted < 1 or not 0 <= min_value <= max_value <= 1:
            raise ValueError(
                f"wanted = {wanted}, min_value = {min_value}, max_value = {max_value} is not allowed: wanted >= 1,"
                " 0 <= min_value <= max_value <= 1"
            )
        self.wanted, self.min_value, self.max_value = wanted, min_value, max_value
        self.phase = 1
        self.tasks: list[NewTask] = []  # made so far
        self.best: dict[NewTask, float] = {}  # of the tasks played in this phase, the best outcome

    @classmethod
    def of(cls, recipe: Recipe) -> TaskPhases | None:
        """The phases of a recipe with `sampling.new_tasks_per_phase`, else None."""
        sampling = recipe.sampling
        if not sampling or sampling.new_tasks_per_phase is None:
            return None
        low, high = sampling.new_task_min_value, sampling.new_task_max_value
        return cls(sampling.new_tasks_per_phase, 0.0 if low is None else low, 1.0 if high is None else high)

    def too(self, value: float) -> str | None:
        """Why a critic's value is outside the window, or None."""
        return "too hard" if value < self.min_value else "too easy" if value > self.max_value else None

    def record(self, task: NewTask, outcomes: Sequence[float | None]) -> None:
        """What came of attempts at a task, None for an invalid one; call it for every group of the phase.

        A task with nothing but broken episodes did not fail.
        """
        valid = [outcome for outcome in outcomes if outcome is not None]
        if valid:
            self.best[task] = max([*valid, self.best.get(task, valid[0])])

    def failed(self) -> list[NewTask]:
        """Tasks that had a valid attempt in this phase and no success."""
        return [task for task, best in self.best.items() if best < 1]

    async def next_phase(self, generator: Generator, values: Values) -> PhaseReport:
        """End the phase and make new tasks for the next one, from what failed in it."""

        async def sieve(proposals: Sequence[NewTask]) -> list[str | None]:
            return ["not opened" if value is None else self.too(value) for value in await values(proposals)]

        known = {name for each in [*self.tasks, *self.best] for name in (each.task, each.wording) if name}
        made = await collect(generator, self.failed(), self.wanted, known, sieve)
        report = PhaseReport(self.phase + 1, self.wanted, *made)
        self.phase, self.best = self.phase + 1, {}
        self.tasks += report.new
        return report

    def describe(self) -> str:
        return (
            f"phases: in phase {self.phase}, {len(self.failed())} of {len(self.best)} tasks failed so far;"
            f" {len(self.tasks)} new ones made; up to {self.wanted} a phase, of critic's"
            f" value {self.min_value:g} to {self.max_value:g}"
        )

    def state_dict(self) -> dict[str, Any]:
        best = [[_plain(task), best] for task, best in self.best.items()]
        return {"phase": self.phase, "tasks": [_plain(task) for task in self.tasks], "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phase = state["phase"]
        self.tasks = [_new_task(task) for task in state["tasks"]]
        self.best = {_new_task(task): best for task, best in state["best"]}


def _plain(new: NewTask) -> list[Any]:
    return [new.task.name, new.task.seed, new.goal, new.parent]


def _new_task(plain: Sequence[Any]) -> NewTask:
    name, seed, goal, parent = plain
    return NewTask(Task(name, seed), goal, parent)
