"""What a batch of trajectories shows beside its rewards: the form of its steps, and how the judges behind it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from webagent_core.episode.trajectory import Trajectory


@dataclass(frozen=True)
class FormCounts:
    """Step-level counters of one trajectory."""

    steps: int
    format_errors: int  # responses without an action
    failed_actions: int  # actions that the page answered with an error
    response_tokens: int


def form_counts(trajectory: Trajectory) -> FormCounts:
    steps = trajectory.steps
    return FormCounts(
        steps=len(steps),
        format_errors=sum(step.action is None for step in steps),
        failed_actions=sum(step.action is not None and step.error is not None for step in steps),
        response_tokens=sum(len(step.response_ids) for step in steps),
    )


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Numbers for a training log, over all of `trajectories`, invalid ones too.

    `format_errors`, `failed_actions`: steps, see `FormCounts`. Where a judge was asked, from the evidence of the
    rewards: `judge/requests`, `judge/failed_requests` (no reply came), `judge/cache_hits` (which cost nothing),
    `judge/tokens` (of prompts and replies), `judge/cost` (in the unit of the recipe's prices), `judge/seconds` (mean
    of a request) and `judge/longest_seconds`.
    """
    forms = [form_counts(trajectory) for trajectory in trajectories]
    metrics: dict[str, float] = {name: sum(getattr(form, name) for form in forms)
                                 for name in ("format_errors", "failed_actions")}  # fmt: skip
    said = [each for trajectory in trajectories for each in trajectory.evidence if "judge" in str(each.get("kind"))]
    if not said:
        return metrics
    cached = [each for each in said if each.get("cached")]
    asked = [each for each in said if not each.get("cached")]
    seconds = [each["seconds"] for each in asked]
    return metrics | {
        "judge/requests": len(asked),
        "judge/failed_requests": sum(each["kind"] == "judge_failure" for each in asked),
        "judge/cache_hits": len(cached),
        "judge/tokens": sum(each.get("prompt_tokens", 0) + each.get("completion_tokens", 0) for each in asked),
        "judge/cost": sum(each.get("cost", 0.0) for each in asked),
        "judge/seconds": sum(seconds) / len(seconds) if seconds else 0.0,
        "judge/longest_seconds": max(seconds, default=0.0),
    }
