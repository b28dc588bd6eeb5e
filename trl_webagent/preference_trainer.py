"""DPO on preference pairs whose tokens, and where stored their reference log-probabilities, are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from trl import DPOTrainer

from webagent_core.sampling.pairs import Pair


class PairDPOTrainer(DPOTrainer):
    """TRL's DPOTrainer, for a dataset of `pair_rows`.

    Stock code makes the tokens from texts. Here the answers were sampled: made anew from their texts they could be
    other tokens, and a chat template may add some behind the end of the turn. So the rows are taken as they are; and
    with `precompute_ref_log_probs` so are their reference sums, which stock code would compute again.
    """

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        return dataset

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        return dataset


def pair_rows(pairs: Sequence[Pair], *, stored_reference: bool) -> list[dict[str, Any]]:
    """One row a pair, as DPOTrainer's collator takes it.

    Raises:
        ValueError: a pair lacks token ids, or with `stored_reference` a log-probability.
    """
    rows = []
    for number, pair in enumerate(pairs):
        row: dict[str, Any] = {"prompt_ids": list(pair.prompt_ids)}
        for side, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            row[f"{side}_ids"] = list(answer.response_ids)
            if stored_reference:
                if answer.logp is None:
                    raise ValueError(f"pair {number} ({pair.task}): {side}.logp is missing: the reference's")
                row[f"ref_{side}_logps"] = answer.logp
        if not (row["prompt_ids"] and row["chosen_ids"] and row["rejected_ids"]):
            raise ValueError(f"pair {number} ({pair.task}): prompt, chosen or rejected has no token ids")
        rows.append(row)
    return rows


def in_training_order(pairs: Sequence[Pair], count: int, seed: int | str) -> list[Pair]:
    """`count` pairs: all of them in random order, then again in another, until there are enough."""
    rng = random.Random(f"pairs/{seed}")
    ordered: list[Pair] = []
    while pairs and len(ordered) < count:
        ordered += rng.sample(list(pairs), len(pairs))
    return ordered[:count]


def micro_batch(pairs: int, max_rows: int) -> int:
    """Pairs in one pass: the largest divisor of `pairs` whose rows, two a pair, are at most `max_rows` (at least 1)."""
    return max(size for size in range(1, pairs + 1) if pairs % size == 0 and (size == 1 or 2 * size <= max_rows))
