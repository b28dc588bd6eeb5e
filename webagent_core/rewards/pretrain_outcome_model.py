"""Makes the base of small outcome models: `python -m webagent_core.rewards.pretrain_outcome_model FOLDER`.

Its result is webagent_core/rewards/outcome_base, where train_outcome_model starts from unless told otherwise. It has
practised, from the tiny policy's base on, to tell right attempts from wrong ones on made-up pages, and knows no task.
That two names are the same is found slowly, and sooner on pages of two elements: that is why this is not part of
training on a run.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from webagent_core.episode.trajectory import Trajectory
from webagent_core.policy.made_up_pages import words_of
from webagent_core.policy.tiny import BASE
from webagent_core.rewards.made_up_attempts import MadeUpAttempts
from webagent_core.rewards.outcome_model import OutcomeModel, auc
from webagent_core.rewards.train_outcome_model import batches

BATCH = 64
STAGES = ((0.3, 2), (0.25, 5), (0.45, 9))  # share of the steps, and the largest page in it


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    given = parser.parse_args(arguments)
    model = OutcomeModel.load(BASE, dtype=torch.float32, max_tokens=2048)
    words = words_of(model.tokenizer)
    apart = MadeUpAttempts(words, seed=0)
    held_out = [apart.attempt() for _ in range(512)]
    optimizer = torch.optim.AdamW(
        model.model.parameters(), lr=given.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min((at + 1) / 100, 1.0, max(0.05, (given.steps - at) / (0.3 * given.steps)))
    )
    started, losses = time.monotonic(), []
    for step, batch in enumerate(rows(words, given.steps), start=1):
        model.model.train()
        failed = torch.tensor([not each.success for each in batch]).long()
        loss = torch.nn.functional.cross_entropy(model.logits(batch).float(), failed)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 0 or step == given.steps:
            found = auc(model.probabilities(held_out), [each.success for each in held_out])
            seconds = time.monotonic() - started
            print(f"step {step}: loss {sum(losses) / len(losses):.3f}, AUC {found:.3f}, {seconds:.0f} s", flush=True)
            losses = []
    model.model.half()
    model.save(given.folder)


def rows(words: list[str], steps: int) -> Iterator[list[Trajectory]]:
    """The training batches in order, pages of like length together."""
    attempts, rng = MadeUpAttempts(words, seed=1), random.Random(1)
    done = 0
    for share, attempts.largest in STAGES:
        last = min(steps, done + round(share * steps))
        while done < last:
            for batch in batches([attempts.attempt() for _ in range(16 * BATCH)], BATCH, rng)[: last - done]:
                yield batch
                done += 1


if __name__ == "__main__":
    main()
