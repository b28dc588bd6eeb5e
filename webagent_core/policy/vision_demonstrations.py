"""Demonstrations for a policy that sees: somebody who knows where to press, played in the real browser.

The demonstrator is told by the page itself where its target lies, as a person is by looking, and answers with a point
in the coordinates of the recipe. What the policy learns from is the screenshot, the task and that answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from webagent_core.browser.page import WebPage
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.pictures import pictures_of
from webagent_core.episode.rollout import Progress
from webagent_core.episode.runner import EpisodeRunner, Response
from webagent_core.episode.trajectory import Trajectory
from webagent_core.tasks.targets import TARGETS, check_shown
from webagent_core.tasks.task import Task

_POINT = files(__package__).joinpath("visible_point.js").read_text()
# Pixels: who presses aims at the middle of a square of this side. Of fewer points each is shown more often.
_GRID = 8
_FIRST_WORD = (12.0, 12.0)  # of the task, which MiniWoB++ shows on top of its page; to press it does nothing


def gather(
    rollout: BrowserRollout, tasks: Sequence[Task], *, mistakes: float, seed: int, progress: Progress | None = None
) -> list[Trajectory]:
    """One demonstrated episode for each task, in order. The same arguments give the same demonstrations.

    Args:
        rollout: its runner acts at points.
        mistakes: chance, at every step, of a press of the task's first word instead of what it speaks of. One habit
            that all tasks share, for the reasons of `tasks.demonstrations.demonstrate`.

    Raises:
        ValueError: a task without a demonstrator, or a runner that acts on elements.
    """
    for task in tasks:
        check_shown(task.name)
    if rollout.runner.coordinates is None:
        raise ValueError("coordinates = None is not allowed: who points needs a coordinate space")
    return rollout.loop.run(_gather(rollout.runner, tasks, mistakes, seed, progress))


async def _gather(
    runner: EpisodeRunner, tasks: Sequence[Task], mistakes: float, seed: int, progress: Progress | None
) -> list[Trajectory]:
    async def one(task: Task) -> Trajectory:
        rng = random.Random(f"{seed}/{task.group}")

        async def answer(page: WebPage, trajectory: Trajectory, chat: list[dict]) -> Response:
            image = pictures_of(chat)[-1].size
            left, upper = _FIRST_WORD if rng.random() < mistakes else await _target(page, trajectory)
            point = left * image[0] / page.viewport[0], upper * image[1] / page.viewport[1]
            return Response(response(runner.coordinates.to_model(point, image)))

        trajectory = await _WithPage(**vars(runner)).run(task, answer)
        if progress:
            progress(trajectory)
        return trajectory

    return await asyncio.gather(*(one(task) for task in tasks))


def response(point: tuple[float, float]) -> str:
    """In the words that the policy is to learn: no thought, the action, whole numbers."""
    return f"Action: click({round(point[0])}, {round(point[1])})"


async def _target(page: WebPage, trajectory: Trajectory) -> tuple[float, float]:
    found = await page.evaluate(f"(goal) => ({_POINT})({TARGETS[trajectory.task]})", trajectory.goal)
    if found is None:
        raise LookupError(f"{trajectory.group}: the page shows nothing to press for {trajectory.goal!r}")
    return tuple(_GRID * (found[side] // _GRID + 0.5) for side in "xy")


class _WithPage(EpisodeRunner):
    """A runner that asks for an answer to a page, not to the chat alone."""

    async def _play(self, page: WebPage, task: Task, trajectory: Trajectory, generate: Any, *rest: Any) -> None:
        await super()._play(page, task, trajectory, partial(generate, page, trajectory), *rest)
