"""An OpenEnv server where the browser stands: episodes on whatever it offers, a desktop, a phone, another browser.

    tasks.server=http://127.0.0.1:8000 tasks.names=[click-test]

Names are the server's own. An episode is one reset, with the task's name and seed, and one step an action, over a web
socket for each page of the pool. Of an observation are read, as far as it has them: `text` (or `axtree_txt`,
`pruned_html`), `screenshot` (base64, or rows of pixels), `goal` (or `instruction`), `url`, `error`. Actions are sent as
text, in the one field that the server's schema asks for, spelled as `tasks.server_actions` says. The rewards of an
episode's steps are added up.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from PIL import Image

from webagent_core.browser.errors import ActionFailed, PageDied, PageNotReady
from webagent_core.browser.page import KEY_NAMES, Observation, PageLimits, one_line
from webagent_core.episode.actions import Action
from webagent_core.tasks.task import Outcome, Task

_TEXTS = ("text", "axtree_txt", "pruned_html")
_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")  # errors that speak of the action and not of the environment
_SCROLL = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


def browsergym(action: Action) -> str:
    """The action as BrowserGym spells it. A text and Enter after it are two lines."""
    point = f"{action.x!r}, {action.y!r}"
    match action.name:
        case "click" if action.x is None:
            return f"click({action.element!r})"
        case "click":
            return f"mouse_click({point})"
        case "double_click":
            return f"mouse_dblclick({point})"
        case "right_click":
            return f"mouse_click({point}, button='right')"
        case "drag":
            return f"mouse_drag_and_drop({point}, {action.x2!r}, {action.y2!r})"
        case "type" if action.element is None:
            return f"keyboard_type({action.text!r})" + "\nkeyboard_press('Enter')" * action.enter
        case "type":
            return f"fill({action.element!r}, {action.text!r})" + f"\npress({action.element!r}, 'Enter')" * action.enter
        case "select":
            return f"select_option({action.element!r}, {action.option!r})"
        case "hotkey":
            return f"keyboard_press({'+'.join(KEY_NAMES.get(key, key) for key in action.keys)!r})"
        case "scroll":
            right, down = _SCROLL[action.direction]
            return f"scroll({400 * right}, {400 * down})"
        case "goto":
            return f"goto({action.url!r})"
        case "back":
            return "go_back()"
        case "wait":
            return f"noop({round(1000 * (action.seconds or 1.0))})"
        case "stop":
            return f"send_msg_to_user({action.answer!r})"
    raise ActionFailed(f"{action}: there is no such action here")


def pyautogui(action: Action) -> str:
    """The action as a line for pyautogui, as OSWorld takes it; the end of an episode is DONE."""
    point = f"{action.x!r}, {action.y!r}"
    match action.name:
        case "click" if action.x is not None:
            return f"pyautogui.click({point})"
        case "double_click":
            return f"pyautogui.doubleClick({point})"
        case "right_click":
            return f"pyautogui.rightClick({point})"
        case "drag":
            return f"pyautogui.moveTo({point}); pyautogui.dragTo({action.x2!r}, {action.y2!r}, duration=0.5)"
        case "type" if action.element is None:
            return f"pyautogui.write({action.text!r})" + "; pyautogui.press('enter')" * action.enter
        case "hotkey":
            return f"pyautogui.hotkey({', '.join(map(repr, action.keys))})"
        case "scroll":
            right, down = _SCROLL[action.direction]
            return f"pyautogui.hscroll({5 * right})" if right else f"pyautogui.scroll({-5 * down})"
        case "wait":
            return "WAIT"
        case "stop":
            return "DONE"
    raise ActionFailed(f"{action}: there is no such action here; a desktop is acted on at points")


SPELLINGS: dict[str, Callable[[Action], str]] = {
    "browsergym": browsergym,
    "pyautogui": pyautogui,
    "call": str,  # as this project's policies write it: click(12)
}


@dataclass
class RemotePage:
    """One session with the server: what a `WebPage` is to a browser."""

    socket: aiohttp.ClientWebSocketResponse
    field: str  # of an action: where its text goes
    spell: Callable[[Action], str]
    seconds: float
    seen: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    reward: float = 0.0

    async def reset(self, task: Task) -> str:
        """Begin an episode. Returns its goal."""
        try:
            self._take(await self._ask("reset", {"seed": task.seed, "task_name": task.name}))
        except ActionFailed as error:
            raise PageNotReady(str(error)) from error
        self.reward = 0.0
        return str(self.seen.get("goal") or self.seen.get("instruction") or task.name)

    async def act(self, action: Action) -> None:
        """One step. Raises ActionFailed where the action could not be done, PageDied where the session is over."""
        self._take(await self._ask("step", {self.field: self.spell(action)}))
        if self.seen.get("error"):
            raise ActionFailed(f"{action}: {one_line(str(self.seen['error']), 400)}")

    async def settle(self) -> bool:
        return True  # the server answers when a step is done

    async def observe(self, *, skip: str | None = None, screenshot: bool = False, html: bool = False) -> Observation:
        text = next((self.seen[name] for name in _TEXTS if self.seen.get(name)), "")
        picture = as_jpeg(self.seen.get("screenshot")) if screenshot else None
        return Observation(str(self.seen.get("url") or ""), "", text, screenshot=picture)

    @property
    def viewport(self) -> tuple[int, int]:
        """Width and height of a screenshot, in whose pixels points are sent."""
        picture = as_jpeg(self.seen.get("screenshot"))
        if picture is None:
            raise PageNotReady("the server's observations have no screenshot")
        return Image.open(io.BytesIO(picture)).size

    def _take(self, said: dict[str, Any]) -> None:
        self.seen = said.get("observation") or {}
        self.done = bool(said.get("done"))
        self.reward += float(said.get("reward") or 0.0)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        try:
            await self.socket.send_str(json.dumps({"type": kind, "data": data}))
            said = await self.socket.receive_json(timeout=self.seconds)
        except (aiohttp.ClientError, ConnectionError, TimeoutError, TypeError, ValueError) as error:
            await self.socket.close()
            raise PageDied(f"{kind}: the server does not answer: {error or type(error).__name__}") from error
        if said.get("type") == "error":
            told = said.get("data") or {}
            failed = ActionFailed if told.get("code") in _REFUSED else PageDied
            raise failed(one_line(f"{kind}: the server says {told.get('message')} ({told.get('code')})", 400))
        return said.get("data") or {}


def as_jpeg(picture: Any) -> bytes | None:
    """A screenshot as base64 of an image file, or as rows of (red, green, blue), made a JPEG."""
    if picture is None or picture == "":
        return None
    if isinstance(picture, str):
        image = Image.open(io.BytesIO(base64.b64decode(picture.rpartition("base64,")[2])))
    else:
        import numpy

        image = Image.fromarray(numpy.asarray(picture, dtype=numpy.uint8))
    made = io.BytesIO()
    image.convert("RGB").save(made, "JPEG", quality=80)
    return made.getvalue()


class RemotePool:
    """Sessions with the server, each lent to one episode at a time; what a `BrowserPool` is to a browser."""

    def __init__(self, server: str, spelling: str, pages: int, limits: PageLimits) -> None:
        self.server, self.spell, self.pages = server.rstrip("/"), SPELLINGS[spelling], pages
        self.seconds = limits.load_seconds
        self.browser_version = f"none, but the server {self.server}"
        self._idle: list[RemotePage] = []

    async def __aenter__(self) -> RemotePool:
        self._free = asyncio.Semaphore(self.pages)
        self._http = aiohttp.ClientSession()
        try:
            self.field = await self._text_field()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for page in self._idle:
            await page.socket.close()
        await self._http.close()

    async def _text_field(self) -> str:
        """The one text that an action of this server consists of."""
        try:
            async with self._http.get(f"{self.server}/schema", timeout=aiohttp.ClientTimeout(self.seconds)) as answer:
                schema = (await answer.json())["action"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise ConnectionError(
                f"tasks.server = {self.server!r}: no OpenEnv server there ({type(error).__name__}: {error})"
            ) from error
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if len(required) != 1 or properties[required[0]].get("type") != "string":
            raise ValueError(
                f"tasks.server = {self.server!r}: its actions have the fields {', '.join(required) or 'none'}; allowed "
                "is a server whose actions are one text"
            )
        return required[0]

    @asynccontextmanager
    async def page(self, hosts: Sequence[str] | None = None) -> AsyncIterator[RemotePage]:
        """Lend a session. Raises PageNotReady if none can be had; what the borrower raises passes through."""
        async with self._free:
            page = self._idle.pop() if self._idle else await self._connect()
            try:
                yield page
            except BaseException:
                await page.socket.close()
                raise
            if page.socket.closed:
                return
            self._idle.append(page)

    async def _connect(self) -> RemotePage:
        url = f"{self.server}/ws"
        try:
            socket = await asyncio.wait_for(self._http.ws_connect(url, max_msg_size=0, heartbeat=20), self.seconds)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise PageNotReady(f"{url}: {error or type(error).__name__}") from error
        return RemotePage(socket, self.field, self.spell, self.seconds)


class RemoteTasks:
    """The task set of a server: any name that it knows, any seed."""

    allowed_hosts: tuple[str, ...] = ()  # what its pages may reach is the server's affair
    unread = None

    def __init__(self, server: str, spelling: str = "browsergym") -> None:
        self.server, self.spelling = server, spelling

    def __enter__(self) -> RemoteTasks:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def pool(self, pages: int, limits: PageLimits) -> RemotePool:
        return RemotePool(self.server, self.spelling, pages, limits)

    def hosts_of(self, task: Task) -> None:
        return None

    async def open(self, page: RemotePage, task: Task) -> str:
        return await page.reset(task)

    async def outcome(self, page: RemotePage, answer: str | None = None) -> Outcome:
        detail = ""
        if answer is not None and not page.done:  # the server has to hear of the end, for only then it may look
            try:
                await page.act(Action("stop", answer=answer))
            except ActionFailed as error:  # it has no such action: what it said before stands
                detail = f"; {error}"
        if not page.done and answer is None:
            return Outcome(done=False)
        return Outcome(done=True, reward=page.reward, detail=f"the server's reward: {page.reward:g}{detail}")
