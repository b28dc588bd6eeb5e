"""Demonstrations for warm-up: the scripted demonstrators played in the real browser.

What a demonstrator does depends on the pages alone, so `gather` plays once for all papers, and `retold` shows the same
episodes as the context of one of them would have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from webagent_core.browser.page import Observation
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.contexts import ContextOverflow, PlaceholderContext, goal_of
from webagent_core.episode.rollout import Progress
from webagent_core.episode.runner import EpisodeRunner, Response
from webagent_core.episode.trajectory import Trajectory
from webagent_core.tasks.demonstrations import demonstrate
from webagent_core.tasks.task import Task


def gather(
    rollout: BrowserRollout, tasks: Sequence[Task], *, mistakes: float, seed: int, progress: Progress | None = None
) -> list[Trajectory]:
    """One demonstrated episode for each task, in order. The same arguments give the same demonstrations, whatever the
    context of `rollout` and its budget: its limits are kept, and no screenshots are taken.

    Args:
        mistakes: chance, at every step, of a click on the page's last element instead of the right action. What comes
            after one is a demonstration of how to go on from there.
    """
    runner = replace(rollout.runner, context=PlaceholderContext(), budget=None, screenshots=False)
    return rollout.loop.run(_gather(runner, tasks, mistakes, seed, progress))


def retold(runner: EpisodeRunner, trajectory: Trajectory) -> Trajectory:
    """The episode as if the policy of `runner` had played it: each step has that policy's chat. It ends where the
    context has no room for another step."""
    told = replace(trajectory, steps=[])
    for step in trajectory.steps:
        try:
            chat, cut, shown = runner.prompt(told, Observation(step.url, "", step.observation))
        except ContextOverflow:
            break
        told.steps.append(replace(step, messages=chat, cut=cut, shown=shown))
    return told


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
