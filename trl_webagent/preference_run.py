"""A run of a method that learns from preference pairs (UI-TARS, Agent Q), on TRL's DPOTrainer.

The walk is that of `trl_webagent.run`, but for the training in its middle. That goes in rounds: gather pairs on real
pages with the policy as it is, store them, train on them. A round's folder, rounds/round-<number> in the run's, holds

    pairs.jsonl     one pair a line, with token ids and, where the reference is stored, log-probabilities
    successes.jsonl steps of successful attempts, where they are imitated (UI-TARS)
    imitated/       the policy after that, from which the round's DPO starts
    gathered.json   how the gathering went
    trees.txt       the search trees, for people (Agent Q)
    checkpoints/    of the DPO trainer
    policy/         what the round made; of the last round it is the run's own policy/
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, SFTConfig, SFTTrainer
from trl.trainer.utils import create_model_from_path

from trl_webagent.console import StepBar, quiet
from trl_webagent.preference_policy import LocalPolicy
from trl_webagent.preference_trainer import PairDPOTrainer, in_training_order, micro_batch, pair_rows
from trl_webagent.run import Run, _MetricsLine, lora_config
from trl_webagent.warm_up import cpu_arguments
from webagent_core.episode.browser_rollout import sees_pictures
from webagent_core.episode.contexts import context_for
from webagent_core.episode.trajectory import Trajectory
from webagent_core.recipe import Recipe
from webagent_core.report.summary import duration, ends_of, success_by_task
from webagent_core.report.text import one_line
from webagent_core.rewards.for_recipe import plays_for_the_page
from webagent_core.sampling.asking import client_of
from webagent_core.sampling.page_search import search_pages
from webagent_core.sampling.pairs import (
    Pair,
    correction_pairs,
    demonstrator_correction,
    load_pairs,
    model_corrections,
)
from webagent_core.sampling.progress import Progress
from webagent_core.sampling.search import SearchSettings, Tree, search_pairs
from webagent_core.tasks.schedule import training_tasks
from webagent_core.tasks.task import Task


@dataclass(frozen=True)
class Round:
    number: int  # from 1
    first: int  # updates before it
    updates: int
    tasks: list[Task]
    folder: Path
    policy: Path

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs.jsonl"

    @property
    def successes(self) -> Path:
        return self.folder / "successes.jsonl"

    @property
    def imitated(self) -> Path:
        return self.folder / "imitated"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def done(self) -> bool:
        return self.policy.is_dir()


class PreferenceRun(Run):
    """One run of one recipe whose objective takes pairs.

    `rollout.groups_per_update` tasks are gathered for each update of a round: searched (Agent Q), or played
    `rollout.group_size` times (UI-TARS). An update is one optimizer step on `pairs.per_update` pairs.

    Raises:
        ValueError: the recipe asks for what cannot be.
        FileNotFoundError: `pairs.file` is not there.
    """

    def __init__(self, recipe: Recipe, out: Path, resume: bool, report_to: str = "none") -> None:
        if recipe.train.num_iterations != 1:
            raise ValueError(
                f"train.num_iterations = {recipe.train.num_iterations} is not allowed: 1, as train.updates counts"
                " optimizer steps and pairs come round as often as those need them"
            )
        if sees_pictures(context_for(recipe)):
            raise ValueError(
                "context.observation = 'screenshot' is not allowed: pairs are of text on TRL; with 'text' the page's"
                " text stands wherever a picture would"
            )
        self.given = load_pairs(Path(recipe.pairs.file)) if recipe.pairs.file else None
        self.corrector = client_of(recipe.pairs.corrector, "pairs.corrector") if recipe.pairs.corrector else None
        super().__init__(recipe, out, resume, report_to)
        self.objective = recipe.load_objective()
        self.rounds = rounds_of(recipe, out)

    def _trainer(self, model: str) -> LocalPolicy:
        """What is evaluated and gathered with. Each round makes a DPO trainer for it."""
        self.warmed_up = model
        done = [round.policy for round in self.rounds if round.done] if self.resume else []
        return self._policy(str(done[-1]) if done else model)

    def _policy(self, folder: str) -> LocalPolicy:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", truncation_side="left")
        model = create_model_from_path(folder)
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        return LocalPolicy(model, tokenizer, self.recipe.rollout, self.recipe.train.max_rows_per_forward)

    def _train(self, checkpoint: str | None) -> None:
        left = [round for round in self.rounds if not (self.resume and round.done)]
        if self.resume:
            self._go_back_to(left[0] if left else None)
        if not any(line["phase"] == "before" for line in self.directory.metrics()):
            self.evaluate("before")
        for round in left:
            pairs = self._pairs_of(round)
            if self.recipe.pairs.imitation_steps:
                self._imitate(round, pairs)
            self._train_on(round, pairs)
        self.evaluate("after")
        if not any(load_pairs(round.pairs) for round in self.rounds):
            gathered = f"{len(self.rounds)} rounds" if len(self.rounds) > 1 else "1 round"
            self.trainer.no_signal = f"no pair in {gathered}: see how they were gathered in {self.out / 'rounds'}"

    def _go_back_to(self, round: Round | None) -> None:
        """Forget what was logged after the last thing that was kept."""
        self.update = self.recipe.train.updates
        if round:
            checkpoint = self._checkpoint_of(round)
            self.update = round.first + (int(checkpoint.rsplit("-", 1)[1]) if checkpoint else 0)
        self.directory.truncate_after(self.update)
        self.console.say(Progress(self.update, self.recipe.train.updates).describe())

    # ------------------------------------------------------------------------------------------------ pairs

    def _pairs_of(self, round: Round) -> list[Pair]:
        """The round's pairs: those that it has, or gathered now."""
        if round.pairs.is_file():
            pairs = load_pairs(round.pairs)
            self.console.say(f"round {round.number}: {len(pairs)} pairs kept from before ({round.pairs})")
            return pairs
        started = time.monotonic()
        round.folder.mkdir(parents=True, exist_ok=True)
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.train.seed * 1000 + round.number)
            pairs, facts = self._gathered(round)
            pairs = self._complete(pairs)
        facts |= {"pairs": len(pairs), "seconds": {"gather": time.monotonic() - started}}
        (round.folder / "gathered.json").write_text(json.dumps(facts, indent=1))
        _write_lines(round.pairs, (pair.record() for pair in pairs))
        self.console.say(f"round {round.number}: {facts.pop('line')}, {len(pairs)} pairs")
        return pairs

    def _gathered(self, round: Round) -> tuple[list[Pair], dict[str, Any]]:
        if self.given is not None:
            return self.given, {"line": f"given in {self.recipe.pairs.file}"}
        return self._searched(round) if self.recipe.search else self._corrected(round)

    def _corrected(self, round: Round) -> tuple[list[Pair], dict[str, Any]]:
        """UI-TARS: a wrong step of each failed attempt, and what the scripted demonstrator or a model does there."""
        attempts = [task for task in round.tasks for _ in range(self.recipe.rollout.group_size)]
        with self._progress(round, "attempts", len(attempts)) as bar:

            def ended(trajectory: Trajectory) -> None:
                bar.advance(0)
                self.scoring.submit(trajectory)

            trajectories = self.rollout.play(attempts, self.trainer.generate, progress=ended)
        self.scoring.finish(trajectories)
        # Under the update that the policy had: a resumed run keeps them as it keeps the pairs.
        self.directory.log_trajectories(self.update, "train", trajectories)
        if self.corrector:
            corrections = asyncio.run(model_corrections(self.corrector, trajectories))
        else:
            corrections = [demonstrator_correction(trajectory) for trajectory in trajectories]
        pairs, left_out = correction_pairs(trajectories, corrections)
        steps = [step for trajectory in trajectories if trajectory.success for step in trajectory.steps]
        _write_lines(
            round.successes, ({"prompt_ids": step.prompt_ids, "response_ids": step.response_ids} for step in steps)
        )
        facts = ends_of(trajectories) | success_by_task(trajectories)
        facts |= {f"no_pair/{why}": count for why, count in sorted(left_out.items())}
        succeeded = sum(trajectory.success for trajectory in trajectories)
        return pairs, facts | {"line": f"{len(trajectories)} attempts, {succeeded} succeeded"}

    def _searched(self, round: Round) -> tuple[list[Pair], dict[str, Any]]:
        """Agent Q: a tree for each task, and pairs from its nodes."""
        settings = SearchSettings.of(self.recipe)
        with self._progress(round, "searches", len(round.tasks)) as bar:
            trees = search_pages(
                self.rollout,
                round.tasks,
                self.trainer.answer,
                settings,
                score=None if plays_for_the_page(self.recipe) else self._score,
                progress=lambda _: bar.advance(0),
            )
        grown = [tree for tree in trees if tree is not None]
        (round.folder / "trees.txt").write_text("\n\n".join(tree.describe(settings.mix) for tree in grown) + "\n")
        pairs = [pair for tree in grown for pair in search_pairs(tree, settings)]
        counts: Counter[str] = sum((tree.counts for tree in grown), Counter())
        counts["env_error"] += len(trees) - len(grown)
        judged = counts["iterations"] - counts["env_error"] - counts["not_restored"] - counts["unjudged"]
        facts: dict[str, Any] = {f"search/{what}": count for what, count in sorted(counts.items())}
        facts |= {"search/trees": len(grown), "search/with_pairs": len({pair.task for pair in pairs})}
        facts |= _searched_by_task(grown)
        if judged:
            facts["success"] = counts["successes"] / judged
        line = f"{len(grown)} searches, {counts['successes']} of {counts['iterations']} attempts succeeded"
        return pairs, facts | {"line": line}

    async def _score(self, trajectory: Trajectory) -> None:
        await asyncio.to_thread(self.scoring.finish, [trajectory])

    def _progress(self, round: Round, what: str, total: int) -> Any:
        return self.console.progress(f"{self.recipe.type}: round {round.number} of {len(self.rounds)}, {what}", total)

    def _complete(self, pairs: Sequence[Pair]) -> list[Pair]:
        """With the token ids and, where the reference is stored, the log-probabilities that a pair may lack.

        What was sampled keeps the tokens it was sampled as.
        """
        policy = self.trainer
        pairs = [
            replace(
                pair,
                prompt_ids=list(pair.prompt_ids) or policy.prompt_ids(pair.messages),
                chosen=_with_ids(pair.chosen, policy.response_ids),
                rejected=_with_ids(pair.rejected, policy.response_ids),
            )
            for pair in pairs
        ]
        if not self.objective.stored_reference:
            return pairs
        lacking = [
            (index, side)
            for index, pair in enumerate(pairs)
            for side in ("chosen", "rejected")
            if getattr(pair, side).logp is None
        ]
        logps = policy.log_probabilities(
            [pairs[index].prompt_ids for index, _ in lacking],
            [getattr(pairs[index], side).response_ids for index, side in lacking],
        )
        for (index, side), logp in zip(lacking, logps, strict=True):
            pairs[index] = replace(pairs[index], **{side: replace(getattr(pairs[index], side), logp=logp)})
        return pairs

    # ------------------------------------------------------------------------------------------------ training

    def _imitate(self, round: Round, pairs: Sequence[Pair]) -> None:
        """UI-TARS's first stage: imitate what succeeded and the corrections. DPO starts from it, its reference."""
        if not round.imitated.is_dir():
            successes = [json.loads(line) for line in _lines(round.successes)]
            rows = [(row["prompt_ids"], row["response_ids"]) for row in successes]
            rows += [(pair.prompt_ids, pair.chosen.response_ids) for pair in pairs]
            told = f"round {round.number}: {len(successes)} steps that succeeded and {len(pairs)} corrections"
            if rows:
                trainer = self._sft_trainer(round, rows)
                with self.console.progress(f"{self.recipe.type}: imitation", trainer.args.max_steps) as bar:
                    trainer.add_callback(StepBar(bar))
                    trainer.train()
                loss = [line["loss"] for line in trainer.state.log_history if "loss" in line]
                told += f" imitated, loss {loss[0]:.2f} -> {loss[-1]:.2f}"
                self._save(trainer, round.imitated)
            else:
                self._save_policy(round.imitated)
            self.console.say(told)
        self.trainer = self._policy(str(round.imitated))
        measured = {(line["phase"], line["update"]) for line in self.directory.metrics()}
        if self.update == round.first and ("during", round.first) not in measured:
            with self.console.progress("held-out seeds, after imitation", 1) as self._bar:
                self._bar.add_task("held-out episodes", total=0)
                self.evaluate("during")

    def _sft_trainer(self, round: Round, rows: Sequence[tuple[list[int], list[int]]]) -> SFTTrainer:
        """Imitation of (prompt, response) rows of token ids; only the response is learned."""
        settings, train = self.recipe.pairs, self.recipe.train
        arguments = SFTConfig(
            output_dir=str(round.folder / "imitation"),
            per_device_train_batch_size=settings.per_update,
            max_steps=settings.imitation_steps,
            learning_rate=settings.imitation_learning_rate or train.learning_rate,
            lr_scheduler_type="cosine",
            max_length=None,
            seed=train.seed,
            save_strategy="no",
            report_to="none",
            logging_steps=max(1, settings.imitation_steps // 10),
            disable_tqdm=True,
            **cpu_arguments(),
        )
        tokens = [
            {"input_ids": [*prompt, *response], "labels": [-100] * len(prompt) + [*response]}
            for prompt, response in rows
        ]
        trainer = SFTTrainer(
            self.trainer.model,
            args=arguments,
            train_dataset=Dataset.from_list(tokens),
            processing_class=self.trainer.tokenizer,
            peft_config=lora_config(self.recipe.policy.lora) if self.recipe.policy.lora else None,
        )
        quiet(trainer)
        return trainer

    def _save(self, trainer: Any, folder: Path) -> None:
        """The trainer's policy, whole, to `folder` and into `self.trainer`; the folder is there when all of it is."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.trainer.model = model.merge_and_unload() if self.recipe.policy.lora else model
        self._save_policy(folder)

    def _save_policy(self, folder: Path) -> None:
        making = folder.with_name(f"{folder.name}.new")
        self.trainer.model.save_pretrained(making)
        self.trainer.tokenizer.save_pretrained(making)
        making.replace(folder)

    def _train_on(self, round: Round, pairs: Sequence[Pair]) -> None:
        facts = json.loads((round.folder / "gathered.json").read_text())
        facts.pop("line", None)
        self._facts = {round.first + 1: facts}
        started = self._since = time.monotonic()
        if pairs:
            trainer = self._dpo_trainer(round, pairs)
            what = f"{self.recipe.type}: round {round.number} of {len(self.rounds)}, updates"
            with self.console.progress(what, round.updates) as self._bar:
                self._bar.add_task("held-out episodes", total=0, visible=False)
                trainer.train(resume_from_checkpoint=self._checkpoint_of(round))
            self._save(trainer, round.policy)
            self.console.say(f"round {round.number}: trained for {duration(time.monotonic() - started)}")
        else:
            self._save_policy(round.policy)
            self.console.say(f"round {round.number}: no pair, so there is nothing to train on")
        self.update = round.first + round.updates

    def _dpo_trainer(self, round: Round, pairs: Sequence[Pair]) -> PairDPOTrainer:
        train, per_update = self.recipe.train, self.recipe.pairs.per_update
        stored, policy = self.objective.stored_reference, self.trainer
        # The reference is the imitated policy. Stock code loads it from where the policy came from, which in a later
        # round without imitation is another one.
        reference = None
        if not stored and round.number > 1 and not self.recipe.pairs.imitation_steps:
            reference = create_model_from_path(self.warmed_up)
        micro = micro_batch(per_update, train.max_rows_per_forward)
        arguments = DPOConfig(
            output_dir=str(round.checkpoints),
            beta=self.objective.beta,
            precompute_ref_log_probs=stored,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=per_update // micro,
            max_steps=round.updates,
            max_length=None,  # the rollout keeps prompts and answers to what fits
            learning_rate=train.learning_rate,
            lr_scheduler_type=train.lr_schedule,
            warmup_steps=train.warmup_ratio or train.warmup_updates,  # below 1 it is a share of the round
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            weight_decay=train.weight_decay,
            max_grad_norm=train.max_grad_norm,
            train_sampling_strategy="sequential",  # the order is drawn here, from the seed
            seed=train.seed,
            logging_steps=1,
            save_strategy="steps",
            save_steps=train.save_every or round.updates,
            save_total_limit=2,
            report_to=self.report_to,
            disable_tqdm=True,
            **cpu_arguments(),
        )
        rows = in_training_order(pairs, round.updates * per_update, f"{train.seed}/{round.number}")
        trainer = PairDPOTrainer(
            policy.model,
            ref_model=reference,
            args=arguments,
            train_dataset=Dataset.from_list(pair_rows(rows, stored_reference=stored)),
            processing_class=policy.tokenizer,
            peft_config=lora_config(self.recipe.policy.lora) if self.recipe.policy.lora else None,
            callbacks=[_MetricsLine(self)],
        )
        quiet(trainer)
        return trainer

    @staticmethod
    def _checkpoint_of(round: Round) -> str | None:
        return get_last_checkpoint(str(round.checkpoints)) if round.checkpoints.is_dir() else None

    def keep_metrics(self, logs: dict[str, Any]) -> None:
        """One finished update, from TRL's log line; the first of a round tells of its gathering too."""
        self.update += 1
        now = time.monotonic()
        facts = self._facts.pop(self.update, {})
        seconds = {**facts.pop("seconds", {}), "train": now - self._since}
        kept = {ours: logs[theirs] for theirs, ours in KEPT_METRICS.items() if logs.get(theirs) is not None}
        line = {"update": self.update, "phase": "train", **kept, **facts, "seconds": seconds}
        self.directory.log_metrics(line)
        self.console.say(one_line(line, self.recipe.train.updates))
        self._bar.advance(0)
        train = self.recipe.train
        if train.eval_every and self.update % train.eval_every == 0 and self.update < train.updates:
            self.evaluate("during")
        self._since = time.monotonic()


KEPT_METRICS = {  # TRL's name: the objective's
    "loss": "loss",
    "rewards/margins": "margin",
    "rewards/accuracies": "accuracy",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


def rounds_of(recipe: Recipe, out: Path) -> list[Round]:
    """The rounds that a recipe's updates and training tasks are spread over; with fewer updates, as many as those."""
    updates, per_update = recipe.train.updates, recipe.rollout.groups_per_update
    count, tasks = min(recipe.pairs.rounds, updates), training_tasks(recipe)
    rounds = []
    for number in range(1, count + 1):
        first, end = updates * (number - 1) // count, updates * number // count
        folder = out / "rounds" / f"round-{number}"
        policy = out / "policy" if number == count else folder / "policy"
        rounds.append(Round(number, first, end - first, tasks[first * per_update : end * per_update], folder, policy))
    return rounds


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line; the file is there only when all of them are in it."""
    making = path.with_suffix(".new")
    making.write_text("".join(json.dumps(record) + "\n" for record in records))
    making.replace(path)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _with_ids(answer: Any, response_ids: Callable[[str], list[int]]) -> Any:
    return answer if answer.response_ids else replace(answer, response_ids=response_ids(answer.text))


def _searched_by_task(trees: Sequence[Tree]) -> dict[str, float]:
    """success/<task> over the attempts of the searches."""
    counts: dict[str, Counter[str]] = {}
    for tree in trees:
        counts.setdefault(tree.group.rsplit("#", 1)[0], Counter()).update(tree.counts)
    return {
        f"success/{task}": count["successes"] / count["iterations"]
        for task, count in sorted(counts.items())
        if count["iterations"]
    }
