"""Replay of earlier successes: per task into groups that failed (ARPO), by perplexity (WebRL), by recency (WebGym).

The buffers hold and choose; they compute no loss. What they give out is offered to `Objective.plan` as facts with
`stored=True` (ARPO), or planned beside the new trajectories with only the chosen rows left in (`rows.keep_rows`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from webagent_core.objectives.replay import ReplayRule, wants_replay
from webagent_core.recipe import Recipe
from webagent_core.sampling.random_state import load_rng, rng_state
from webagent_core.sampling.rows import weighted_choice
from webagent_core.sampling.stored import Stored, load_stored, stored_state

# For each of these trajectories, the perplexity of each step's action under the policy that starts this phase.
Perplexities = Callable[[Sequence[Stored]], Sequence[Sequence[float]]]

ROUNDING = 1e-9  # relative: a perplexity that was computed as exp(-mean) still lies on the edge of its window


def is_success(outcome: float) -> bool:
    return outcome >= 1


class SuccessReplay:
    """ARPO (arXiv:2505.16282), section 3.5: a few successes of each task, oldest out, for groups in which all failed.

    Ask with `offer` for every group of a batch and put what it returns beside the group's own trajectories as
    `TrajectoryFacts(stored=True)`; the objective replaces a member with it before the advantages. Then `add` the
    batch's own trajectories, not those that were replayed.
    """

    def __init__(self, capacity: int, rule: ReplayRule = "all_failed", seed: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity} is not allowed: >= 1, successes per task")
        self.capacity, self.rule = capacity, rule
        self.rng = random.Random(f"replay/{seed}")
        self.tasks: dict[str, list[Stored]] = {}  # oldest first

    @classmethod
    def of(cls, recipe: Recipe) -> SuccessReplay | None:
        """The buffer of a recipe with `sampling.replay_capacity`; None with `objective.replay: false`."""
        if not recipe.sampling or recipe.sampling.replay_capacity is None:
            return None
        objective = recipe.load_objective()
        if not objective.replay:
            return None
        return cls(recipe.sampling.replay_capacity, objective.replay_rule, recipe.train.seed)

    def add(self, entry: Stored) -> bool:
        """Keep a success; a failure is not kept."""
        if not is_success(entry.outcome):
            return False
        kept = self.tasks.setdefault(entry.task, [])
        kept.append(entry)
        del kept[: -self.capacity]
        return True

    def offer(self, task: str, outcomes: Sequence[float | None]) -> Stored | None:
        """A stored success of this very task for a group with these outcomes (None: an invalid member), or None.

        Outcomes are the task's own: a penalty on the format makes a reward lower and no failure a success.
        """
        kept = self.tasks.get(task)
        if not kept or not wants_replay([o for o in outcomes if o is not None], self.rule):
            return None
        return self.rng.choice(kept)

    def __len__(self) -> int:
        return sum(map(len, self.tasks.values()))

    def describe(self) -> str:
        lines = [f"replay: {len(self)} successes of {len(self.tasks)} tasks, at most {self.capacity} of one"]
        for task, kept in self.tasks.items():
            lines.append(f"  {task}: {len(kept)}, of updates {', '.join(str(entry.update + 1) for entry in kept)}")
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        return {"tasks": {t: stored_state(kept) for t, kept in self.tasks.items()}, "rng": rng_state(self.rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tasks = {task: load_stored(kept)[-self.capacity :] for task, kept in state["tasks"].items()}
        load_rng(self.rng, state["rng"])


@dataclass(frozen=True)
class ChosenSteps:
    """A stored trajectory and which of its steps are to be trained on; the critic may want all of them."""

    entry: Stored
    steps: tuple[int, ...]


def perplexity(mean_logp: float) -> float:
    """exp(-mean token log-probability) of an action."""
    return math.exp(-mean_logp)


class PerplexityReplay:
    """WebRL (ICLR 2025), replay: actions of earlier successes that are neither too familiar nor too strange.

    Only actions whose perplexity under the previous policy lies in the closed window [1/max_probability,
    1/min_probability] are taken, at most `ratio` times as many as there are new ones.
    """

    def __init__(
        self, min_probability: float = 0.5, max_probability: float = 0.95, ratio: float = 2.0, seed: int = 0
    ) -> None:
        if not 0 < min_probability <= max_probability <= 1 or ratio < 0:
            raise ValueError(
                f"min_probability = {min_probability}, max_probability = {max_probability}, ratio = {ratio} is not"
                " allowed: 0 < min_probability <= max_probability <= 1, ratio >= 0"
            )
        self.min_probability, self.max_probability, self.ratio = min_probability, max_probability, ratio
        self.rng = random.Random(f"replay/{seed}")
        self.entries: list[Stored] = []  # oldest first

    @classmethod
    def of(cls, recipe: Recipe) -> PerplexityReplay | None:
        """The buffer of a recipe with `sampling.replay_ratio`; None where that is 0."""
        sampling = recipe.sampling
        if not sampling or not sampling.replay_ratio:
            return None
        low, high = sampling.replay_min_probability, sampling.replay_max_probability
        return cls(0.5 if low is None else low, 1.0 if high is None else high, sampling.replay_ratio, recipe.train.seed)

    def add(self, entry: Stored) -> bool:
        """Keep a success; a failure is not kept."""
        if is_success(entry.outcome):
            self.entries.append(entry)
        return is_success(entry.outcome)

    def eligible(self, action_perplexity: float) -> bool:
        probability = 1 / action_perplexity
        low, high = self.min_probability * (1 - ROUNDING), self.max_probability * (1 + ROUNDING)
        return low <= probability <= high

    def most(self, new_actions: int) -> int:
        return math.floor(self.ratio * new_actions)

    def choose(self, new_actions: int, perplexities: Perplexities, before: int | None = None) -> list[ChosenSteps]:
        """Actions to train on beside `new_actions` new ones, drawn evenly from all eligible ones.

        Args:
            before: only what was played before this update is looked at: WebRL replays earlier phases. None: all.
        """
        entries = [entry for entry in self.entries if before is None or entry.update < before]
        scored = perplexities(entries) if entries and self.most(new_actions) else []
        eligible = [
            (index, step)
            for index, of_steps in enumerate(scored)
            for step, value in enumerate(of_steps)
            if self.eligible(value)
        ]
        taken = sorted(self.rng.sample(eligible, min(self.most(new_actions), len(eligible))))
        by_entry: dict[int, list[int]] = {}
        for index, step in taken:
            by_entry.setdefault(index, []).append(step)
        return [ChosenSteps(entries[index], tuple(steps)) for index, steps in by_entry.items()]

    def __len__(self) -> int:
        return len(self.entries)

    def describe(self) -> str:
        steps = sum(entry.steps for entry in self.entries)
        return (
            f"replay: {len(self)} successes with {steps} actions of {len({e.task for e in self.entries})} tasks; taken"
            f" are those of perplexity {1 / self.max_probability:.3g} to {1 / self.min_probability:.3g}, at most"
            f" {self.ratio:g} times the new ones"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"entries": stored_state(self.entries), "rng": rng_state(self.rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.entries = load_stored(state["entries"])
        load_rng(self.rng, state["rng"])


class RecentReplay:
    """WebGym (CVPR 2026), authors' code: `rows` steps of the successes of the last `window` iterations.

    A step of the iteration in place p among those kept (the oldest is 0) has weight (p + 1)^power; steps are drawn
    without replacement. Call `add_iteration` with an iteration's trajectories, then `draw`. A failure is kept as one
    of no steps, since the expectation over trajectories counts it.
    """

    def __init__(self, rows: int | None = None, power: float = 2.0, window: int = 4, seed: int = 0) -> None:
        if window < 1 or power < 0 or (rows is not None and rows < 1):
            raise ValueError(
                f"rows = {rows}, power = {power}, window = {window} is not allowed: rows >= 1, power >= 0, window >= 1"
            )
        self.rows, self.power, self.window = rows, power, window
        self.rng = random.Random(f"replay/{seed}")
        self.iterations: list[tuple[int, list[Stored]]] = []  # (update, trajectories), oldest first

    @classmethod
    def of(cls, recipe: Recipe) -> RecentReplay | None:
        """The buffer of a recipe with `sampling.recency_window`, else None."""
        sampling = recipe.sampling
        if not sampling or sampling.recency_window is None:
            return None
        power = 0.0 if sampling.recency_power is None else sampling.recency_power
        return cls(sampling.rows_per_update, power, sampling.recency_window, recipe.train.seed)

    def add_iteration(self, update: int, entries: Sequence[Stored]) -> None:
        """The trajectories of one iteration."""
        self.iterations.append((update, [e if is_success(e.outcome) else _without_steps(e) for e in entries]))
        del self.iterations[: -self.window]

    def entries(self) -> list[Stored]:
        return [entry for _, kept in self.iterations for entry in kept]

    def draw(self, live: Mapping[str, Collection[int]] | None = None) -> list[ChosenSteps]:
        """The steps to train on, those of the newest iteration among them.

        Args:
            live: by id, the steps of a trajectory that may be trained on (an action that changed nothing may not);
                None: all of all.
        """
        steps, weights = [], []
        for place, (_, kept) in enumerate(self.iterations):
            for entry in kept:
                allowed = range(entry.steps) if live is None else sorted(live.get(entry.id, ()))
                steps += [(entry.id, step) for step in allowed]
                weights += [(place + 1) ** self.power] * len(allowed)
        limit = len(steps) if self.rows is None else self.rows
        taken: dict[str, list[int]] = {}
        for index in weighted_choice(weights, limit, self.rng):
            taken.setdefault(steps[index][0], []).append(steps[index][1])
        return [ChosenSteps(entry, tuple(taken[entry.id])) for entry in self.entries() if entry.id in taken]

    def __len__(self) -> int:
        return sum(is_success(entry.outcome) for entry in self.entries())

    def describe(self) -> str:
        lines = [
            f"replay: {len(self)} successes of the last {len(self.iterations)} of at most {self.window} iterations,"
            f" {'all' if self.rows is None else self.rows} steps drawn an update"
        ]
        for place, (update, kept) in enumerate(self.iterations):
            steps, weight = sum(entry.steps for entry in kept), (place + 1) ** self.power
            successes = sum(is_success(entry.outcome) for entry in kept)
            lines.append(f"  update {update + 1}: {successes} successes, {steps} steps of weight {weight:g}")
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        iterations = [[update, stored_state(kept)] for update, kept in self.iterations]
        return {"iterations": iterations, "rng": rng_state(self.rng)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iterations = [(update, load_stored(kept)) for update, kept in state["iterations"]][-self.window :]
        load_rng(self.rng, state["rng"])


def _without_steps(entry: Stored) -> Stored:
    return replace(entry, steps=0, data=entry.data | {"steps": []} if entry.data else {})
