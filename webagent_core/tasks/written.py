"""Tasks that are written down: an instruction and an address each, on live sites or anywhere else.

A file of them has one JSON object a line, as WebGym and OpenWebRL have theirs:

    {"instruction": "Find the opening hours of the town library", "start_url": "https://www.example.org/",
     "rubric": ["The opening hours of the library are given"], "reference_answer": "9 to 18",
     "difficulty": 0, "max_steps": 12, "allowed_hosts": ["www.example.org", "*.example-cdn.net"]}

Only the first two have to be there. A line's number is the seed of its task, so that `tasks.train_seeds` and
`tasks.held_out_seeds` say which lines are trained on and which are kept for evaluation. Nothing on a page says how such
a task went: that is for the recipe's reward manager, which finds here what it has to know of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from webagent_core.browser.page import WebPage, host_of, is_allowed
from webagent_core.rewards.html_check import html_check
from webagent_core.rewards.string_match import check_references
from webagent_core.tasks.task import Outcome, Task

Text = Annotated[str, Field(pattern=r"\S")]

# Which field holds what a reward manager has to know of each task; managers that are not here need nothing.
FACTS = {"rubric": "rubric", "reference": "reference_answer", "mixed": "reference_answer", "rules": "evaluation"}


class WrittenTask(BaseModel):
    """One task as it is written down."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    instruction: Text
    start_url: Text  # http(s)
    rubric: Annotated[list[Text], Field(min_length=1)] | None = None  # all of it must hold
    reference_answer: Text | None = None
    evaluation: dict[str, Any] | None = None  # WebArena's: reference_answers, reference_url, program_html
    difficulty: Annotated[int, Field(ge=0)] | None = None  # level of sampling.max_steps_by_difficulty; null: hardest
    max_steps: Annotated[int, Field(ge=1)] | None = None  # at most the recipe's own limit
    # All that the page may reach: "host" (any port), "host:port", "*.host"; null: the host of `start_url`.
    allowed_hosts: Annotated[list[Text], Field(min_length=1)] | None = None
    cookies: Text | None = None  # a file as Playwright's storage_state writes it: who is logged in
    id: str | None = None  # for people

    @property
    def hosts(self) -> tuple[str, ...]:
        """All that the page may reach while it plays this task."""
        if self.allowed_hosts:
            return tuple(self.allowed_hosts)
        start = urlsplit(self.start_url)
        return (host_of(self.start_url) if start.port else start.hostname,)

    @model_validator(mode="after")
    def reachable(self) -> WrittenTask:
        if not host_of(self.start_url):
            raise ValueError(f"start_url = {self.start_url!r} is not allowed: a full http:// or https:// address")
        for host in self.allowed_hosts or ():
            if not re.fullmatch(r"[\w.*-]+(:\d+)?", host):
                raise ValueError(f"allowed_hosts: {host!r} is not allowed: host, host:port or *.host, without http://")
        if not is_allowed(self.start_url, self.hosts):
            raise ValueError(f"start_url = {self.start_url!r} is not allowed: its host is not one of allowed_hosts")
        return self

    @model_validator(mode="after")
    def judgeable(self) -> WrittenTask:
        if self.evaluation is not None:
            allowed = ("reference_answers", "reference_url", "program_html")
            if not self.evaluation or set(self.evaluation) - set(allowed):
                raise ValueError(
                    f"evaluation = {self.evaluation!r} is not allowed: an object with any of {', '.join(allowed)}"
                )
            if "reference_answers" in self.evaluation:
                check_references(self.evaluation["reference_answers"])
            for check in self.evaluation.get("program_html", ()):
                html_check(check, "<p>")
        return self


def read_lines(path: str) -> Mapping[int, WrittenTask]:
    """The tasks of a file by line number, from 1; empty lines are left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no task, or one that is not as it should be; names file, line, field and what is allowed.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"tasks.file = {path!r}: no such file; allowed is one JSON object a line")
    return _read(file.resolve(), file.stat().st_mtime_ns)


@cache
def _read(file: Path, _: int) -> Mapping[int, WrittenTask]:
    tasks = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), start=1):
        if line.strip():
            tasks[number] = _task(f"{file.name}:{number}", line)
    if not tasks:
        raise ValueError(f"tasks.file = {str(file)!r} holds no task: one JSON object a line is needed")
    return tasks


def _task(where: str, line: str) -> WrittenTask:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    try:
        return WrittenTask.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, given = ".".join(map(str, first["loc"])), first["input"]
    match first["type"]:
        case "value_error":
            said = str(first["ctx"]["error"])
        case "extra_forbidden":
            said = f"unknown field {field}; allowed: {', '.join(WrittenTask.model_fields)}"
        case "missing":
            said = f"{field} is missing"
        case "model_type":
            said = f"{given!r} is not allowed: a JSON object"
        case "string_pattern_mismatch":
            said = f"{field} = {given!r} is not allowed: a text that is not empty"
        case _:
            said = f"{field} = {given!r} is not allowed: {first['msg']}"
    raise ValueError(f"{where}: {said}")


class WrittenTasks:
    """The task set: any name, and the number of a task as its seed."""

    unread = None
    isolation = "context"
    viewport = (1280, 720)
    init_script = None

    def __init__(self, tasks: Mapping[int, WrittenTask]) -> None:
        self.tasks = tasks
        self.allowed_hosts = tuple(sorted({host for task in tasks.values() for host in task.hosts}))

    def __enter__(self) -> WrittenTasks:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def hosts_of(self, task: Task) -> Sequence[str]:
        return self.tasks[task.seed].hosts

    async def open(self, page: WebPage, task: Task) -> str:
        written = self.tasks[task.seed]
        if written.cookies:
            await page.context.add_cookies(json.loads(Path(written.cookies).read_text("utf-8"))["cookies"])
        await page.goto(written.start_url)
        return written.instruction

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        return Outcome(done=False)


def facts_of(tasks: Mapping[int, WrittenTask], names: Iterable[str], manager: str) -> dict[str, Any]:
    """What the reward manager of that name has to know, by group; {} for one that needs nothing.

    Raises:
        ValueError: a task does not say it; names the task and the field.
    """
    field = FACTS.get(manager)
    if field is None:
        return {}
    facts = {number: getattr(task, field) for number, task in tasks.items()}
    missing = [number for number, fact in facts.items() if fact is None]
    if missing and manager != "mixed":  # there, an outcome model judges what has no reference
        raise ValueError(f"task {missing[0]} has no {field}, which reward.manager = {manager!r} goes by")
    return {Task(name, number).group: fact for name in names for number, fact in facts.items()}
