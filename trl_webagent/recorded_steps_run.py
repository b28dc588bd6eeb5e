"""A run of a method that learns from single recorded steps (HiconAgent), on HCPOTrainer.

The walk is that of `trl_webagent.run`, but for what is trained on: answers to recorded steps and no episodes. The
recording is the folder `sampling.recorded_steps` (see webagent_core/tasks/recorded_steps.py), or is made of scripted
demonstrators at work on the tasks, and kept. Success on held-out seeds is measured on real pages all the same, and
beside it the score of answers to held-out steps.
"""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from trl_webagent.run import Run
from trl_webagent.warm_up import _hash
from webagent_core.cache import cache_folder
from webagent_core.episode.browser_rollout import sees_pictures
from webagent_core.episode.contexts import context_for
from webagent_core.episode.rollout import GenerateBatch
from webagent_core.episode.trajectory import Trajectory
from webagent_core.rewards.for_recipe import rewards_for
from webagent_core.rewards.reward_manager import RewardManager
from webagent_core.rewards.rules import GoldStepReward
from webagent_core.sampling.rows import draw_single_steps
from webagent_core.sampling.step_answers import StepAnswers, draw_history, gold_of, history_bias, step_schedule
from webagent_core.tasks.record_demonstrations import record_demonstrations
from webagent_core.tasks.recorded_steps import POINT_SPACE, RecordedStep, action_at_point, read_steps
from webagent_core.tasks.schedule import held_out_tasks
from webagent_core.tasks.task import Task

HELD_OUT_EVERY = 10  # of the episodes of a given recording, each tenth is for measuring
STEPS_PER_EPISODE = 2  # that a demonstration has at least, on average; more episodes are not recorded than are needed
PAGES_PER_TASK = 5  # of the held-out ones whose steps are recorded


class RecordedStepsRun(Run):
    """One run of one recipe whose objective takes answers to single steps.

    Raises:
        ValueError: the recipe asks for what cannot be.
    """

    def _rewards(self) -> RewardManager:
        self.at_points = sees_pictures(context_for(self.recipe))
        space = self.recipe.policy.coordinates
        if self.at_points and space != POINT_SPACE:
            raise ValueError(f"policy.coordinates = {space!r} is not allowed: recorded points are {POINT_SPACE}")
        manager = rewards_for(self.recipe, gold=gold_of)
        if self.at_points and isinstance(manager, GoldStepReward):
            manager.parse = action_at_point
        return manager

    # ------------------------------------------------------------------------------------------------ recorded steps

    def _batches(self) -> dict[str, Any]:
        """A data set with one row a group, in the order of training: a recorded step."""
        recipe, runner = self.recipe, self.rollout.runner
        self.answers = StepAnswers(runner.context, runner.budget, at_points=self.at_points)
        steps, self.held_out = self._recording()
        drawn = [steps[i] for i in draw_single_steps(len(steps), recipe.sampling.training_steps, recipe.train.seed)]
        fitting = [step for step in drawn if self.answers.fits(step)]
        self.held_out = [step for step in self.held_out if self.answers.fits(step)]
        self.console.say(
            f"recorded steps: {len(steps)}, of which {len(drawn)} were drawn to train on"
            + (f"; {len(drawn) - len(fitting)} do not fit the context" if len(fitting) < len(drawn) else "")
        )
        rows = Dataset.from_list(
            [step.row() | {"prompt": [{"role": "user", "content": step.name}]} for step in fitting]
        )
        order = step_schedule(len(fitting), recipe.rollout.groups_per_update, recipe.train.updates, recipe.train.seed)
        return {"train_dataset": rows.select(order)}

    def _recording(self) -> tuple[list[RecordedStep], list[RecordedStep]]:
        """The steps to train on and those to measure on."""
        recipe = self.recipe
        if recipe.sampling.recorded_steps:
            steps = read_steps(Path(recipe.sampling.recorded_steps), at_points=self.at_points)
            measured = set(sorted({step.episode for step in steps})[::HELD_OUT_EVERY])
            return [s for s in steps if s.episode not in measured], [s for s in steps if s.episode in measured]
        names, rng = recipe.tasks.names, random.Random(f"recorded/{recipe.train.seed}")
        episodes = math.ceil(recipe.sampling.training_steps / STEPS_PER_EPISODE)
        tasks = [Task(names[i % len(names)], rng.randrange(*recipe.tasks.train_seeds)) for i in range(episodes)]
        measured = held_out_tasks(recipe)[: PAGES_PER_TASK * len(names)]
        return self._demonstrated(tasks), self._demonstrated(measured)

    def _demonstrated(self, tasks: Sequence[Task]) -> list[RecordedStep]:
        recipe, made_with = self.recipe, [version("miniwob"), self.rollout.pool.browser_version]
        key = _hash(
            ["browser", "tasks", "episode/actions"],
            [task.group for task in tasks],
            recipe.browser.viewport,
            recipe.rollout.max_steps,
            made_with,
        )
        folder = cache_folder() / f"recorded-{key}"
        if not folder.is_dir():
            making = folder.with_name(f"{folder.name}.{os.getpid()}")
            shutil.rmtree(making, ignore_errors=True)
            with self.console.progress("recording demonstrations", len(tasks)) as bar:
                record_demonstrations(self.rollout, tasks, making, progress=lambda _: bar.advance(0))
            making.replace(folder)
        return read_steps(folder, at_points=self.at_points)

    # ------------------------------------------------------------------------------------------------ answers

    def _play(self, rows: list[dict[str, Any]], generate: GenerateBatch) -> list[Trajectory]:
        sampling, train = self.recipe.sampling, self.recipe.train
        history = None
        if sampling.history_steepness is not None:
            rng = random.Random(f"history/{train.seed}/{self.update}")
            bias = history_bias(self.update, train.updates, sampling.history_steepness, sampling.history_ramp)

            def history(available: int) -> int:
                return draw_history(available, bias, rng)

        trajectories = self.answers(rows, generate, history)
        self.scoring.finish(trajectories)
        return trajectories

    def keep_metrics(self, logs: dict[str, Any]) -> None:
        # No browser takes part in training.
        super().keep_metrics({key: value for key, value in logs.items() if key != "browser_steps_per_second"})

    def _also_measured(self) -> dict[str, float]:
        """Answers to the held-out steps: mean reward, and the share of steps that are done right."""
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.train.seed)
            answers = self.answers([step.row() for step in self.held_out], self.trainer.generate)
        self.scoring.finish(answers)
        line = {
            "held_out_steps": len(answers),
            "step_score": sum(each.reward for each in answers) / len(answers),
            "step_success": sum(each.success for each in answers) / len(answers),
        }
        self.console.say(
            f"{line['held_out_steps']} held-out steps: score {line['step_score']:.2f}, done {line['step_success']:.2f}"
        )
        return line
