"""One live page: go somewhere, observe, act. Every await is bounded; what fails is told apart (see errors.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, CDPSession, Dialog, Page
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import TimeoutError as PlaywrightTimeout

from webagent_core.browser.errors import ActionFailed, PageDied, PageNotReady
from webagent_core.episode.actions import Action

T = TypeVar("T")
_OBSERVE = files(__package__).joinpath("observe.js").read_text()
_SETTLE = files(__package__).joinpath("settle.js").read_text()
_POINT = files(__package__).joinpath("point.js").read_text()
_ELEMENT = "id => window.__webagent?.elements.get(id)?.deref() ?? null"
_SCROLL = """([element, dx, dy]) => {
  const box = element ?? document.scrollingElement ?? document.body;
  const amount = element ?? { clientWidth: innerWidth, clientHeight: innerHeight };
  box.scrollBy(dx * amount.clientWidth * 0.8, dy * amount.clientHeight * 0.8);
}"""
_DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


@dataclass(frozen=True)
class PageLimits:
    """Bounds on what one page may cost. Seconds are wall clock; counts are of the page's own tree."""

    load_seconds: float = 15.0
    call_seconds: float = 10.0  # any single call into the page; a page that holds one up longer is given up
    action_seconds: float = 3.0  # waiting for an element to become visible, enabled and still
    settle_seconds: float = 2.0
    quiet_ms: int = 40  # a page at rest changes nothing for this long
    wait_seconds: float = 5.0  # most that the policy's own wait(...) is granted
    nodes: int = 20_000
    depth: int = 200
    characters: int = 40_000
    name: int = 200
    text: int = 4_000
    options: int = 60
    tabs: int = 4


@dataclass
class Observation:
    """What there is to see: the page as text (see observe.js), and a JPEG if one was asked for."""

    url: str
    title: str
    text: str
    screenshot: bytes | None = None


