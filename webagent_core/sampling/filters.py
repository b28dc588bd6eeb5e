"""Group filters: a group without signal leaves the batch, and other tasks are played until the batch is full.

AsyncWebRL wants 16 groups of 8 with both outcomes, OpenWebRL 48 of 5, ZeroGUI samples until no flat group is left. How
many groups may be played for one batch is bounded, because on tasks that always fail (or always succeed) the search
for signal has no end of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from webagent_core.objectives.advantages import why_no_signal
from webagent_core.recipe import Recipe
from webagent_core.tasks.task import Task

Group = TypeVar("Group")
Reason = Literal["flat", "lone", "stale"]

MOST_PER_WANTED = 4  # groups played for one batch, over groups wanted; no paper gives its own bound
PATIENCE = 3  # batches in a row without one group that has signal, after which a run ends


class NoSignal(RuntimeError):
    """Batch after batch, no group has signal: there is nothing to train on. The message says what was played."""


@dataclass(frozen=True)
class Drop:
    """A group that left the batch."""

    reason: Reason
    task: str
    reward: float | None = None  # of a flat group


def why_dropped(task: Task, outcomes: Sequence[float | None], lag: int = 0, max_lag: int | None = None) -> Drop | None:
    """Why a group leaves the batch, or None.

    Args:
        outcomes: of its members, None for an invalid one. What the task says, where the reward is shaped.
        lag: policy versions between its oldest member and now; more than `max_lag` is "stale".
    """
    if max_lag is not None and lag > max_lag:
        return Drop("stale", task.name)
    reason = why_no_signal(outcomes)
    if reason is None:
        return None
    reward = next(float(f"{o:.9g}") for o in outcomes if o is not None) if reason == "flat" else None
    return Drop(reason, task.name, reward)


@dataclass
class Batch(Generic[Group]):
    """The groups of one optimizer step as they come in, and what happened to the others.

    How good the policy is shows in all groups that were played, `groups` and `others`: the first alone are a selection.
    """

    wanted: int
    most: int
    max_staleness: int | None = None
    groups: list[Group] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)  # of `groups`
    others: list[Group] = field(default_factory=list)  # played and left out ...
    dropped: list[Drop] = field(default_factory=list)  # ... each for this reason

    @property
    def played(self) -> int:
        return len(self.groups) + len(self.dropped)

    @property
    def room(self) -> int:
        """How many groups to play next: those that are missing, as far as the bound allows."""
        return max(0, min(self.wanted - len(self.groups), self.most - self.played))

    def offer(self, task: Task, group: Group, outcomes: Sequence[float | None], lag: int = 0) -> bool:
        """Take the group, or count why not. For a backend that plays all the time: until `room` is 0."""
        if not self.room:
            raise ValueError(f"the batch takes no more groups: {len(self.groups)} kept, {self.played} played")
        drop = why_dropped(task, outcomes, lag, self.max_staleness)
        if drop:
            self.others.append(group)
            self.dropped.append(drop)
        else:
            self.groups.append(group)
            self.tasks.append(task)
        return drop is None

    def metrics(self) -> dict[str, float]:
        reasons = Counter(drop.reason for drop in self.dropped)
        return {
            "groups/played": float(self.played),
            "groups/kept": float(len(self.groups)),
            "groups/missing": float(self.wanted - len(self.groups)),
            **{f"groups/dropped/{reason}": float(reasons[reason]) for reason in ("flat", "lone", "stale")},
        }


@dataclass
class GroupFilter:
    """Fills batches with groups that have signal.

    One batch in which none has any is no reason to stop a run: it is trained on not at all. After `patience` of them in
    a row `end` raises `NoSignal`.
    """

    wanted: int
    most: int | None = None  # groups played for one batch; None: `MOST_PER_WANTED` times `wanted`
    patience: int = PATIENCE
    max_staleness: int | None = None
    empty_batches: int = 0  # in a row
    dropped: Counter[Drop] = field(default_factory=Counter)  # in those

    def __post_init__(self) -> None:
        self.most = MOST_PER_WANTED * self.wanted if self.most is None else self.most
        if self.wanted < 1 or self.most < self.wanted or self.patience < 1:
            raise ValueError(
                f"wanted = {self.wanted}, most = {self.most}, patience = {self.patience} is not allowed: wanted >= 1,"
                " most >= wanted, patience >= 1"
            )

    @classmethod
    def of(cls, recipe: Recipe) -> GroupFilter | None:
        """The filter of a recipe whose objective drops flat groups (`objective.drop_flat_groups`), else None."""
        if not recipe.load_objective().model_dump().get("drop_flat_groups", False):
            return None
        staleness = recipe.sampling.max_staleness if recipe.sampling else None
        return cls(recipe.rollout.groups_per_update, max_staleness=staleness)

    def batch(self) -> Batch:
        """An empty batch, for a backend that offers groups by itself; give it to `end` when it is done."""
        return Batch(self.wanted, self.most, self.max_staleness)

    def refill(
        self,
        next_tasks: Callable[[int], Sequence[Task]],
        play: Callable[[Sequence[Task]], Sequence[tuple[Group, Sequence[float | None]]]],
    ) -> Batch[Group]:
        """Play until the batch is full, its bound is reached or the tasks are used up; then give it to `end`.

        Args:
            next_tasks: up to n more tasks; none: there are no more.
            play: for each task, in order, a group and the outcomes of its members, None for an invalid one.

        Raises:
            ValueError: `play` did not return one group a task, or `next_tasks` returned more than it was asked for.
        """
        batch: Batch[Group] = self.batch()
        while batch.room:
            tasks = next_tasks(batch.room)
            if not tasks:
                break
            if len(tasks) > batch.room:
                raise ValueError(f"next_tasks returned {len(tasks)} tasks, and was asked for {batch.room}")
            groups = play(tasks)
            if len(groups) != len(tasks):
                raise ValueError(f"play returned {len(groups)} groups for {len(tasks)} tasks")
            for task, (group, outcomes) in zip(tasks, groups, strict=True):
                batch.offer(task, group, outcomes)
        return batch

    def end(self, batch: Batch) -> None:
        """Count a batch that gets no more groups.

        Raises:
            NoSignal: this is the `patience`-th batch in a row without a group that has signal.
        """
        if batch.groups:
            self.empty_batches, self.dropped = 0, Counter()
            return
        self.empty_batches += 1
        self.dropped.update(batch.dropped)
        if self.empty_batches >= self.patience:
            raise NoSignal(no_signal_message(self.empty_batches, self.dropped))

    def describe(self) -> str:
        text = f"group filter: {self.wanted} groups with signal a batch, at most {self.most} played for it"
        if self.max_staleness is not None:
            text += f", at most {self.max_staleness} policy versions old"
        return text + (f"; {self.empty_batches} batches in a row had none" if self.empty_batches else "")

    def state_dict(self) -> dict[str, Any]:
        dropped = [[drop.reason, drop.task, drop.reward, count] for drop, count in self.dropped.items()]
        return {"empty_batches": self.empty_batches, "dropped": dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.empty_batches = state["empty_batches"]
        self.dropped = Counter({Drop(*drop): count for *drop, count in state["dropped"]})


def no_signal_message(batches: int, dropped: Counter[Drop]) -> str:
    """How many groups of which tasks were flat at which reward, and what else became of groups."""
    played = sum(dropped.values())
    if not played:
        return f"no group has signal: {batches} batches in a row were empty, because there were no tasks to play"
    by_kind: dict[tuple[Reason, float | None], Counter[str]] = {}
    for drop, count in dropped.items():
        by_kind.setdefault((drop.reason, drop.reward), Counter())[drop.task] += count
    said = []
    for (reason, reward), tasks in sorted(by_kind.items(), key=lambda kind: -sum(kind[1].values())):
        what = {"flat": f"flat at reward {reward:g}" if reward is not None else "flat", "stale": "too old",
                "lone": "with fewer than two valid members"}[reason]  # fmt: skip
        named = ", ".join(f"{task} {count}" for task, count in tasks.most_common(5))
        more = f" and {len(tasks) - 5} more tasks" if len(tasks) > 5 else ""
        said.append(f"{_groups(sum(tasks.values()))} {what} ({named}{more})")
    where = f"{batches} batches in a row" if batches > 1 else "1 batch"
    return f"no group has signal in {where}: {_groups(played)} played, {'; '.join(said)}"


def _groups(count: int) -> str:
    return f"{count} group{'s' if count > 1 else ''}"
