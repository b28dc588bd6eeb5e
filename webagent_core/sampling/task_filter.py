"""ARPO's choice of tasks before training: those that the starting policy solves at least once in 16 attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from webagent_core.recipe import Recipe
from webagent_core.tasks.task import Task

ROUNDS = 3  # of trials, where some of them were invalid


@dataclass(frozen=True)
class Tried:
    """A task's valid trials. `undecided`: fewer than were asked for, and not enough of them successes."""

    task: Task
    trials: int
    successes: int
    kept: bool
    undecided: bool = False

    @property
    def pass_rate(self) -> float | None:
        return self.successes / self.trials if self.trials else None


@dataclass(frozen=True)
class TaskFilter:
    """`trials` attempts at a task, of which `min_successes` must succeed (ARPO, experiments: 16 and 1)."""

    trials: int = 16
    min_successes: int = 1

    def __post_init__(self) -> None:
        if self.trials < 1 or not 1 <= self.min_successes <= self.trials:
            raise ValueError(
                f"trials = {self.trials}, min_successes = {self.min_successes} is not allowed: trials >= 1,"
                " min_successes between 1 and trials"
            )

    @classmethod
    def of(cls, recipe: Recipe) -> TaskFilter | None:
        """The filter of a recipe that has `sampling.task_trials`, else None."""
        if not recipe.sampling or recipe.sampling.task_trials is None:
            return None
        successes = recipe.sampling.task_min_successes
        return cls(recipe.sampling.task_trials, 1 if successes is None else successes)

    def select(self, tasks: Sequence[Task], play: Callable[[Sequence[Task]], Sequence[float | None]]) -> list[Tried]:
        """Try every task; one entry each, in order.

        An invalid attempt is no trial: it is repeated, twice at most. A task that still lacks trials and successes is
        left out, as undecided: nothing shows that it can be solved.

        Args:
            play: one attempt at each task (a task stands in the list once for each attempt); outcomes, None: invalid.
        """
        counts = {task: [0, 0] for task in tasks}  # trials, successes
        for _ in range(ROUNDS):
            wanted = [t for t, (trials, ok) in counts.items() if trials < self.trials and ok < self.min_successes]
            attempts = [task for task in wanted for _ in range(self.trials - counts[task][0])]
            if not attempts:
                break
            for task, outcome in zip(attempts, play(attempts), strict=True):
                if outcome is not None:
                    counts[task][0] += 1
                    counts[task][1] += outcome >= 1
        tried = []
        for task in tasks:
            trials, successes = counts[task]
            kept = successes >= self.min_successes
            tried.append(Tried(task, trials, successes, kept, undecided=not kept and trials < self.trials))
        return tried


def describe_selection(tried: Sequence[Tried]) -> str:
    kept, undecided = sum(t.kept for t in tried), sum(t.undecided for t in tried)
    return f"task filter: {kept} of {len(tried)} tasks kept, {len(tried) - kept - undecided} never solved" + (
        f", {undecided} undecided because attempts were invalid" if undecided else ""
    )
