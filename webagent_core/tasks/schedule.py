"""Which tasks a recipe's run plays, and in which order: fixed by its seed, the same on every trainer."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

from webagent_core.recipe import Recipe
from webagent_core.tasks.lookup import listed_seeds
from webagent_core.tasks.task import Task


def training_seeds(recipe: Recipe) -> Sequence[int]:
    """The seeds to train on: all of a range, or those of it that have a task."""
    listed = listed_seeds(recipe.tasks, recipe.tasks.train_seeds)
    return range(*recipe.tasks.train_seeds) if listed is None else listed


def fresh_task(name: str, seeds: Sequence[int], rng: random.Random, taken: Collection[Task]) -> Task:
    """The task with a seed drawn at random; one of `taken` only if all are: equal tasks of a batch are one group."""
    if len(seeds) <= len(taken):
        left = [seed for seed in seeds if Task(name, seed) not in taken]
        return Task(name, rng.choice(left or seeds))
    while (task := Task(name, rng.choice(seeds))) in taken:
        pass
    return task


def training_tasks(recipe: Recipe) -> list[Task]:
    """One task a group, in the order of training: the recipe's tasks in turn, each time shuffled, with fresh seeds."""
    rng = random.Random(f"tasks/{recipe.train.seed}")
    seeds = training_seeds(recipe)
    names: list[str] = []
    tasks: list[Task] = []
    for number in range(recipe.train.updates * recipe.rollout.groups_per_update):
        if not names:
            names = rng.sample(recipe.tasks.names, len(recipe.tasks.names))
        batch = tasks[number - number % recipe.rollout.groups_per_update :]
        tasks.append(fresh_task(names.pop(), seeds, rng, batch))
    return tasks


def held_out_tasks(recipe: Recipe) -> list[Task]:
    """The tasks of every evaluation: `train.eval_episodes` pages of each task, from seeds that training never sees."""
    first = recipe.tasks.held_out_seeds[0]
    listed = listed_seeds(recipe.tasks, recipe.tasks.held_out_seeds)
    seeds = range(first, first + recipe.train.eval_episodes) if listed is None else listed
    return [Task(name, seed) for seed in seeds[: recipe.train.eval_episodes] for name in recipe.tasks.names]
