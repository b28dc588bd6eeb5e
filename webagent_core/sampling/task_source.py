"""Tasks without end, in a seeded order: what a run plays next, also where a filter asks for more than was planned."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

from webagent_core.recipe import Recipe
from webagent_core.sampling.random_state import load_rng, rng_state
from webagent_core.tasks.schedule import draw_seed, training_seeds
from webagent_core.tasks.task import Task


class TaskSource:
    """Task after task: all of its entries in turn, each time shuffled.

    An entry is a task's name, which is played with another one of `seeds` each time (see `draw_seed`), or one task with
    its own seed. As long as nothing was added or restricted, the order is that of
    `webagent_core.tasks.schedule.training_tasks`.
    """

    def __init__(self, entries: Sequence[str | Task], seeds: Sequence[int], seed: int = 0) -> None:
        if not entries:
            raise ValueError("entries = [] is not allowed: one task or more")
        self.entries = list(entries)
        self.seeds = seeds
        self.rng = random.Random(f"tasks/{seed}")
        self.first: list[Task] = []  # come before all others, the last one first
        self.left: list[str | Task] = []  # of this turn; the last one is next
        self.seeds_left: list[int] = []  # likewise, where there are only so many
        self.given = 0

    @classmethod
    def of(cls, recipe: Recipe) -> TaskSource:
        return cls(recipe.tasks.names, training_seeds(recipe), recipe.train.seed)

    def next(self, count: int) -> list[Task]:
        """The next tasks, exactly `count`. A single task comes twice only if there are fewer of them."""
        tasks: list[Task] = []
        for _ in range(count):
            if self.first:
                # A task that was given just now waits here too.
                place = max((i for i, task in enumerate(self.first) if task not in tasks), default=-1)
                tasks.append(self.first.pop(place))
                continue
            if not self.left:
                self.left = self.rng.sample(self.entries, len(self.entries))
                # Where a turn ends in the middle, what was given just now waits: equal tasks would be one group.
                self.left.sort(key=lambda entry: entry not in tasks)
            entry = self.left.pop()
            if isinstance(entry, str):
                entry = Task(entry, draw_seed(self.seeds, self.seeds_left, self.rng))
            tasks.append(entry)
        self.given += count
        return tasks

    def add(self, tasks: Sequence[Task]) -> int:
        """Let new tasks join from the next turn on (WebRL: the next phase); returns how many were not there yet."""
        new = [task for task in dict.fromkeys(tasks) if task not in self.entries]
        self.entries += new
        return len(new)

    def begin_with(self, tasks: Sequence[Task], epochs: int = 1) -> None:
        """Give these out before all others, each `epochs` times, shuffled each time (ZeroGUI's first stage)."""
        for _ in range(epochs):
            self.first = self.rng.sample(tasks, len(tasks)) + self.first

    def restrict(self, kept: Collection[str | Task]) -> None:
        """Play only these from now on (ARPO's choice of tasks). Raises ValueError if none is left."""
        if not kept:
            raise ValueError("kept = [] is not allowed: no task is left to train on")
        self.entries, self.left = list(dict.fromkeys(kept)), []

    def describe(self) -> str:
        own = sum(isinstance(entry, Task) for entry in self.entries)
        first = f"{len(self.first)} of a first stage, then " if self.first else ""
        rest = f"{len(self.entries) - own} names with fresh seeds and {own} single tasks"
        return f"tasks: {first}{rest}; {self.given} given out"

    def state_dict(self) -> dict[str, Any]:
        return {
            "entries": [_plain(entry) for entry in self.entries],
            "first": [_plain(entry) for entry in self.first],
            "left": [_plain(entry) for entry in self.left],
            "seeds_left": self.seeds_left,
            "given": self.given,
            "rng": rng_state(self.rng),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = [_entry(entry) for entry in state["entries"]]
        self.first = [_entry(entry) for entry in state["first"]]
        self.left = [_entry(entry) for entry in state["left"]]
        self.seeds_left = list(state["seeds_left"])
        self.given = state["given"]
        load_rng(self.rng, state["rng"])


def _plain(entry: str | Task) -> str | list[Any]:
    return [entry.name, entry.seed] if isinstance(entry, Task) else entry


def _entry(plain: str | list[Any]) -> str | Task:
    return plain if isinstance(plain, str) else Task(*plain)
