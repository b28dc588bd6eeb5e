"""Makes a recording (see recorded_steps.py) of the scripted demonstrators at work on real pages."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from webagent_core.browser.page import WebPage
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.episode.contexts import PlaceholderContext
from webagent_core.episode.rollout import Progress
from webagent_core.episode.runner import EpisodeRunner, Generate, Response
from webagent_core.episode.trajectory import Trajectory
from webagent_core.tasks.demonstrations import DEMONSTRATORS, Move, demonstrate, elements
from webagent_core.tasks.recorded_steps import write_episode
from webagent_core.tasks.task import Task

_BOX = """id => {
  const box = window.__webagent?.elements.get(id)?.deref()?.getBoundingClientRect();
  const within = (value, end) => Math.min(Math.max(value, 0), end);
  return box ? [within(box.left, innerWidth), within(box.top, innerHeight),
                within(box.right, innerWidth), within(box.bottom, innerHeight)] : null;
}"""
_AMEX_NAMES = {"click": "TAP", "type": "TYPE", "stop": "TASK_COMPLETE", "back": "PRESS_BACK"}


def record_demonstrations(
    rollout: BrowserRollout,
    tasks: Sequence[Task],
    folder: Path,
    *,
    mistakes: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """Play one demonstrated episode for each task and write those that no page broke into `folder`.

    The right action of a step is always the demonstrator's, also where the hand slipped.

    Args:
        mistakes: chance, at every step, that something else was done (see `demonstrations.demonstrate`); what comes
            after is a step with a mistake in its history. 0: as in recordings of people who know what they do.
    """
    recorder = _Recorder(
        rollout.pool, rollout.runner.task_set, PlaceholderContext(), rollout.runner.limits, mistakes=mistakes, seed=seed
    )
    trajectories = rollout.loop.run(_record(recorder, tasks, progress))
    for task, trajectory in zip(tasks, trajectories, strict=True):
        if trajectory.valid:
            _write(folder, task, trajectory, recorder.rights[task.group])
    return trajectories


async def _record(recorder: _Recorder, tasks: Sequence[Task], progress: Progress | None) -> list[Trajectory]:
    async def one(task: Task) -> Trajectory:
        trajectory = await recorder.run(task, _nobody)
        if progress:
            progress(trajectory)
        return trajectory

    return await asyncio.gather(*(one(task) for task in tasks))


async def _nobody(chat: list[dict]) -> Response:
    raise RuntimeError("a demonstrator needs no policy")


@dataclass
class _Right:
    """The right action of a step, and where it is done on the page."""

    move: Move
    box: list[float] | None
    viewport: tuple[int, int]


@dataclass
class _Recorder(EpisodeRunner):
    """A runner that asks the demonstrator, and notes what was right while the page still shows it."""

    mistakes: float = 0.0
    seed: int = 0
    rights: dict[str, list[_Right]] = field(default_factory=dict)

    async def _play(self, page: WebPage, task: Task, trajectory: Trajectory, generate: Generate, *rest: Any) -> None:
        self.rights[task.group] = []
        await super()._play(page, task, trajectory, partial(self._answer, page, trajectory), *rest)

    async def _answer(self, page: WebPage, trajectory: Trajectory, chat: list[dict]) -> Response:
        shown = chat[-1]["content"]
        move = DEMONSTRATORS[trajectory.task](trajectory.goal, elements(shown))
        box = await page.evaluate(_BOX, move.target.id)
        self.rights[trajectory.group].append(_Right(move, box, page.viewport))
        rng = random.Random(f"{self.seed}/{trajectory.group}/{len(trajectory.steps)}")
        return Response(demonstrate(trajectory.task, trajectory.goal, shown, self.mistakes, rng))


def _write(folder: Path, task: Task, trajectory: Trajectory, rights: list[_Right]) -> None:
    name = re.sub(r"[^A-Za-z0-9]+", "-", task.group)
    pictures = {f"{name}-{at}.jpg": step.screenshot for at, step in enumerate(trajectory.steps)}
    steps = []
    for number, (step, right, file) in enumerate(zip(trajectory.steps, rights, pictures, strict=True)):
        steps.append(
            {"step_id": number, "image_path": file, "device_dim": list(right.viewport)}
            | _amex_action(right)
            | {"page": step.observation, "element_action": str(right.move.action), "box": right.box}
            | ({"done": str(step.action)} if step.action != right.move.action else {})
        )
    episode = {"episode_id": task.group, "instruction": trajectory.goal, "task": task.name, "steps": steps}
    write_episode(folder, name, episode, pictures)


def _amex_action(right: _Right) -> dict[str, Any]:
    """AMEX's fields for an action, where it has one: choosing from a list is none."""
    action = right.move.action
    if action.name not in _AMEX_NAMES:
        return {}
    middle = [-1, -1]
    if right.box:
        left, top, far, bottom = right.box
        middle = [(left + far) / 2, (top + bottom) / 2]
    return {
        "action": _AMEX_NAMES[action.name],
        "touch_coord": middle,
        "lift_coord": middle,
        "type_text": action.text or "",
    }
