"""verl's rows and columns, read as trajectories.

verl knows rows. Their keys, "{uid}_{session}_{turn}", say which trajectory each belongs to; rows that only fill a batch
up carry the tag `is_padding` and copies of somebody else's columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from webagent_core.episode.trajectory import ExitStatus
from webagent_core.objectives import Objective, Plan, TrajectoryFacts, spread

KEPT_IN = "kept_in"  # beside a trajectory on its way through verl: the partition it is for
SCORED = "scored"  # beside a reward on its way back: what the scored copy of the trajectory has learnt


@dataclass(frozen=True)
class Session:
    """One trajectory: the group it is compared in, and where in the batch its steps are, in the order played."""

    uid: str
    number: int
    rows: tuple[int, ...]

    @property
    def key(self) -> str:
        return f"{self.uid}_{self.number}"


def order_of(keys: Sequence[str]) -> list[int]:
    """The rows by (uid, number, turn)."""

    def place(row: int) -> tuple[str, int, int]:
        uid, number, turn = keys[row].rsplit("_", 2)
        return uid, int(number), int(turn)

    return sorted(range(len(keys)), key=place)


def sessions_of(keys: Sequence[str], tags: Sequence[dict]) -> list[Session]:
    """The sessions of a batch, ordered by (uid, number): the order in which rows arrive says nothing."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        if tag.get("is_padding"):
            continue
        uid, number, turn = key.rsplit("_", 2)
        found.setdefault((uid, int(number)), []).append((int(turn), row))
    return [Session(*session, tuple(row for _, row in sorted(rows))) for session, rows in sorted(found.items())]


def plain(column: Any) -> list[Any]:
    """A column of Python objects as a list, whatever TransferQueue wrapped them in."""
    return [getattr(entry, "data", entry) for entry in column]


@dataclass(frozen=True)
class Columns:
    """What the statistics need of a batch, one entry a row.

    score: the trajectory's reward, on its last row; mask: (L,) bool, the row's own tokens; extra: what the agent loop
    and the reward manager left; values: (L,) of the critic's head.
    """

    score: list[float]
    mask: list[Tensor]
    extra: list[dict[str, Any]]
    values: list[Tensor] | None = None


def is_valid(extra: dict[str, Any]) -> bool:
    """Whether the policy can have caused this outcome: what the agent loop says, and what the reward manager says."""
    told = extra.get("reward_extra_info") or {}
    return bool(extra.get("valid", True)) and bool(told.get("valid", True))


def status_of(extra: dict[str, Any]) -> str:
    """How the session ended: what the reward manager says (a judge may have failed since), else the agent loop."""
    told = extra.get("reward_extra_info") or {}
    return told.get("exit_status") or extra.get("exit_status") or str(ExitStatus.ANSWERED)


def outcome_of(extra: dict[str, Any]) -> float | None:
    """What the task itself came to, where that may be another number than the reward."""
    told = extra.get("reward_extra_info") or {}
    return extra.get("outcome", told.get("outcome"))


def facts_of(objective: Objective, sessions: Sequence[Session], columns: Columns) -> list[TrajectoryFacts]:
    """One entry a session, in order; see `TrajectoryFacts`."""
    facts = []
    for session in sessions:
        last = columns.extra[session.rows[-1]]
        valid = is_valid(last)
        values = None
        if objective.uses_critic and columns.values is not None:
            values = [objective.values(columns.values[row].float())[columns.mask[row]] for row in session.rows]
            if objective.value_at == "state":
                values = [value[:1] for value in values]
        facts.append(
            TrajectoryFacts(
                group=session.uid,
                reward=columns.score[session.rows[-1]] if valid else None,
                valid=valid,
                tokens=[int(columns.mask[row].sum()) for row in session.rows],
                repeats_next=[bool(columns.extra[row].get("repeats_next", False)) for row in session.rows],
                values=values,
                outcome=outcome_of(last),
                stored=bool(last.get("stored", False)),
            )
        )
    return facts


@dataclass(frozen=True)
class RowWeights:
    """A plan laid out over a batch's rows, padding included: (L,) tensors a row, and (n,) coefficients."""

    advantages: list[Tensor]
    coefficients: Tensor
    value_targets: list[Tensor]
    value_coefficients: Tensor


def row_weights(plan: Plan, sessions: Sequence[Session], masks: Sequence[Tensor]) -> RowWeights:
    """What each row of the batch gets; rows that no session owns get zeros."""
    advantages = [torch.zeros(len(mask)) for mask in masks]
    targets = [torch.zeros(len(mask)) for mask in masks]
    coefficients, value_coefficients = torch.zeros(len(masks)), torch.zeros(len(masks))
    for session, planned in zip(sessions, plan.trajectories, strict=True):
        for row, weights in zip(session.rows, planned.rows, strict=True):
            advantages[row] = _along(weights.advantage, masks[row])
            coefficients[row] = weights.coefficient
            if weights.value_target is not None:
                targets[row] = _along(weights.value_target, masks[row])
                value_coefficients[row] = weights.value_coefficient
    return RowWeights(advantages, coefficients, targets, value_coefficients)


def _along(value: float | Tensor, mask: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return spread(value.float().reshape(-1), mask)
    return float(value) * mask.float()
