"""verl's own group filtering, with trajectories for rows and with an end.

verl's replay buffer drops groups whose metric is the same in all rows and asks for others (DAPO). Its test is on rows,
takes an invalid trajectory's 0 for a reward, and goes on forever on tasks that give no signal. Here a group leaves for
the reasons of `webagent_core.sampling.filters`, which TRL uses as well; all else, refill included, is verl's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_webagent.sessions import is_valid, outcome_of, plain, sessions_of
from webagent_core.sampling.filters import Drop, GroupFilter, NoSignal, no_signal_message, why_dropped
from webagent_core.tasks.task import Task


class GroupsWithSignal:
    """Mixed into verl's buffers. `without_signal` counts what left since a group last stayed."""

    def __init__(self, group_filter: GroupFilter, **arguments: Any) -> None:
        self.group_filter = group_filter
        self.dropped: list[tuple[Drop, list[dict[str, Any]]]] = []  # since `take_dropped`, with the sessions' facts
        self.without_signal: Counter[Drop] = Counter()
        super().__init__(filter_groups_metric="reward", **arguments)

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter]:
        """As verl calls it: the groups that leave, and at which reward. Each group is looked at once."""
        if partition_id == "val":
            return set(), Counter()
        known = self._dapo_classification_cache[partition_id]
        for uid in known.keys() - self.finished_keys[partition_id]:
            del known[uid]
        new = self.finished_keys[partition_id] - known.keys()
        tags = {key: tag for key, tag in self.partitions[partition_id].items() if key.split("_")[0] in new}
        if tags:
            known.update(self._looked_at(partition_id, tags))
        leaving = {uid: reward for uid, reward in known.items() if reward is not None}
        return set(leaving), Counter(leaving.values())

    def _looked_at(self, partition_id: str, tags: dict[str, dict]) -> dict[str, float | None]:
        """By group: None if it stays, else the reward at which it is flat, -1 for other reasons (verl wants a number).

        Raises:
            NoSignal: as many groups as `patience` batches may take have left in a row.
            RuntimeError: and not one of their trajectories was valid, so it is not the tasks that are at fault.
        """
        keys = list(tags)
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores", "extra_fields"])
        extra, scores = plain(data["extra_fields"]), data["rm_scores"]
        groups: dict[str, list[dict[str, Any]]] = {}
        for session in sessions_of(keys, list(tags.values())):
            last = session.rows[-1]
            reward, outcome, valid = float(scores[last].sum()), outcome_of(extra[last]), is_valid(extra[last])
            outcome = (reward if outcome is None else outcome) if valid else None
            facts = extra[last] | {"key": session.key, "steps": len(session.rows), "reward": reward, "outcome": outcome}
            groups.setdefault(session.uid, []).append(facts)
        verdicts: dict[str, float | None] = {}
        for uid, members in groups.items():
            name, _, seed = str(members[0].get("group") or uid).rpartition("#")
            task = Task(name, int(seed) if seed.isdecimal() else 0)
            drop = why_dropped(task, [facts["outcome"] for facts in members])
            if drop is None:
                verdicts[uid] = None
                self.without_signal.clear()
                continue
            verdicts[uid] = -1.0 if drop.reward is None else drop.reward
            self.dropped.append((drop, members))
            self.without_signal[drop] += 1
        if sum(self.without_signal.values()) >= self.group_filter.most * self.group_filter.patience:
            left = [facts for _, members in self.dropped for facts in members]
            if all(facts["outcome"] is None for facts in left):
                reasons = sorted({str(facts.get("detail") or facts.get("exit_status")) for facts in left})
                raise RuntimeError(
                    f"{len(self.dropped)} groups in a row without one valid trajectory; "
                    f"reasons: {'; '.join(reasons[:3])}"
                )
            raise NoSignal(no_signal_message(self.group_filter.patience, self.without_signal))
        return verdicts

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
        """Of more groups than a batch takes those that were drawn first, not whichever a set names first."""
        return super()._select_prompt_uids(partition_id, sorted(sampleable_keys), batch_size)

    def take_dropped(self) -> list[tuple[Drop, list[dict[str, Any]]]]:
        """What left since the last call: why, and the facts of each session, `outcome` None where it was not valid."""
        dropped, self.dropped = self.dropped, []
        return dropped


class FilteringBuffer(GroupsWithSignal, ReplayBuffer):
    pass


class FilteringBufferAsync(GroupsWithSignal, ReplayBufferAsync):
    pass
