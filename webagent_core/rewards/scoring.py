"""Scoring beside whatever else goes on: a reward manager on an event loop of its own, for trainers that are not async.

The browsers' loop and the trainer's thread never wait for a judge that is slow, until the rewards are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from webagent_core.episode.trajectory import Trajectory
from webagent_core.rewards.reward_manager import Reward, RewardManager, record, score_one, slots_for


class Scoring:
    """`submit` each trajectory when it ends, from any thread, then `finish` with all of them.

    Args:
        concurrency: how many are scored at a time, where `score` is async.
    """

    def __init__(self, manager: RewardManager, *, concurrency: int = 64) -> None:
        from webagent_core.episode.rollout import EventLoopThread  # brings Playwright, which scoring does not need

        self.manager = manager
        self._slots = slots_for(concurrency)
        self._loop = EventLoopThread()
        self.waited_seconds = 0.0  # by `finish`, for what was not scored by then
        self._running: dict[int, tuple[Trajectory, Future[Reward]]] = {}  # by id, which is unique while we hold it

    def submit(self, trajectory: Trajectory) -> None:
        """Start to score it."""
        self._running[id(trajectory)] = (trajectory, self._loop.submit(self._score(trajectory)))

    def finish(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        """The rewards in order, written into the trajectories (`record`); those never submitted are scored now.

        Raises:
            RewardError: see `score_one`. The others are no longer scored then.
        """
        for trajectory in trajectories:
            if id(trajectory) not in self._running:
                self.submit(trajectory)
        running = [self._running.pop(id(trajectory))[1] for trajectory in trajectories]
        started = time.perf_counter()
        try:
            rewards = [each.result() for each in running]
        except BaseException:
            for each in running:
                each.cancel()
            raise
        finally:
            self.waited_seconds += time.perf_counter() - started
        record(trajectories, rewards)
        return rewards

    async def _score(self, trajectory: Trajectory) -> Reward:
        async with self._slots:
            return await score_one(self.manager, trajectory)


def trl_reward(manager: RewardManager, *, concurrency: int = 64) -> Callable[..., list[float | None]]:
    """`manager` as a TRL reward function: takes the column `trajectory`, gives a number or None (invalid) for each.

    The trajectories are told too (`record`), so that counts by exit status, success metrics and dumps agree with the
    loss. Managers run on an event loop of their own: a judge's connections live as long as the function.
    """
    scoring: Scoring | None = None

    def reward(trajectory: Sequence[Trajectory], **_: Any) -> list[float | None]:
        nonlocal scoring
        scoring = scoring or Scoring(manager, concurrency=concurrency)
        return [each.value for each in scoring.finish(trajectory)]

    reward.__name__ = type(manager).__name__  # the name of TRL's metrics: rewards/<name>/mean
    return reward
