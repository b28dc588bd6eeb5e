"""Earlier sessions put back among verl's rows: the buffers are `webagent_core.sampling.replay`, which TRL uses as well.

A stored session keeps its rows as TransferQueue had them, but for log-probabilities: those are computed anew, with all
others of the batch that it joins, by the policy that starts the update.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_webagent.sessions import Session, is_valid, outcome_of, plain, sessions_of
from webagent_core.objectives import TrajectoryFacts
from webagent_core.sampling.replay import is_success
from webagent_core.sampling.stored import Stored

STORED = "stored"  # in a row's extra fields: it was played for an earlier batch
FIRST = 100_000  # numbers of stored sessions in their group begin here


def entries_of(batch: KVBatchMeta, update: int) -> dict[str, Stored | None]:
    """The batch's sessions as a buffer takes them, by key, in order; None: not valid. Failures come without rows."""
    sessions = sessions_of(batch.keys, batch.tags)
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["rm_scores", "extra_fields"]
    )
    extra, entries = plain(data["extra_fields"]), {}
    for number, session in enumerate(sessions):
        last = session.rows[-1]
        if not is_valid(extra[last]):
            entries[session.key] = None
            continue
        reward, outcome = float(data["rm_scores"][last].sum()), outcome_of(extra[last])
        outcome = reward if outcome is None else float(outcome)
        task = str(extra[last].get("group") or session.uid)
        kept = _rows_of(batch, session) if is_success(outcome) else {}
        entries[session.key] = Stored(f"{update}/{number}/{task}", task, update, outcome, len(session.rows), kept)
    return entries


def put_back(batch: KVBatchMeta, entries: dict[str, Stored | None], earlier: Sequence[Stored]) -> KVBatchMeta:
    """The batch with the rows of `earlier` in it: each in the group of its task, where the batch has one.

    Args:
        entries: of the batch, see `entries_of`; extended by `earlier`.
        earlier: successes; a failure has no rows to put back (`facts_of_failure`).
    """
    groups: dict[str, str] = {}
    for key, entry in entries.items():
        if entry is not None:
            groups.setdefault(entry.task, key.rsplit("_", 1)[0])
    keys, rows, tags = [], [], []
    for number, entry in enumerate(earlier, start=FIRST):
        group = groups.setdefault(entry.task, f"stored-{number}-{uuid.uuid4().hex}")  # sorts as they joined
        entries[f"{group}_{number}"] = entry
        for turn, (row, tag) in enumerate(zip(entry.data["rows"], entry.data["tags"], strict=True)):
            keys.append(f"{group}_{number}_{turn}")
            rows.append(_whole(row))
            tags.append(dict(tag))
    if not keys:
        return batch
    tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=list_of_dict_to_tensordict(rows), tags=tags)
    return KVBatchMeta(
        keys=[*batch.keys, *keys],
        tags=[*batch.tags, *tags],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=dict(batch.extra_info),
    )


def facts_of_failure(entry: Stored) -> TrajectoryFacts:
    """A stored failure in a plan. It has no rows, so nothing of it is in the batch, and it counts as a trajectory."""
    return TrajectoryFacts(
        group=entry.task, reward=entry.outcome, valid=True, tokens=[], repeats_next=[], outcome=entry.outcome
    )


def _rows_of(batch: KVBatchMeta, session: Session) -> dict[str, Any]:
    keys = [batch.keys[row] for row in session.rows]
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id)
    rows = [
        {name: _plain(data[name][row]) for name in data.keys() if "log_prob" not in name} for row in range(len(keys))
    ]
    return {"rows": rows, "tags": [_plain(batch.tags[row]) for row in session.rows]}


def _whole(row: dict[str, Any]) -> dict[str, Any]:
    """A stored row as a batch wants it. No policy of now has sampled it, so the log-probability of that is 0."""
    row = dict(row)
    row["extra_fields"] = row["extra_fields"] | {STORED: True}
    row["rollout_log_probs"] = torch.zeros_like(row["response_mask"], dtype=torch.float32)
    return row


def _plain(value: Any) -> Any:
    """Tensors, and what a checkpoint reads without trusting it."""
    value = getattr(value, "data", value) if not isinstance(value, torch.Tensor) else value.clone()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(each) for each in value]
    return value
