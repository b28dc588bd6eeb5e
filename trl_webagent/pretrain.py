"""Makes the base of the tiny policy: `python -m trl_webagent.pretrain FOLDER`. Its result is webagent_core/policy/base.

The base has practised looking up a name and copying the id after it on made-up pages (see
webagent_core/policy/made_up_pages.py) and knows no task. Its vocabulary is what the pages of the default tasks say,
read off pages opened on training seeds. Copying is found slowly, over thousands of steps: that is why this is not part
of a run.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from trl_webagent.console import Console, quiet
from trl_webagent.warm_up import cpu_arguments
from webagent_core.episode.browser_rollout import BrowserRollout
from webagent_core.policy.demonstrations import gather
from webagent_core.policy.made_up_pages import MadeUpPages, words_of
from webagent_core.policy.tiny import build_policy
from webagent_core.policy.tokenizer import END, build_tokenizer
from webagent_core.tasks.demonstrations import DEMONSTRATORS
from webagent_core.tasks.task import Task

BATCH = 32
# Share of the training and the largest page in it: copying is found sooner among few elements.
STAGES = ((0.3, 4), (0.25, 6), (0.45, 9))
MORE_PRACTICE = ((1.0, 9),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=1200)
    parser.add_argument(
        "--pages-per-task", type=int, default=150, help="how many pages of each task the words are read from"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from FOLDER's checkpoint, to another --steps if you like"
    )
    parser.add_argument("--start", help="practise on from this base, at half the learning rate, on the largest pages")
    arguments = parser.parse_args()

    console, start = Console(), arguments.start
    checkpoint = get_last_checkpoint(str(arguments.folder / "trainer")) if arguments.resume else None
    if checkpoint or start:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint or start)
    else:
        tokenizer = build_tokenizer(page_texts(arguments.pages_per_task), arguments.vocabulary)
    words = words_of(tokenizer)
    if start:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    else:
        model = build_policy(tokenizer, hidden=arguments.width, layers=arguments.layers)
    console.say(f"{len(tokenizer)} tokens, {len(words)} of them words; {model.num_parameters():,} parameters")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(arguments.folder / "trainer"),
            per_device_train_batch_size=BATCH,
            max_steps=arguments.steps,
            learning_rate=1e-3 if start else 2e-3,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": int(0.4 * arguments.steps), "min_lr_ratio": 0.05},
            warmup_steps=100,
            weight_decay=0.01,
            adam_beta2=0.98,
            train_sampling_strategy="sequential",  # the rows come in batches of like length already
            max_length=None,
            save_steps=500,
            save_total_limit=1,
            report_to="none",
            logging_steps=100,
            disable_tqdm=True,
            **cpu_arguments(),
        ),
        train_dataset=Dataset.from_list(
            list(rows(tokenizer, words, arguments.steps, stages=MORE_PRACTICE if start else STAGES))
        ),
        processing_class=tokenizer,
        callbacks=[Progress(console, list(held_out(tokenizer, words)))],
    )
    quiet(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    model.half().save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    shutil.rmtree(arguments.folder / "trainer", ignore_errors=True)


def page_texts(pages_per_task: int) -> list[str]:
    """What the pages of the tasks with a demonstrator say, one text an episode."""
    tasks = [Task(name, seed) for seed in range(pages_per_task) for name in sorted(DEMONSTRATORS)]
    with BrowserRollout(screenshots=False) as rollout:
        episodes = gather(rollout, tasks, mistakes=0.0, seed=0)
    return ["\n".join([episode.goal, *(step.observation for step in episode.steps)]) for episode in episodes]


def rows(
    tokenizer: PreTrainedTokenizerBase, words: list[str], steps: int, stages: Sequence[tuple[float, int]]
) -> Iterator[dict[str, list[int]]]:
    """The training rows in order, in batches of rows of like length."""
    pages = MadeUpPages(words, seed=1)
    for share, largest in stages:
        pages.largest = largest
        batches = round(share * steps)
        while batches > 0:
            block = sorted(
                (encoded(tokenizer, pages) for _ in range(BATCH * 16)), key=lambda row: len(row["input_ids"])
            )
            for start in pages.rng.sample(range(0, len(block), BATCH), min(16, batches)):
                yield from block[start : start + BATCH]
            batches -= 16


def held_out(tokenizer: PreTrainedTokenizerBase, words: list[str]) -> Iterator[dict[str, list[int]]]:
    pages = MadeUpPages(words, seed=0)
    for _ in range(256):
        yield encoded(tokenizer, pages)


def encoded(tokenizer: PreTrainedTokenizerBase, pages: MadeUpPages) -> dict[str, list[int]]:
    """One row; only the response is learned."""
    messages, response = pages.sample()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    answer = tokenizer(response + END)["input_ids"]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


class Progress(TrainerCallback):
    """Says how the loss falls and how many of the held-out pages are answered right to the last token."""

    def __init__(self, console: Console, held_out: list[dict[str, list[int]]]) -> None:
        self.console = console
        self.held_out = sorted(held_out, key=lambda row: len(row["input_ids"]))

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if "loss" in logs:
            self.console.say(f"step {state.global_step}: loss {logs['loss']:.3f}, right {self.right(model):.3f}")

    @torch.no_grad()
    def right(self, model) -> float:
        right = 0
        for start in range(0, len(self.held_out), 64):
            part = self.held_out[start : start + 64]
            pad = torch.nn.utils.rnn.pad_sequence
            ids = pad([torch.tensor(row["input_ids"]) for row in part], batch_first=True)
            labels = pad([torch.tensor(row["labels"]) for row in part], batch_first=True, padding_value=-100)[:, 1:]
            guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)  # right padding: no mask needed to look left
            right += ((guesses == labels) | (labels == -100)).all(1).sum().item()
        return right / len(self.held_out)


if __name__ == "__main__":
    main()
