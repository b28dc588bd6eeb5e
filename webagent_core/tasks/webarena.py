"""WebArena's tasks (arXiv:2307.13854) on sites of your own: its task files, with your addresses in them.

The 812 tasks are in the package `webarena-verified`, of which only that file is used; WebArena-Lite's 165, or any
others in the same form, are a JSON file of yours. Those on sites that the recipe does not name are left out, and those
that nobody here could play or judge (`why_not`). A task's number in its file is its seed. `reward.manager` `rules` is
WebArena's evaluation.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from webagent_core.browser.page import host_of
from webagent_core.tasks.written import WrittenTask

NAME = "webarena"  # of the package's tasks
SITES = ("gitlab", "map", "reddit", "shopping", "shopping_admin", "wikipedia")
_RULES = {"string_match": "reference_answers", "url_match": "reference_url", "program_html": "program_html"}


def package_file() -> Path:
    """The file with all 812 tasks, found without importing the package."""
    spec = importlib.util.find_spec("webarena_verified")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "the tasks of WebArena need the package webarena-verified, without what it depends on: "
            "pip install --no-deps webarena-verified==1.2.3"
        )
    return Path(spec.submodule_search_locations[0]) / "assets" / "dataset" / "test.raw.json"


def read_webarena(file: Path, sites: Mapping[str, str], logins: str | None) -> Mapping[int, WrittenTask]:
    """The tasks of a file that can be played on these sites, by number.

    Args:
        sites: address of each site that there is.
        logins: folder with the sites' logins as WebArena's own script saves them (shopping_state.json ...); None:
            nobody is logged in.

    Raises:
        FileNotFoundError: the file is not there, or no login of that name.
        ValueError: it is no list of WebArena's tasks, a site is unknown or its address none, or no task can be played.
    """
    for site, address in sites.items():
        if site not in SITES:
            raise ValueError(f"tasks.sites.{site} is not known; there are {', '.join(SITES)}")
        if not host_of(address):
            raise ValueError(f"tasks.sites.{site} = {address!r} is not allowed: an http:// or https:// address")
    if not file.is_file():
        raise FileNotFoundError(f"tasks.file = {str(file)!r}: no such file; allowed is a list of WebArena's tasks")
    tasks = _read(file.resolve(), file.stat().st_mtime_ns, tuple(sorted(sites.items())), logins)
    if not tasks:
        raise ValueError(f"tasks.sites = {dict(sites)}: no task of {file.name} can be played with these sites alone")
    return tasks


def why_not(task: Mapping[str, Any], sites: Mapping[str, str]) -> str | None:
    """Why a task cannot be played or judged here; None: it can."""
    missing = [site for site in task["sites"] if site not in sites]
    if missing:
        return f"there is no site {missing[0]}"
    if " |AND| " in task["start_url"]:
        return "it begins in several windows"
    if "program_html" in task["eval"]["eval_types"]:
        if any(check["url"] != "last" for check in task["eval"]["program_html"]):
            return "it is judged on pages that the episode need not have seen"
    return None


@cache
def _read(file: Path, _: int, sites: tuple[tuple[str, str], ...], logins: str | None) -> Mapping[int, WrittenTask]:
    try:
        content = json.loads(file.read_text("utf-8"))
        numbers = [task["task_id"] for task in content]
        found = {number: _written(task, dict(sites), logins) for number, task in zip(numbers, content, strict=True)}
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{file.name}: no list of WebArena's tasks ({type(error).__name__}: {error})") from None
    return {number: task for number, task in found.items() if task is not None}


def _written(task: dict[str, Any], sites: Mapping[str, str], logins: str | None) -> WrittenTask | None:
    if why_not(task, sites):
        return None
    text = json.dumps(task)
    for site, address in sites.items():
        text = text.replace(f"__{site.upper()}__", json.dumps(address.rstrip("/"))[1:-1])
    task = json.loads(text)
    rules = {_RULES[kind]: task["eval"][_RULES[kind]] for kind in task["eval"]["eval_types"]}
    login = None
    if logins and task.get("storage_state"):
        login = str(Path(logins) / Path(task["storage_state"]).name)
        if not Path(login).is_file():
            raise FileNotFoundError(f"tasks.logins = {logins!r}: {login} is not there")
    try:
        return WrittenTask(
            id=str(task["task_id"]),
            instruction=task["intent"],
            start_url=task["start_url"],
            evaluation=rules,
            allowed_hosts=sorted({host_of(sites[site]) for site in task["sites"]}),
            cookies=login,
        )
    except ValidationError:  # a check that reads the page by a script of its own: nobody here can
        return None
