"""A recipe run on TRL, from its settings to its report: `python recipes/<recipe>/train_trl.py --help`.

Everything that differs between papers is in the recipe; what is here is the walk: check, warm up, measure, train,
measure. `command_line.py` is the part that runs before the heavy imports of this module."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from trl_webagent.command_line import last_checkpoint
from trl_webagent.console import Console, quiet
from trl_webagent.critic_config import CriticConfig
from trl_webagent.critic_trainer import CriticTrainer
from trl_webagent.lora import lora_config
from trl_webagent.phase_trainer import PhaseTrainer
from trl_webagent.reference import check_alike
from trl_webagent.step_grpo_config import StepGRPOConfig
from trl_webagent.step_grpo_trainer import StepGRPOTrainer
from trl_webagent.warm_up import cpu_arguments, warm_up
from webagent_core.episode.browser_rollout import BrowserRollout, settings_of
from webagent_core.episode.rollout import GenerateBatch
from webagent_core.episode.trajectory import Trajectory
from webagent_core.policy.tiny import named_model, start_of
from webagent_core.policy.vision_processing import counter_of, load_processing_class
from webagent_core.recipe import Critic, Recipe
from webagent_core.report.run_directory import RunDirectory
from webagent_core.report.summary import closing_lines, cut_steps, duration, ends_of, failed_steps, success_by_task
from webagent_core.report.text import one_line
from webagent_core.report.viewer import make_report
from webagent_core.rewards import Scoring
from webagent_core.rewards.counts import reward_metrics
from webagent_core.rewards.for_recipe import rewards_for
from webagent_core.rewards.reward_manager import RewardManager
from webagent_core.sampling.filters import NoSignal
from webagent_core.sampling.generated_goals import look_at
from webagent_core.sampling.progress import Progress, check_checkpoint
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.task_filter import describe_selection
from webagent_core.tasks.lookup import tell_success
from webagent_core.tasks.schedule import held_out_tasks
from webagent_core.tasks.task import Task


def trainer_class(recipe: Recipe) -> type[StepGRPOTrainer]:
    """The trainer of the recipe's method."""
    objective = recipe.load_objective()
    if "responses" in objective.inputs:
        from trl_webagent.hcpo_trainer import HCPOTrainer

        return HCPOTrainer
    if objective.uses_critic:
        return PhaseTrainer if objective.uses_reference else CriticTrainer
    return StepGRPOTrainer


def critic_settings(recipe: Recipe) -> dict[str, Any]:
    """The critic's part of `CriticConfig`; empty for a method without one."""
    if not recipe.load_objective().uses_critic:
        return {}
    critic = recipe.critic or Critic()
    return {
        "critic_learning_rate": critic.learning_rate or recipe.train.learning_rate,
        "critic_passes": critic.passes or recipe.train.num_iterations,
        "critic_pretrain_passes": critic.pretrain_passes,
        "critic_rows_per_step": critic.rows_per_step,
        "critic_min_gain": critic.min_gain,
    }