@dataclass
class WebPage:
    """A page of one browser context, lent to one episode at a time.

    `allowed` holds the "host:port" that the context lets through; the dead proxy of the context is what enforces it,
    the check here only turns a forbidden goto into an answer that the policy can read.
    """

    context: BrowserContext
    page: Page
    allowed: Sequence[str]
    limits: PageLimits = field(default_factory=PageLimits)
    dialogs: list[str] = field(default_factory=list)
    crashed: bool = False

    @classmethod
    async def open(cls, context: BrowserContext, allowed: Sequence[str], limits: PageLimits) -> WebPage:
        web_page = cls(context, await bounded(context.new_page(), limits.call_seconds, "opening a page"), allowed, limits)
        web_page._watch(web_page.page)
        context.on("page", web_page._popup)
        return web_page

    def _watch(self, page: Page) -> None:
        page.on("dialog", self._answer_dialog)
        page.on("crash", lambda _: setattr(self, "crashed", True))

    async def _answer_dialog(self, dialog: Dialog) -> None:
        # Unanswered, a dialog freezes the page. An alert or a "leave this page?" has one sensible answer; a question
        # that the page puts to a person is declined, and the policy is told what was asked.
        self.dialogs.append(f'{dialog.type}: "{dialog.message[:200]}"')
        try:
            await (dialog.accept() if dialog.type in ("alert", "beforeunload") else dialog.dismiss())
        except PlaywrightError as error:
            if not _is_gone(error):  # the page may be closed under its own dialog
                self.dialogs.append(f"unanswered: {first_line(error)}")

    async def _popup(self, page: Page) -> None:
        tabs = self.context.pages
        if len(tabs) > self.limits.tabs:
            await page.close()
            return
        self._watch(page)
        self.page = page  # what a person would be looking at now

    # ------------------------------------------------------------------------------------------------ navigation

    async def goto(self, url: str) -> None:
        """Open `url`. Raises PageNotReady if it cannot be loaded, PageDied if the page is of no further use."""
        try:
            await bounded(
                self.page.goto(url, wait_until="domcontentloaded", timeout=self.limits.load_seconds * 1000),
                self.limits.load_seconds + 1,
                f"loading {url}",
            )
        except PlaywrightTimeout as error:
            raise PageNotReady(f"{url} did not load within {self.limits.load_seconds:g} s") from error
        except PlaywrightError as error:
            raise (PageDied if _is_gone(error) else PageNotReady)(f"{url}: {first_line(error)}") from error

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """Run `script` in the page. A page that navigates meanwhile is asked once more."""
        for attempt in range(2):
            try:
                return await bounded(self.page.evaluate(script, argument), self.limits.call_seconds, "a call into the page")
            except PlaywrightError as error:
                if attempt == 0 and "context was destroyed" in error.message:
                    continue
                raise (PageDied if _is_gone(error) or self.crashed else PageNotReady)(first_line(error)) from error
        raise AssertionError("unreachable")

    async def settle(self) -> bool:
        """Wait until the page rests. False if it was still changing when the time was over (it may be used all the same)."""
        limit = self.limits.settle_seconds * 1000
        return bool(await self.evaluate(_SETTLE, {"quiet": self.limits.quiet_ms, "limit": limit}))

    async def clean(self) -> None:
        """Leave nothing of the last episode behind: extra tabs, storage, cookies, history, dialogs, zoom and scroll."""
        for tab in self.context.pages:
            if tab is not self.page:
                await bounded(tab.close(), self.limits.call_seconds, "closing a tab")
        origin = await self.evaluate("() => { try { sessionStorage.clear() } catch {} window.name = ''; return origin }")
        session = await self._devtools()
        if origin.startswith("http"):
            await bounded(
                session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"}),
                self.limits.call_seconds,
                "clearing storage",
            )
        await bounded(session.send("Page.resetNavigationHistory"), self.limits.call_seconds, "clearing history")
        self.dialogs.clear()

    async def _devtools(self) -> CDPSession:
        if getattr(self, "_session_of", None) is not self.page:
            self._session = await bounded(
                self.context.new_cdp_session(self.page), self.limits.call_seconds, "opening a devtools session"
            )
            self._session_of = self.page
        return self._session

    # ------------------------------------------------------------------------------------------------ observing

    async def observe(self, *, skip: str | None = None, screenshot: bool = False) -> Observation:
        """The page as it is now. `skip`: CSS selector of elements that are not part of what the agent may read."""
        bounds = ("nodes", "depth", "characters", "name", "text", "options")
        limits = {name: getattr(self.limits, name) for name in bounds}
        seen = await self.evaluate(_OBSERVE, {"skip": skip, "limits": limits})
        image = await self.screenshot() if screenshot else None
        return Observation(seen["url"], seen["title"], seen["text"], image)

    async def screenshot(self) -> bytes:
        """The visible part of the page as JPEG."""
        try:
            return await bounded(
                self.page.screenshot(type="jpeg", quality=80, caret="hide", timeout=self.limits.call_seconds * 1000),
                self.limits.call_seconds + 1,
                "a screenshot",
            )
        except PlaywrightError as error:
            raise PageDied(first_line(error)) from error

    # ------------------------------------------------------------------------------------------------ acting

    async def act(self, action: Action) -> str | None:
        """Do one action (not `stop`: that one ends the episode). Returns feedback for the policy, None if there is none.

        Raises:
            ActionFailed: the page is fine, the action could not be done.
            PageDied: the page is of no further use.
        """
        try:
            await self._do(action)
        except PlaywrightTimeout as error:
            raise ActionFailed(f"{action}: {_why_not(error)}") from error
        except PlaywrightError as error:
            if self.crashed or _is_gone(error):
                raise PageDied(first_line(error)) from error
            raise ActionFailed(f"{action}: {first_line(error)}") from error
        except PageNotReady as error:
            raise ActionFailed(f"{action}: {error}") from error
        told, self.dialogs = "; ".join(self.dialogs), []
        return f"the page showed a dialog ({told})" if told else None

    async def _do(self, action: Action) -> None:
        wait = self.limits.action_seconds * 1000
        match action.name:
            case "click":
                point = await self._bounded(self.page.evaluate(_POINT, {"id": action.element, "limit": wait}))
                if "error" in point:
                    raise ActionFailed(f"{action}: {point['error']}")
                await self._bounded(self.page.mouse.click(point["x"], point["y"]))
            case "type":
                element = await self._element(action)
                await self._bounded(element.fill(action.text or "", timeout=wait))
                if action.enter:
                    await self._bounded(element.press("Enter", timeout=wait))
            case "select":
                await self._bounded((await self._element(action)).select_option(label=action.option, timeout=wait))
            case "scroll":
                element = await self._element(action) if action.element else None
                await self._bounded(self.page.evaluate(_SCROLL, [element, *_DIRECTIONS[action.direction]]))
            case "goto":
                self._check_host(action.url)
                await self.goto(action.url)
            case "back":
                if len(self.context.pages) > 1 and await self.page.evaluate("history.length") <= 1:
                    await self._bounded(self.page.close())
                    self.page = self.context.pages[-1]
                elif await self._bounded(self.page.go_back(wait_until="domcontentloaded", timeout=wait)) is None:
                    raise ActionFailed(f"{action}: there is no earlier page")
            case "wait":
                # The one sleep there is: the policy asked for it.
                await asyncio.sleep(min(action.seconds or 1.0, self.limits.wait_seconds))
            case _:
                raise ValueError(f"a page cannot do {action.name!r}")

    async def _element(self, action: Action) -> Any:
        handle = await self._bounded(self.page.evaluate_handle(_ELEMENT, action.element))
        element = handle.as_element()
        if element is None:
            raise ActionFailed(f"{action}: there is no element {action.element} on this page")
        return element

    async def _bounded(self, call: Awaitable[T]) -> T:
        return await bounded(call, self.limits.call_seconds, "an action on the page")

    def _check_host(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.netloc not in self.allowed:
            raise ActionFailed(f"goto: {url} is not allowed here (allowed: {', '.join(self.allowed)})")


async def bounded(call: Awaitable[T], seconds: float, what: str) -> T:
    """Await `call` for at most `seconds`; a call that takes longer means a page that is of no further use.

    Playwright's own time-outs do not cover every call: evaluate, and closing a hung page, would wait for ever.
    """
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError as error:
        if isinstance(error, PlaywrightTimeout):
            raise
        raise PageDied(f"{what} took more than {seconds:g} s") from error


def first_line(error: PlaywrightError) -> str:
    return error.message.strip().splitlines()[0] if error.message.strip() else type(error).__name__


def _is_gone(error: PlaywrightError) -> bool:
    gone = ("has been closed", "Target crashed", "Page crashed", "Target closed", "Connection closed", "Browser closed")
    return any(words in error.message for words in gone)


def _why_not(error: PlaywrightError) -> str:
    """The line of Playwright's log that says what stood in the way, e.g. which element covers the target."""
    for line in reversed(error.message.splitlines()):
        line = line.strip().lstrip("- ")
        if "intercepts pointer events" in line or "not visible" in line or "not enabled" in line or "not stable" in line:
            return line[:200]
    return first_line(error)
