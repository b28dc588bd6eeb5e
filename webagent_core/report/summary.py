"""What happened in a run, from its metric lines: the numbers behind the learning curve and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from webagent_core.episode.trajectory import NOT_THE_POLICY, ExitStatus, Trajectory


def wilson_interval(success: float, episodes: float, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share, 95% by default (Wilson 1927). (0, 1) where there is no episode."""
    if episodes <= 0:
        return 0.0, 1.0
    denominator = 1 + z * z / episodes
    centre = (success + z * z / (2 * episodes)) / denominator
    half = z * math.sqrt(success * (1 - success) / episodes + z * z / (4 * episodes**2)) / denominator
    # At a share of 0 or 1 one end is the share itself, but for the last bits.
    return max(0.0, min(success, centre - half)), min(1.0, max(success, centre + half))


@dataclass
class Evaluation:
    """Success on held-out seeds. Shares are 0 to 1."""

    success: float
    episodes: int  # valid ones; 0 where the line does not say
    low: float  # 95% Wilson interval
    high: float
    tasks: dict[str, float]


@dataclass
class Summary:
    """A run in numbers. `before` and `after` are None where that evaluation is missing."""

    train: list[dict[str, Any]] = field(default_factory=list)  # one line per update, in order
    before: Evaluation | None = None
    after: Evaluation | None = None
    during: list[tuple[int, Evaluation]] = field(default_factory=list)  # (update, evaluation in between)
    exit_statuses: Counter[str] = field(default_factory=Counter)  # episodes of training, by how they ended
    seconds: Counter[str] = field(default_factory=Counter)  # wall clock of all lines, by part
    total_seconds: float = 0.0

    @property
    def updates(self) -> int:
        return self.train[-1]["update"] if self.train else 0

    @property
    def episodes(self) -> int:
        return sum(self.exit_statuses.values())

    @property
    def invalid(self) -> int:
        return sum(self.exit_statuses[status] for status in NOT_THE_POLICY)

    @property
    def tasks(self) -> list[str]:
        names = {key.removeprefix("success/") for line in self.train for key in line if key.startswith("success/")}
        for evaluation in (self.before, self.after):
            names.update(evaluation.tasks if evaluation else ())
        return sorted(names)


