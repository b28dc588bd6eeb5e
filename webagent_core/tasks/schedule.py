"""Which tasks a recipe's run plays, and in which order: fixed by its seed, the same on every trainer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from webagent_core.recipe import Recipe
from webagent_core.tasks.lookup import listed_seeds
from webagent_core.tasks.task import Task


def training_seeds(recipe: Recipe) -> Sequence[int]:
    """The seeds to train on: all of a range, or those of it that have a task."""
    listed = listed_seeds(recipe.tasks, recipe.tasks.train_seeds)
    return range(*recipe.tasks.train_seeds) if listed is None else listed


def draw_seed(seeds: Sequence[int], left: list[int], rng: random.Random) -> int:
    """One of a range at random; those of a list in turn, each time shuffled. `left` is what the turn has left."""
    if isinstance(seeds, range):
        return rng.choice(seeds)
    if not left:
        left.extend(rng.sample(seeds, len(seeds)))
    return left.pop()


def training_tasks(recipe: Recipe) -> list[Task]:
    """One task a group, in the order of training: the recipe's tasks in turn, each time shuffled, with fresh seeds."""
    rng = random.Random(f"tasks/{recipe.train.seed}")
    seeds, left = training_seeds(recipe), []
    names: list[str] = []
    tasks = []
    for _ in range(recipe.train.updates * recipe.rollout.groups_per_update):
        if not names:
            names = rng.sample(recipe.tasks.names, len(recipe.tasks.names))
        tasks.append(Task(names.pop(), draw_seed(seeds, left, rng)))
    return tasks


def held_out_tasks(recipe: Recipe) -> list[Task]:
    """The tasks of every evaluation: `train.eval_episodes` pages of each task, from seeds that training never sees."""
    first = recipe.tasks.held_out_seeds[0]
    listed = listed_seeds(recipe.tasks, recipe.tasks.held_out_seeds)
    seeds = range(first, first + recipe.train.eval_episodes) if listed is None else listed
    return [Task(name, seed) for seed in seeds[: recipe.train.eval_episodes] for name in recipe.tasks.names]
