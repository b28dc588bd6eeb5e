"""The one class that users override, what it returns, and the driver that runs it over many trajectories.

    class Polite(RewardManager):
        def score(self, trajectory):
            return 1.0 if "please" in (trajectory.answer or "") else 0.0

`score` gets the whole trajectory (see episode/trajectory.py): task, goal, steps with screenshot and page text, answer,
the page at the first finish, exit status. It may be `async def`, and is then run for many trajectories at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from webagent_core.episode.trajectory import NOT_THE_POLICY, ExitStatus, Trajectory

Evidence = tuple[Mapping[str, Any], ...]


class JudgeError(Exception):
    """No verdict could be had: whoever judges failed, or nobody could read what they said.

    Raised inside `score` it makes that trajectory invalid (`judge_error`). It is never a reward of 0, which would say
    something about the policy.
    """

    def __init__(self, message: str, evidence: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.evidence: Evidence = tuple(evidence)


class RewardError(Exception):
    """A reward manager is wrong in itself: it raised, or returned what is no reward."""


@dataclass(frozen=True)
class Reward:
    """What one trajectory is worth, or why nobody can say.

    Args:
        value: any finite number; None where the trajectory is invalid.
        outcome: what the task came to, where `value` holds more than that (a penalty say). Success in metrics, filters
            and replay is an outcome of at least 1. None: it is `value`.
        invalid: None, or an exit status that no policy can have caused (`env_error`, `judge_error`, `cancelled`).
        reasons: in words for people.
        evidence: JSON-like records of what the reward rests on, such as every reply of a judge.

    Raises:
        ValueError: `value` or `outcome` is no finite number, or both or neither of `value` and `invalid` are given.
    """

    value: float | None = None
    invalid: ExitStatus | None = None
    reasons: tuple[str, ...] = ()
    evidence: Evidence = ()
    outcome: float | None = None

    def __post_init__(self) -> None:
        if self.outcome is not None and not _is_number(self.outcome):
            raise ValueError(f"outcome = {self.outcome!r} is not allowed: a finite number, or None")
        if self.invalid is None:
            if not _is_number(self.value):
                raise ValueError(f"value = {self.value!r} is not allowed: a finite number, or None and `invalid`")
            object.__setattr__(self, "value", float(self.value))
            return
        if self.invalid not in NOT_THE_POLICY:
            allowed = ", ".join(sorted(NOT_THE_POLICY))
            raise ValueError(f"invalid = {self.invalid!r} is not allowed: one of {allowed}")
        if self.value is not None:
            raise ValueError(f"value = {self.value!r} is not allowed: None, since the trajectory is {self.invalid}")
        object.__setattr__(self, "invalid", ExitStatus(self.invalid))

    @property
    def valid(self) -> bool:
        return self.invalid is None


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


class RewardManager:
    """Scores trajectories, one at a time. Override `score`."""

    def score(self, trajectory: Trajectory) -> Reward | float | Awaitable[Reward | float]:
        """What the trajectory is worth: a finite number or a `Reward`.

        Raise `JudgeError` where nobody can say. What else is raised counts as a mistake of this class and ends the
        run, but for a broken connection or a time-out, which are a judge's failures too.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to score: override score(self, trajectory)")


async def score_one(manager: RewardManager, trajectory: Trajectory) -> Reward:
    """`manager.score` with its result checked; also for managers that wrap another one.

    A trajectory that no policy can have spoilt (`env_error`, `judge_error`, `cancelled`) is not scored: it stays what
    it is. The trajectory is not changed; `record` writes rewards into theirs.

    Raises:
        RewardError: `score` raised, or returned neither a finite number nor a `Reward`. Names class, task and seed.
    """
    if trajectory.exit_status in NOT_THE_POLICY:
        return Reward(invalid=trajectory.exit_status, reasons=(trajectory.detail,))
    who = f"{type(manager).__name__}.score of {trajectory.task} (seed {trajectory.seed})"
    try:
        result = manager.score(trajectory)
        if inspect.isawaitable(result):
            result = await result
    except JudgeError as error:
        return Reward(invalid=ExitStatus.JUDGE_ERROR, reasons=(str(error),), evidence=error.evidence)
    except (ConnectionError, TimeoutError) as error:
        return Reward(invalid=ExitStatus.JUDGE_ERROR, reasons=(f"{type(error).__name__}: {error}",))
    except RewardError:  # of a manager inside this one: it is named already
        raise
    except Exception as error:
        raise RewardError(f"{who} raised {type(error).__name__}: {error}") from error
    if isinstance(result, Reward):
        return result
    try:
        return Reward(result)
    except ValueError:
        raise RewardError(f"{who} returned {result!r}, allowed is a finite number or a Reward") from None


async def score_all(
    manager: RewardManager, trajectories: Sequence[Trajectory], *, concurrency: int = 64
) -> list[Reward]:
    """Score each of `trajectories` (`score_one`); the rewards come in their order.

    Args:
        concurrency: how many are scored at a time, where `score` is async.

    Raises:
        RewardError: see `score_one`. The others are stopped then.
        ValueError: `concurrency` below 1.
    """
    slots = slots_for(concurrency)

    async def score(trajectory: Trajectory) -> Reward:
        async with slots:
            return await score_one(manager, trajectory)

    running = [asyncio.create_task(score(trajectory)) for trajectory in trajectories]
    try:
        return await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def slots_for(concurrency: int) -> asyncio.Semaphore:
    if concurrency < 1:
        raise ValueError(f"concurrency = {concurrency!r} is not allowed: at least 1")
    return asyncio.Semaphore(concurrency)


def record(trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> None:
    """Write the rewards into the trajectories: reward, outcome, evidence; of an invalid one exit status and reason."""
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        trajectory.reward = reward.value
        trajectory.outcome = reward.outcome
        trajectory.evidence = [dict(each) for each in reward.evidence]
        if reward.invalid is not None:
            trajectory.exit_status = reward.invalid
        trajectory.detail = "; ".join(filter(None, reward.reasons)) or trajectory.detail


def task_facts(source: Mapping[str, Any] | Callable[[Trajectory], Any], trajectory: Trajectory, what: str) -> Any:
    """What a task set says of a task (rubric, reference, gold step): `source` by group, else by task name, or called.

    Raises:
        ValueError: there is nothing for this task.
    """
    if callable(source):
        found = source(trajectory)
    else:
        found = source.get(trajectory.group, source.get(trajectory.task))
    if found is None:
        raise ValueError(f"{what}: none for task {trajectory.task!r} (group {trajectory.group!r})")
    return found