def number(line: Mapping[str, Any], key: str) -> float | None:
    """The finite number under a key, or None."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def series(lines: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """(updates, values) of one metric, without the lines that lack it."""
    points = [(line["update"], value) for line in lines if (value := number(line, key)) is not None]
    return [update for update, _ in points], [value for _, value in points]


def summarise(metrics: Iterable[Mapping[str, Any]]) -> Summary:
    """Of lines that repeat an update or an evaluation, the last counts."""
    last = {
        (line["phase"], line["update"] if line["phase"] in ("train", "during") else 0): dict(line) for line in metrics
    }
    summary = Summary(train=sorted((line for (p, _), line in last.items() if p == "train"), key=lambda m: m["update"]))
    summary.before = _evaluation(last.get(("before", 0)))
    summary.after = _evaluation(last.get(("after", 0)))
    for (phase, update), line in last.items():
        if phase == "during" and (evaluation := _evaluation(line)):
            summary.during.append((update, evaluation))
    summary.during.sort(key=lambda pair: pair[0])
    for line in summary.train:
        for status in ExitStatus:
            summary.exit_statuses[status] += int(number(line, f"exit_status/{status}") or 0)
    for line in last.values():
        seconds = line.get("seconds")
        parts = {"total": seconds} if isinstance(seconds, int | float) else seconds or {}
        known = {part: value for part in parts if part != "total" and (value := number(parts, part)) is not None}
        summary.seconds.update(known)
        total = number(parts, "total")
        summary.total_seconds += sum(known.values()) if total is None else total
    return summary


def _evaluation(line: Mapping[str, Any] | None) -> Evaluation | None:
    success = number(line, "success") if line else None
    if line is None or success is None:
        return None
    episodes = int(number(line, "episodes") or 0)
    tasks = {key.removeprefix("success/"): number(line, key) for key in line if key.startswith("success/")}
    return Evaluation(
        success, episodes, *wilson_interval(success, episodes), {k: v for k, v in tasks.items() if v is not None}
    )


def headline(summary: Summary) -> str:
    """One sentence for somebody who sees the run for the first time."""
    before, after, train = summary.before, summary.after, summary.train
    cost = f"{summary.updates} update{'s' if summary.updates != 1 else ''}"
    if summary.total_seconds:
        cost += f" ({duration(summary.total_seconds)})"
    if before and after:
        change = after.success - before.success
        verb = "rose" if change > 0 else "fell" if change < 0 else "stayed"
        start, end = percent(before.success), percent(after.success)
        way = f"from {start} to {end}" if change else f"at {end}"
        apart = before.episodes and after.episodes and (before.high < after.low or after.high < before.low)
        doubt = "" if apart or not change else "; the 95% intervals overlap, so it may be chance"
        return f"Success on held-out seeds {verb} {way} in {cost}{doubt}."
    if not train:
        start = f"Before training, {percent(before.success)} of held-out episodes succeed; " if before else ""
        return f"{start or 'Nothing was measured: '}no update has been logged yet."
    parts = [f"success on held-out seeds was {percent(before.success)} before training"] if before else []
    _, values = series(train, "success")
    if after:
        parts.append(f"success on held-out seeds is {percent(after.success)} after {cost} (not measured before)")
    else:
        if values:
            parts.append(f"in training it went from {percent(values[0])} to {percent(values[-1])} over {cost}")
        else:
            parts.append(f"the run has logged {cost}")
        parts.append("the run is still going or was interrupted")
    sentence = "; ".join(parts)
    return sentence[0].upper() + sentence[1:] + "."


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def success_by_task(trajectories: list[Trajectory]) -> dict[str, float]:
    """success/<task> over the valid trajectories of each task."""
    by_task: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        if trajectory.valid:
            by_task.setdefault(f"success/{trajectory.task}", []).append(trajectory.success)
    return {name: sum(successes) / len(successes) for name, successes in sorted(by_task.items())}


def ends_of(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """How these ended: `success` and `steps`, means over the valid ones, if there are any; exit statuses; cut steps."""
    valid = [trajectory for trajectory in trajectories if trajectory.valid]
    ends: dict[str, Any] = {}
    if valid:
        ends["success"] = sum(trajectory.success for trajectory in valid) / len(valid)
        ends["steps"] = sum(len(trajectory.steps) for trajectory in valid) / len(valid)
    statuses = Counter(trajectory.exit_status for trajectory in trajectories)
    ends |= {f"exit_status/{status}": statuses[status] for status in ExitStatus}
    return ends | failed_steps(trajectories) | cut_steps(trajectories)


def failed_steps(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """`failed_steps`: mean steps of the valid trajectories without success, if there are any."""
    lengths = [len(trajectory.steps) for trajectory in trajectories if trajectory.valid and not trajectory.success]
    return {"failed_steps": sum(lengths) / len(lengths)} if lengths else {}


def cut_steps(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """`cut_steps`: how many steps had a prompt that was cut to fit, of invalid trajectories too."""
    return {"cut_steps": sum(step.cut is not None for trajectory in trajectories for step in trajectory.steps)}


def closing_lines(metrics: Iterable[Mapping[str, Any]], tasks: Iterable[str], seed: int) -> list[str]:
    """A run's last words: success on held-out seeds before and after, of each task and then of all."""
    lines = {line["phase"]: line for line in metrics}
    before, after = lines.get("before", {}), lines["after"]

    def share(line: Mapping[str, Any], key: str) -> str:
        return f"{line[key]:.2f}" if line.get(key) is not None else "  - "

    told = []
    for task in sorted(tasks):
        key = f"success/{task}"
        told.append(f"  {task:32} {share(before, key)} -> {share(after, key)}")
    told.append(
        f"success on held-out seeds: {share(before, 'success')} before, {share(after, 'success')} after "
        f"({after['episodes']} episodes, {after['update']} updates, seed {seed})"
    )
    return told
