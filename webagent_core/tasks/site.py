"""A site with a database an episode: a real application in a process of its own, whose state is what is graded.

Each episode gets a database of its own, which its task and seed determine. Every request of its pages carries the
episode's name in a header, which no policy sees or changes, so any number of them are played at a time on one server.
A task is done when the policy says so with `stop`; then the application looks into that database. A site says what its
tasks are and which module serves it (see site_server.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from webagent_core.browser.errors import PageNotReady
from webagent_core.browser.page import WebPage
from webagent_core.tasks.site_server import HEADER
from webagent_core.tasks.task import Outcome, Task

PEOPLE = {"anna": "plum-27", "mary": "pear-41", "paul": "fig-68", "tom": "lime-93"}  # of a site, and their passwords
_START_SECONDS = 120.0  # a database may have to be made first
_COMMAND_SECONDS = 30.0


@dataclass(frozen=True)
class SiteKind:
    """One application.

    Args:
        prefix: of its tasks' names.
        module: what serves it.
        package: what has to be installed for it.
        tasks: names of its tasks, without the prefix.
    """

    prefix: str
    module: str
    package: str
    tasks: tuple[str, ...]

    def all_tasks(self) -> list[str]:
        return [self.prefix + task for task in self.tasks]

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError for a name that is none of its tasks, ModuleNotFoundError where the package is missing."""
        for name in names:
            if name not in self.all_tasks():
                raise ValueError(f"task {name!r} is unknown; there are {', '.join(self.all_tasks())}")
        if importlib.util.find_spec(self.package) is None:
            raise ModuleNotFoundError(
                f"tasks.names = {list(names)} need the package {self.package}: pip install 'webagent-rl[sites]'"
            )


def log_in(name: str, password: str, goal: str) -> str:
    """The words of a task that begins with a login and ends with `stop`."""
    return f'Log in as "{name}" with the password "{password}", {goal}, and stop.'


def same_answer(given: str | None, expected: str) -> bool:
    """Whether that is what was asked for, be it in quotes, in capitals or with a full stop."""
    return (given or "").strip().strip('".').casefold() == expected.casefold()


class Site:
    """The task set of one application: `with Site(TRACKER) as tasks`."""

    unread = None
    isolation = "context"
    viewport = (1280, 720)
    init_script = None

    def __init__(self, kind: SiteKind) -> None:
        self.kind = kind

    def __enter__(self) -> Site:
        self._folder = tempfile.TemporaryDirectory(prefix="webagent-site-", ignore_cleanup_errors=True)
        command = [sys.executable, "-m", "webagent_core.tasks.site_server", self.kind.module, self._folder.name]
        # In a session of its own, Ctrl-C at the terminal does not reach it; it ends when we do.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._numbers, self._waiting = itertools.count(), {}
        self._episodes: dict[Any, str] = {}  # by browser context
        self._writing, port = threading.Lock(), queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(port,), name=self.kind.module, daemon=True)
        self._reader.start()
        try:
            self.host = f"127.0.0.1:{port.get(timeout=_START_SECONDS)}"
        except queue.Empty:
            self.__exit__()
            raise RuntimeError(f"{self.kind.module} did not start within {_START_SECONDS:g} s") from None
        if self.host.endswith(":"):
            self.__exit__()
            raise RuntimeError(f"{self.kind.module} did not start: exit {self._process.returncode}")
        self.allowed_hosts = (self.host,)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):  # it ended before us, and something was left to tell it
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._folder.cleanup()

    def hosts_of(self, task: Task) -> None:
        return None

    async def open(self, page: WebPage, task: Task) -> str:
        context = page.context
        if context in self._episodes:  # one page may play a task again and again
            self._end(context)
            await context.clear_cookies()
        else:
            context.on("close", self._end)
        episode = f"e{next(self._numbers)}"
        begun = await self._do("begin", episode, task.name.removeprefix(self.kind.prefix), task.seed)
        self._episodes[context] = episode
        await context.set_extra_http_headers({HEADER: episode})
        await page.goto(f"http://{self.host}/{begun['start']}")
        return begun["goal"]

    async def outcome(self, page: WebPage, answer: str | None = None) -> Outcome:
        if answer is None:
            return Outcome(done=False)
        judged = await self._do("judge", self._episodes[page.context], answer)
        return Outcome(done=True, reward=judged["reward"], detail=judged["detail"])

    def folder_of(self, page: WebPage) -> Path:
        """Where the state of the page's episode is."""
        return Path(self._folder.name) / self._episodes[page.context]

    def _end(self, context: Any) -> None:
        if context not in self._episodes:  # it never began
            return
        try:
            self._tell(next(self._numbers), "end", self._episodes.pop(context))
        except (OSError, ValueError):  # the process is gone, and its folder will be
            return

    async def _do(self, command: str, *arguments: Any) -> Any:
        """Have the server process do it. Raises PageNotReady if it cannot, for no policy can have caused that."""
        number, reply = next(self._numbers), Future()
        self._waiting[number] = reply
        try:
            self._tell(number, command, *arguments)
            return await asyncio.wait_for(asyncio.wrap_future(reply), _COMMAND_SECONDS)
        except (OSError, ValueError, TimeoutError) as error:
            raise PageNotReady(f"{self.kind.module} does not answer: {error or type(error).__name__}") from error
        finally:
            self._waiting.pop(number, None)

    def _tell(self, number: int, command: str, *arguments: Any) -> None:
        with self._writing:
            self._process.stdin.write(json.dumps({"id": number, "do": command, "arguments": arguments}) + "\n")
            self._process.stdin.flush()

    def _read(self, port: queue.SimpleQueue[str]) -> None:
        """In a thread of its own: hand every reply to whoever waits for it."""
        port.put(self._process.stdout.readline().strip())
        for line in self._process.stdout:
            said = json.loads(line)
            reply = self._waiting.get(said["id"])
            if reply is None or not reply.set_running_or_notify_cancel():  # nobody waits any more
                continue
            if "error" in said:
                reply.set_exception(PageNotReady(f"{self.kind.module}: {said['error']}"))
            else:
                reply.set_result(said["result"])
        for reply in list(self._waiting.values()):
            if reply.set_running_or_notify_cancel():
                reply.set_exception(PageNotReady(f"{self.kind.module} ended"))
