"""Preference pairs: a better and a worse answer to one state; UI-TARS makes them of corrections, Agent Q by search."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from webagent_core.episode.actions import FormatError, parse_action
from webagent_core.episode.trajectory import Trajectory
from webagent_core.tasks.demonstrations import demonstrate


@dataclass(frozen=True)
class Answer:
    """What a policy said in a state, or should have said."""

    text: str
    action: str | None  # in its one-line form; None: it holds no action
    response_ids: list[int] = field(default_factory=list)
    logp: float | None = None  # sum over the response's tokens when it was sampled; None: not sampled, or not kept


@dataclass(frozen=True)
class Pair:
    """`chosen` is better than `rejected` after the same chat. The answers' `logp` is the reference's, where stored."""

    task: str  # group of the attempt or of the tree
    messages: list[dict]
    chosen: Answer
    rejected: Answer
    source: Literal["search", "correction", "file"]
    prompt_ids: list[int] = field(default_factory=list)
    margin: float | None = None  # difference in Q

    def record(self) -> dict[str, Any]:
        """As plain data; `pair_of` reads it back."""
        return asdict(self)


def pair_of(record: dict[str, Any]) -> Pair:
    return Pair(**record | {side: Answer(**record[side]) for side in ("chosen", "rejected")})


def load_pairs(path: Path) -> list[Pair]:
    """The pairs of a .jsonl file, one `Pair.record` a line. A line needs no more than

        {"task": "...", "messages": [chat], "chosen": {"text": "..."}, "rejected": {"text": "..."}}

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no pair; it is named by its number.
    """
    if not path.is_file():
        raise FileNotFoundError(f"pairs.file = {str(path)!r}: there is no such file")
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = {"source": "file", **json.loads(line)}
            for side in ("chosen", "rejected"):
                record[side] = {"action": None, **record[side]}
            pairs.append(pair_of(record))
        except (ValueError, TypeError, KeyError) as error:
            allowed = "an object with task, messages, chosen.text and rejected.text"
            raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}; allowed is {allowed}") from None
    return pairs


@dataclass(frozen=True)
class Correction:
    """The step, counted from 0, in which a trajectory went wrong, and what should have been answered there."""

    step: int
    text: str


class Corrector(Protocol):
    """Finds where a trajectory went wrong: a person's labels, a model that reflects, a script."""

    def __call__(self, trajectory: Trajectory) -> Sequence[Correction]: ...


def demonstrator_correction(trajectory: Trajectory) -> list[Correction]:
    """The embedded corrector: the first step of a failure in which a scripted demonstrator would have acted otherwise.

    A task without a demonstrator, or a page that does not show what the goal speaks of, gets no correction.
    """
    if not trajectory.valid or trajectory.success:
        return []
    for index, step in enumerate(trajectory.steps):
        try:
            text = demonstrate(trajectory.task, trajectory.goal, step.observation, 0.0, random.Random(0))
        except LookupError:  # a KeyError too
            return []
        if parse_action(text) != step.action:
            return [Correction(index, text)]
    return []


def correction_pairs(
    trajectories: Sequence[Trajectory],
    corrector: Corrector,
    parse: Callable[[str], Any] = parse_action,
) -> tuple[list[Pair], Counter[str]]:
    """UI-TARS (arXiv:2501.12326), 4.5: at the state of a wrong step, its correction against what was answered.

    Returns the pairs and how often there was none, by reason: the trajectory is "invalid" (its end says nothing of the
    policy), nothing was found wrong in it ("uncorrected"), the correction is the "same action", or holds "no action".

    Args:
        parse: the policy's action grammar.

    Raises:
        ValueError: a correction is of a step that the trajectory does not have.
    """
    pairs: list[Pair] = []
    left_out: Counter[str] = Counter()
    for trajectory in trajectories:
        if not trajectory.valid:
            left_out["invalid"] += 1
            continue
        corrections = corrector(trajectory)
        left_out["uncorrected"] += not corrections
        for correction in corrections:
            if not 0 <= correction.step < len(trajectory.steps):
                raise ValueError(
                    f"{trajectory.group}: correction of step {correction.step} is not allowed: 0 to"
                    f" {len(trajectory.steps) - 1}"
                )
            step = trajectory.steps[correction.step]
            action = parse(correction.text)
            if isinstance(action, FormatError):
                left_out["no action"] += 1
            elif action == step.action:
                left_out["same action"] += 1
            else:
                wrong = None if step.action is None else str(step.action)
                pairs.append(
                    Pair(
                        trajectory.group,
                        step.messages,
                        chosen=Answer(correction.text, str(action)),
                        rejected=Answer(step.response, wrong, list(step.response_ids)),
                        source="correction",
                        prompt_ids=list(step.prompt_ids),
                    )
                )
    return pairs, +left_out
