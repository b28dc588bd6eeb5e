"""The batch that a run's `Sampling` asks for: its next tasks, played by all ranks until the group filter is content.

TRL fixes how many trajectories a batch has. So a group without signal is replaced before stock code sees it, and what
was played and left out stands beside the batch, for metrics and logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from accelerate.utils import gather_object

from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.sampling.filters import NoSignal, why_dropped
from webagent_core.sampling.state import Sampling
from webagent_core.tasks.task import Task

# One episode for each task, in order.
PlayTasks = Callable[[Sequence[Task]], list[Trajectory]]


@dataclass
class SampledBatch:
    """This rank's share of a batch.

    Attributes:
        trajectories: as many as the rank has places. Where too few groups have signal, groups without it fill up; the
            objective gives those no row.
        left_out: played for the batch, and not in it.
        metrics: of the filter, all ranks together.
        no_signal: why training ends with this batch, or None.
    """

    trajectories: list[Trajectory]
    left_out: list[Trajectory] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    no_signal: str | None = None


def play_batch(
    sampling: Sampling, play: PlayTasks, *, places: int, group_size: int, rank: int, ranks: int
) -> SampledBatch:
    """Play the next batch. All ranks call this at a time, with equal states of `sampling`, which stay equal.

    Args:
        places: trajectories of this batch on each rank.

    Raises:
        ValueError: the filter wants another number of groups than the batch has, or groups would lie across ranks.
    """
    if sampling.groups is None:
        groups = sampling.tasks.next(places * ranks // group_size)
        tasks = [task for task in groups for _ in range(group_size)]
        return SampledBatch(_filled(play(tasks[rank * places : (rank + 1) * places]), places))
    if places % group_size or places * ranks // group_size != sampling.groups.wanted:
        raise ValueError(
            f"{places} trajectories a rank, groups of {group_size}, {ranks} ranks: not allowed with a group filter that"
            f" wants {sampling.groups.wanted} groups; each rank needs whole groups, and all of them together that many"
        )
    rounds = _Rounds(play, group_size, rank, [places // group_size] * ranks)
    batch = sampling.groups.refill(sampling.tasks.next, rounds)
    no_signal = None
    try:
        sampling.groups.end(batch)
    except NoSignal as error:
        no_signal = str(error)
    kept = [trajectory for group in batch.groups for trajectory in group]
    others = [trajectory for group in batch.others for trajectory in group]
    room = places - len(kept)
    metrics = batch.metrics() | {"groups/refills": float(max(0, rounds.played - 1))}
    return SampledBatch(_filled(kept + others[:room], places), others[room:], metrics, no_signal)


@dataclass
class _Rounds:
    """`GroupFilter.refill`'s play for all ranks: each plays as many of the tasks as it misses groups.

    Every rank learns the outcomes of all groups; those that another one played are empty.
    """

    play: PlayTasks
    group_size: int
    rank: int
    missing: list[int]  # groups, by rank
    played: int = 0

    def __call__(self, tasks: Sequence[Task]) -> list[tuple[list[Trajectory], list[float | None]]]:
        self.played += 1
        shares, left = [], list(tasks)
        for count in self.missing:
            shares.append(left[:count])
            del left[:count]
        played = self.play([task for task in shares[self.rank] for _ in range(self.group_size)])
        own = [played[start : start + self.group_size] for start in range(0, len(played), self.group_size)]
        outcomes = iter(gather_object([[t.score for t in group] for group in own]))
        groups = []
        for of_rank, share in enumerate(shares):
            for index, task in enumerate(share):
                groups.append((own[index] if of_rank == self.rank else [], next(outcomes)))
                self.missing[of_rank] -= why_dropped(task, groups[-1][1]) is None
        return groups


def _filled(trajectories: list[Trajectory], places: int) -> list[Trajectory]:
    """Where there were too few tasks, a place stays empty: nothing was played there."""
    nothing = [Trajectory("", 0, "", exit_status=ExitStatus.CANCELLED) for _ in range(places - len(trajectories))]
    return trajectories + nothing
