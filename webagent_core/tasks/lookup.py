"""From a recipe's section `tasks` to the task set that plays it: `task_set_of(recipe.tasks)`.

What the names begin with decides: "miniwob/click-button" is a page of MiniWoB++, "shop/buy" a task in the shop,
"tracker/comment" one on the tracker. With `tasks.file` any one name stands for the tasks that the file holds: a list of
WebArena's if it is a .json file, one object a line otherwise. "webarena" needs none. With `tasks.server` names are the
server's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from webagent_core.browser.page import host_of
from webagent_core.tasks import miniwob
from webagent_core.tasks.miniwob import MiniWoB
from webagent_core.tasks.openenv import RemoteTasks
from webagent_core.tasks.shop import SHOP
from webagent_core.tasks.site import Site
from webagent_core.tasks.task import TaskSet
from webagent_core.tasks.tracker import TRACKER
from webagent_core.tasks.webarena import NAME, package_file, read_webarena
from webagent_core.tasks.written import WrittenTask, WrittenTasks, facts_of, read_lines

if TYPE_CHECKING:
    from webagent_core.recipe import Recipe, Tasks

SITES = (SHOP, TRACKER)


def task_set_of(tasks: Tasks) -> TaskSet | RemoteTasks:
    """The task set, to be entered. Raises what `check_tasks` raises for names that no set has."""
    given = [name for name in ("file", "sites", "logins", "server") if getattr(tasks, name)]
    if "server" in given:
        if len(given) > 1:
            raise ValueError(f"tasks.server = {tasks.server!r} is not allowed with tasks.{given[0]}: one of them")
        if not host_of(tasks.server):
            raise ValueError(f"tasks.server = {tasks.server!r} is not allowed: an http:// or https:// address")
        return RemoteTasks(tasks.server, tasks.server_actions)
    written = written_tasks(tasks)
    if written is not None:
        return WrittenTasks(written)
    prefixes = {name.partition("/")[0] + "/" for name in tasks.names}
    if len(prefixes) > 1:
        raise ValueError(f"tasks.names = {tasks.names} is not allowed: tasks of one set at a time")
    for kind in SITES:
        if kind.prefix in prefixes:
            kind.check(tasks.names)
            return Site(kind)
    if prefixes != {miniwob.PREFIX}:
        sets = ", ".join([miniwob.PREFIX, *(kind.prefix for kind in SITES)])
        raise ValueError(
            f"task {tasks.names[0]!r} is unknown: names begin with {sets}, or are {NAME}, or tasks.file says where the "
            "tasks are"
        )
    for name in tasks.names:
        miniwob.check_name(name)
    return MiniWoB()


def written_tasks(tasks: Tasks) -> Mapping[int, WrittenTask] | None:
    """The written tasks by seed; None: the names are of another task set.

    Raises:
        FileNotFoundError, ValueError: see `written.read_lines` and `webarena.read_webarena`; several names.
    """
    if tell_success(tasks):
        return None
    if len(tasks.names) > 1:
        raise ValueError(f"tasks.names = {tasks.names} is not allowed: one name for what is in one file")
    if tasks.file is not None and not tasks.file.endswith(".json"):
        return read_lines(tasks.file)
    return read_webarena(Path(tasks.file) if tasks.file else package_file(), tasks.sites or {}, tasks.logins)


def known_tasks() -> list[str]:
    """The names of all tasks that need no file or server of yours."""
    return [*sorted(miniwob.all_tasks()), *(name for kind in SITES for name in kind.all_tasks()), NAME]


def tell_success(tasks: Tasks) -> bool:
    """Whether the tasks say themselves how an episode went, so that nobody has to be asked."""
    return tasks.server is not None or tasks.file is None and NAME not in tasks.names


def listed_seeds(tasks: Tasks, within: Sequence[int]) -> Sequence[int] | None:
    """The seeds that have a task, of those from within[0] up to and without within[1]; None: all of them have."""
    written = written_tasks(tasks)
    return None if written is None else [seed for seed in written if within[0] <= seed < within[1]]


def facts_for(recipe: Recipe) -> dict[str, Any]:
    """What the task set itself says of each task that a run plays, for the recipe's reward manager; by group.

    Raises:
        ValueError: it does not say what that manager goes by.
    """
    written = written_tasks(recipe.tasks)
    if written is None:
        return {}
    used = {seed for within in _ranges(recipe.tasks).values() for seed in listed_seeds(recipe.tasks, within)}
    return facts_of(
        {seed: task for seed, task in written.items() if seed in used}, recipe.tasks.names, recipe.reward.manager
    )


def levels_of(tasks: Tasks) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """(difficulty, step limit) of the tasks that state one, by group."""
    written = written_tasks(tasks) or {}
    groups = {seed: f"{tasks.names[0]}#{seed}" for seed in written}
    stated = [
        {groups[seed]: getattr(task, field) for seed, task in written.items() if getattr(task, field) is not None}
        for field in ("difficulty", "max_steps")
    ]
    return stated[0], stated[1]


def check_tasks(recipe: Recipe) -> None:
    """Raise, in one line that names setting, value and what is allowed, for tasks that cannot be played.

    Raises:
        ValueError: an unknown name; no task in a range of seeds; a difficulty without a limit.
        FileNotFoundError, ModuleNotFoundError: a file or package is missing.
    """
    task_set_of(recipe.tasks)
    written = written_tasks(recipe.tasks)
    if written is None:
        return
    for setting, within in _ranges(recipe.tasks).items():
        if not listed_seeds(recipe.tasks, within):
            raise ValueError(
                f"tasks.{setting} = {list(within)} holds none of the {len(written)} tasks of {recipe.tasks.names[0]}: "
                f"allowed are [first, end] with some of {min(written)} to {max(written)}"
            )
    levels = (recipe.sampling.max_steps_by_difficulty if recipe.sampling else None) or ()
    for group, level in levels_of(recipe.tasks)[0].items():
        if levels and level >= len(levels):
            raise ValueError(
                f"{group}: difficulty = {level} is not allowed: 0 to {len(levels) - 1}, as many as "
                f"sampling.max_steps_by_difficulty = {levels} has"
            )


def _ranges(tasks: Tasks) -> dict[str, Sequence[int]]:
    return {"train_seeds": tasks.train_seeds, "held_out_seeds": tasks.held_out_seeds}