class Run:
    """One run of one recipe; `go` does all of it."""

    def __init__(self, recipe: Recipe, out: Path, resume: bool, report_to: str = "none") -> None:
        if recipe.policy.reference:
            try:
                check_alike(start_of(recipe), named_model(recipe.policy.reference))
            except ValueError as error:
                raise ValueError(f"policy.{error}") from None
        self.recipe = recipe
        self.out = out
        self.resume = resume
        self.report_to = report_to
        self.directory = RunDirectory(out)
        self.console = Console()
        self.scoring = Scoring(self._rewards())
        self.sampling = Sampling(recipe)
        self.sampling.check()
        checkpoint = last_checkpoint(out)
        if resume and checkpoint and (state := Path(checkpoint) / "sampling-0.pt").is_file():
            # Refuse now what the trainer would refuse after the warm-up.
            resumed = Sampling(recipe)
            resumed.load_state_dict(torch.load(state, weights_only=True)["sampling"])
            check_checkpoint(self._update_of(checkpoint), resumed.update)
        self.update = 0

    def _rewards(self) -> RewardManager:
        return rewards_for(self.recipe)

    def _update_of(self, checkpoint: str) -> int:
        return int(checkpoint.rsplit("-", 1)[1]) // self.recipe.train.num_iterations

    def go(self) -> None:
        """Raises NoSignal, after the report, when training ended because no task gives signal any more."""
        recipe, started = self.recipe, time.monotonic()
        self.directory.write_config(recipe.resolved())
        with BrowserRollout(**settings_of(recipe, counter_of(recipe))) as self.rollout:
            pool, runner = self.rollout.pool, self.rollout.runner
            runner.task_set = self.sampling.task_set(runner.task_set)
            self.console.say(
                f"{recipe.type}, {recipe.preset} preset: Chromium {pool.browser_version}, {pool.pages} pages, "
                f"run in {self.out}"
            )
            model = warm_up(recipe, self.rollout, self.console) if recipe.policy.warm_up else start_of(recipe)
            self.trainer = self._trainer(str(model))
            self._train(last_checkpoint(self.out) if self.resume else None)
        self._report(time.monotonic() - started)
        if self.trainer.no_signal:
            raise NoSignal(self.trainer.no_signal)

    def _train(self, checkpoint: str | None) -> None:
        updates = self.recipe.train.updates
        if checkpoint:
            self.update = self._update_of(checkpoint)
            self.directory.truncate_after(self.update)
            self.console.say(Progress(self.update, updates).describe())
        else:
            self.evaluate("before")
            if self.sampling.task_filter:
                self._choose_tasks()
            if self.sampling.generated_tasks:
                self._generate_tasks()
        started = time.monotonic()
        with self.console.progress(f"{self.recipe.type}: updates", updates) as self._bar:
            self._bar.add_task("episodes", total=self.recipe.rollout.groups_per_update * self.recipe.rollout.group_size)
            if not self.trainer.no_signal:
                self.trainer.train(resume_from_checkpoint=checkpoint)
        self.console.say(f"trained for {duration(time.monotonic() - started)}")
        self.evaluate("after")
        self.trainer.save_model(str(self.out / "policy"))

    def _trainer(self, model: str) -> StepGRPOTrainer:
        rollout, train, policy = self.recipe.rollout, self.recipe.train, self.recipe.policy
        critic = critic_settings(self.recipe)
        arguments = (CriticConfig if critic else StepGRPOConfig)(
            output_dir=str(self.out / "checkpoints"),
            num_generations=rollout.group_size,
            per_device_train_batch_size=rollout.groups_per_update * rollout.group_size,
            gradient_accumulation_steps=1,
            num_iterations=train.num_iterations,
            max_steps=train.updates * train.num_iterations,
            max_completion_length=rollout.max_response_tokens,
            max_context_tokens=rollout.max_context_tokens,
            max_rows_per_forward=train.max_rows_per_forward,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k or 0,
            learning_rate=train.learning_rate,
            lr_scheduler_type=train.lr_schedule,
            # Below 1 it is a share of all steps.
            warmup_steps=train.warmup_ratio or train.warmup_updates * train.num_iterations,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            weight_decay=train.weight_decay,
            max_grad_norm=train.max_grad_norm,
            shuffle_dataset=False,
            seed=train.seed,
            logging_steps=train.num_iterations,
            save_strategy="steps",
            save_steps=(train.save_every or train.updates) * train.num_iterations,
            save_total_limit=2,
            report_to=self.report_to,
            disable_tqdm=True,
            **critic,
            **cpu_arguments(),
        )
        trainer = trainer_class(self.recipe)(
            model,
            objective=self.recipe.load_objective(),
            play=self._play,
            on_trajectories=self._keep,
            args=arguments,
            **self._batches(),
            processing_class=load_processing_class(model),
            peft_config=lora_config(policy.lora) if policy.lora else None,
            callbacks=[_MetricsLine(self)],
        )
        quiet(trainer)
        if policy.reference:
            trainer.load_reference(named_model(policy.reference))
        return trainer

    def _batches(self) -> dict[str, Any]:
        """What the trainer's batches are made of."""
        # The tasks are the sampling's: fixed by the seed, and more of them where a filter asks for more.
        groups = self.recipe.train.updates * self.recipe.rollout.groups_per_update
        rows = [{"prompt": [{"role": "user", "content": "a task"}]}] * groups
        return {"sampling": self.sampling, "train_dataset": Dataset.from_list(rows)}

    def _play(self, rows: list[dict[str, Any]], generate: GenerateBatch) -> list[Trajectory]:
        self._bar.reset(1, total=len(rows))
        tasks = [Task(row["task"], row["seed"]) for row in rows]
        self.rollout.runner.max_steps_of = lambda task: self.sampling.step_limits(task, self.sampling.update)

        def ended(trajectory: Trajectory) -> None:
            self._bar.advance(1)
            self.scoring.submit(trajectory)

        trajectories = self.rollout.play(tasks, generate, progress=ended)
        self.scoring.finish(trajectories)
        return trajectories

    def _choose_tasks(self) -> None:
        """ARPO: train on those single tasks alone that the starting policy solves now and then."""
        task_filter, tasks = self.sampling.task_filter, self.sampling.candidates
        most = len(tasks) * task_filter.trials
        with self.console.progress(f"task filter: {task_filter.trials} trials a task", most) as bar:

            def play(attempts: Sequence[Task]) -> list[float | None]:
                trajectories = self._play_apart(attempts, lambda _: bar.advance(0))
                self.scoring.finish(trajectories)
                return [trajectory.score for trajectory in trajectories]

            tried = task_filter.select(tasks, play)
        self.console.say(describe_selection(tried))
        kept = [each.task for each in tried if each.kept]
        if kept:
            self.sampling.tasks.restrict(kept)
        else:
            self.trainer.no_signal = f"{describe_selection(tried)}: no task is left to train on"

    def _generate_tasks(self) -> None:
        """ZeroGUI: tasks made from what start pages show come before the recipe's own."""
        starts = self.rollout.loop.run(look_at(self.rollout.runner, self.sampling.start_pages()))
        self.console.say(asyncio.run(self.sampling.first_stage(starts)))

    def _play_apart(self, tasks: Sequence[Task], progress: Callable[[Trajectory], None]) -> list[Trajectory]:
        """Play beside training with the policy as it is: random numbers of its own, and the run's last step limits."""
        self.trainer.model.eval()
        self.rollout.runner.max_steps_of = lambda task: self.sampling.step_limits(task, self.recipe.train.updates - 1)
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.train.seed)
            return self.rollout.play(tasks, self.trainer.generate, progress=progress)

    def _keep(self, trajectories: list[Trajectory], advantages: list[float | None]) -> None:
        self.directory.log_trajectories(self.update + 1, "train", trajectories, advantages)
        self.per_task = success_by_task(trajectories) | failed_steps(trajectories) | cut_steps(trajectories)
        self.per_task |= reward_metrics(trajectories)

    def keep_metrics(self, logs: dict[str, Any]) -> None:
        """One finished update, from TRL's log line."""
        self.update += 1
        seconds = {key.removeprefix("seconds/"): value for key, value in logs.items() if key.startswith("seconds/")}
        if "step_time" in logs:
            seconds["other"] = max(0.0, logs["step_time"] * self.recipe.train.num_iterations - sum(seconds.values()))
        seconds["rewards"], self.scoring.waited_seconds = self.scoring.waited_seconds, 0.0
        seconds["rollout"] = max(0.0, seconds.get("rollout", 0.0) - seconds["rewards"])
        kept = {key: logs[key] for key in KEPT_METRICS if logs.get(key) is not None}
        kept |= {key: value for key, value in logs.items() if key.startswith(("exit_status/", "groups/", "replay/"))}
        line = {"update": self.update, "phase": "train", **kept, **self.per_task, "seconds": seconds}
        self.directory.log_metrics(line)
        self.console.say(one_line(line, self.recipe.train.updates))
        self._bar.update(0, completed=self.update)
        train = self.recipe.train
        if train.eval_every and self.update % train.eval_every == 0 and self.update < train.updates:
            self.evaluate("during")

    def evaluate(self, phase: str) -> None:
        """Success of the policy as it is now on held-out seeds, sampled as in training; the same pages every time."""
        tasks = held_out_tasks(self.recipe)
        if phase == "during":  # there is one bar on the screen at a time
            self._bar.reset(1, total=len(tasks))
            bar, row = nullcontext(self._bar), 1
        else:
            bar, row = self.console.progress(f"held-out seeds, {phase} training", len(tasks)), 0
        with bar as bar:
            trajectories = self._play_apart(tasks, lambda _: bar.advance(row))
        if not tell_success(self.recipe.tasks):
            self.scoring.finish(trajectories)
        episodes = sum(trajectory.valid for trajectory in trajectories)
        line = {"update": self.update, "phase": phase, "episodes": episodes, **ends_of(trajectories)}
        self.directory.log_metrics(line | success_by_task(trajectories) | self._also_measured())
        self.directory.log_trajectories(self.update, phase, trajectories, None)
        self.console.say(one_line(line))

    def _also_measured(self) -> dict[str, float]:
        """What an evaluation says beside success on held-out seeds."""
        return {}

    def _report(self, seconds: float) -> None:
        curve, page = make_report(self.directory)
        *by_task, overall = closing_lines(self.directory.metrics(), self.recipe.tasks.names, self.recipe.train.seed)
        for line in by_task:
            self.console.say(line)
        self.console.say(f"{duration(seconds)} in all; every step to click through: {page}; the curve: {curve}")
        self.console.say(overall)


KEPT_METRICS = (
    "success", "return", "steps", "trajectories", "invalid", "rows", "loss", "policy_loss", "kl", "consistency",
    "ratio", "clip_ratio", "behave_weight", "staleness", "entropy", "grad_norm", "learning_rate", "tokens_per_second",
    "browser_steps_per_second", "explained_variance", "value_loss", "value_mean", "value_grad_norm", "log_ratio",
    "new_tasks/joined",
)  # fmt: skip


class _MetricsLine(TrainerCallback):
    """Turns TRL's log of an update into a line of the run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.run.keep_metrics(dict(logs))
