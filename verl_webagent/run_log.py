"""A verl run's folder, the same as a TRL run's: metrics, trajectories with screenshots, learning curve, report.

The agent loop leaves each played `Trajectory` in a TransferQueue partition of its own, so that the rows which travel to
the training workers stay small; the trainer takes it from there.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict

from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.recipe import Recipe
from webagent_core.report.run_directory import RunDirectory
from webagent_core.report.summary import cut_steps, ends_of, failed_steps, success_by_task
from webagent_core.report.text import one_line
from webagent_core.report.viewer import make_report
from webagent_core.rewards.counts import reward_metrics


def partition(validate: bool) -> str:
    return f"trajectories-{'val' if validate else 'train'}"


async def keep(key: str, where: str, trajectory: Trajectory) -> None:
    """Called by an agent-loop worker: leave `trajectory` in that partition, for the trainer."""
    pickled = torch.frombuffer(bytearray(pickle.dumps(trajectory)), dtype=torch.uint8)
    fields = TensorDict({"pickled": pickled.unsqueeze(0)}, batch_size=1)
    await tq.async_kv_batch_put(keys=[key], fields=fields, tags=[{"kept": True}], partition_id=where)


def taken(validate: bool, keys: Sequence[str] | None = None) -> dict[str, Trajectory]:
    """The kept trajectories of these keys (of all, where None), which are then no longer kept."""
    there = (tq.kv_list(partition(validate)) or {}).get(partition(validate), {})
    keys = sorted(there) if keys is None else [key for key in keys if key in there]
    found = {}
    for key in keys:  # one at a time: they differ in size
        data = tq.kv_batch_get(keys=[key], partition_id=partition(validate), select_fields=["pickled"])
        # Written by this run's own workers.
        found[key] = pickle.loads(data["pickled"][0].numpy().tobytes())
    if keys:
        tq.kv_clear(keys=keys, partition_id=partition(validate))
    return found


def say(line: str) -> None:
    """To the process's own standard output, where verl's may have been turned off."""
    print(line, file=sys.__stdout__, flush=True)


class RunLog:
    """Writes one run's folder from what verl's trainer sees."""

    def __init__(self, out: str, recipe: Recipe) -> None:
        self.recipe = recipe
        self.directory = RunDirectory(Path(out))
        self.directory.write_config(recipe.resolved())
        self.per_task: dict[str, float] = {}
        self.last_update = 0  # whose line is written
        self._evaluated: tuple[str, list[Trajectory]] | None = None  # waits for the line of its update

    def truncate_after(self, update: int) -> None:
        self.directory.truncate_after(update)
        self.last_update = update

    def train(self, update: int, keys: Sequence[str], advantages: Sequence[Any]) -> None:
        """The trajectories that were played for one batch, by the keys of their sessions."""
        kept = taken(validate=False, keys=keys)
        pairs = [(kept[key], a) for key, a in zip(keys, advantages, strict=True) if key in kept]
        pairs.sort(key=lambda pair: pair[0].group)
        scalars = [a if isinstance(a, float) else None for _, a in pairs]
        self.directory.log_trajectories(update, "train", [trajectory for trajectory, _ in pairs], scalars)
        played = [trajectory for trajectory, _ in pairs]
        self.per_task = success_by_task(played) | failed_steps(played) | cut_steps(played) | reward_metrics(played)

    def update(self, update: int, metrics: dict[str, Any], seconds: dict[str, float]) -> None:
        """One finished update, from verl's metrics and timings."""
        line: dict[str, Any] = {"update": update, "phase": "train"}
        ours = ("success", "return", "steps", "trajectories", "invalid", "rows")
        line |= {name: metrics[f"webagent/{name}"] for name in ours if f"webagent/{name}" in metrics}
        parts = ("webagent/groups/", "webagent/replay/")
        line |= {name.removeprefix("webagent/"): metrics[name] for name in metrics if name.startswith(parts)}
        actors = ("loss", "policy_loss", "kl", "ratio", "clip_ratio", "behave_weight", "entropy", "grad_norm")
        line |= {name: float(metrics[f"actor/{name}"]) for name in actors if f"actor/{name}" in metrics}
        if "actor/lr" in metrics:
            line["learning_rate"] = float(metrics["actor/lr"])
        line |= {f"exit_status/{status}": metrics[f"webagent/exit_status/{status}"] for status in ExitStatus}
        rollout = seconds.get("gen", 0.0)
        if rollout:
            line["browser_steps_per_second"] = metrics["webagent/rows"] / rollout
        parts = {
            "rollout": rollout,
            "log-probabilities": sum(seconds.get(part, 0.0) for part in ("old_log_prob", "ref", "values")),
            "loss": sum(seconds.get(part, 0.0) for part in ("update_actor", "update_critic")),
            "weights": seconds.get("update_weights", 0.0),
        }
        if "step" in seconds:
            parts["other"] = max(0.0, seconds["step"] - sum(parts.values()))
        self.directory.log_metrics(line | self.per_task | {"seconds": parts})
        say(one_line(line, self.recipe.train.updates))
        self.last_update = update
        if self._evaluated:
            phase, trajectories = self._evaluated
            self._evaluated = None
            self._write_evaluation(update, phase, trajectories)

    def evaluation(self, update: int, updates: int) -> None:
        """The trajectories of one evaluation on held-out seeds. verl evaluates before it tells an update's metrics."""
        trajectories = list(taken(validate=True).values())
        trajectories.sort(key=lambda trajectory: trajectory.group)
        phase = "before" if update == 0 else "after" if update >= updates else "during"
        if update > self.last_update:
            self._evaluated = phase, trajectories
        else:
            self._write_evaluation(update, phase, trajectories)

    def _write_evaluation(self, update: int, phase: str, trajectories: list[Trajectory]) -> None:
        """After the last update the report as well."""
        episodes = sum(trajectory.valid for trajectory in trajectories)
        line = {"update": update, "phase": phase, "episodes": episodes, **ends_of(trajectories)}
        self.directory.log_metrics(line | success_by_task(trajectories))
        self.directory.log_trajectories(update, phase, trajectories, None)
        say(one_line(line))
        if phase == "after":
            make_report(self.directory)
