"""Demonstrations for warm-up: the scripted demonstrators played in the real browser."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.contexts import goal_of
from webagent_core.episode.rollout import Progress
from webagent_core.episode.runner import EpisodeRunner, Response
from webagent_core.episode.trajectory import Trajectory
from webagent_core.tasks.demonstrations import demonstrate
from webagent_core.tasks.task import Task


def gather(
    rollout: BrowserRollout, tasks: Sequence[Task], *, mistakes: float, seed: int, progress: Progress | None = None
) -> list[Trajectory]:
    """One demonstrated episode for each task, in order. The same arguments give the same demonstrations.

    Args:
        mistakes: chance, at every step, of a click on the page's last element instead of the right action. What comes
            after one is a demonstration of how to go on from there.
    """
    return rollout.loop.run(_gather(rollout.runner, tasks, mistakes, seed, progress))


async def _gather(
    runner: EpisodeRunner, tasks: Sequence[Task], mistakes: float, seed: int, progress: Progress | None
) -> list[Trajectory]:
    async def one(task: Task) -> Trajectory:
        rng, pages = random.Random(f"{seed}/{task.group}"), []

        async def answer(chat: list[dict]) -> Response:
            return Response(demonstrate(task.name, goal_of(chat), pages[-1].text, mistakes, rng))

        trajectory = await runner.run(task, answer, watch=pages.append)
        if progress:
            progress(trajectory)
        return trajectory

    return await asyncio.gather(*(one(task) for task in tasks))
