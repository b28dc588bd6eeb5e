"""Which tasks a recipe's run plays, and in which order: fixed by its seed, the same on every trainer."""

from __future__ import annotations

import random

from webagent_core.recipe import Recipe
from webagent_core.tasks.task import Task


def training_tasks(recipe: Recipe) -> list[Task]:
    """One task a group, in the order of training: the recipe's tasks in turn, each time shuffled, with fresh seeds."""
    rng = random.Random(f"tasks/{recipe.train.seed}")
    names: list[str] = []
    tasks = []
    for _ in range(recipe.train.updates * recipe.rollout.groups_per_update):
        if not names:
            names = rng.sample(recipe.tasks.names, len(recipe.tasks.names))
        tasks.append(Task(names.pop(), rng.randrange(*recipe.tasks.train_seeds)))
    return tasks


def held_out_tasks(recipe: Recipe) -> list[Task]:
    """The tasks of every evaluation: `train.eval_episodes` pages of each task, from seeds that training never sees."""
    first = recipe.tasks.held_out_seeds[0]
    return [Task(name, first + i) for i in range(recipe.train.eval_episodes) for name in recipe.tasks.names]
