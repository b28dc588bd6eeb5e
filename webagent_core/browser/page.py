"""One live page: go somewhere, observe, act. Every await is bounded; what fails is told apart (see errors.py)."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, CDPSession, Dialog, Page, Request
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
  box.scrollBy({ left: dx * amount.clientWidth * 0.8, top: dy * amount.clientHeight * 0.8, behavior: "instant" });
}"""
# Labels are compared as the observation spells them: that is all a policy can know of them.
_FIND_OPTION = """(element, wanted) => {
  if (element.tagName !== "SELECT") return { error: "this element has no options" };
  const clean = window.__webagent.clean;
  const labels = [...element.options].map((option) => clean(option.textContent));
  const index = labels.indexOf(clean(wanted));
  if (index >= 0) return { index };
  return { error: "there is no such option; there are " + labels.slice(0, 20).map((label) => `"${label}"`).join(" ") };
}"""
_DIRECTIONS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_DEFAULT_PORTS = {"http": 80, "https": 443}
# What a page asks its server for and then shows. Pictures, beacons and open streams are nothing to wait for.
_AWAITED = frozenset({"document", "script", "xhr", "fetch"})
_WINDOW = "window"
_KEY_NAMES = {  # of a hotkey, as Playwright spells those that it does not spell as we do
    **{"ctrl": "Control", "shift": "Shift", "alt": "Alt", "meta": "Meta", "capslock": "CapsLock", "esc": "Escape"},
    **{name: name.capitalize() for name in "enter tab space backspace delete insert home end".split()},
    **{"pageup": "PageUp", "pagedown": "PageDown", **{f"f{number}": f"F{number}" for number in range(1, 13)}},
    **{way: f"Arrow{way.capitalize()}" for way in ("up", "down", "left", "right")},
}
_MOST_KEYSTROKES = 300  # a longer text is put in at once, as by pasting: each key is a call to the browser
_MOST_DIALOGS = 5  # told of at once; a page may show any number


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
    html: int = 2_000_000
    name: int = 200
    text: int = 4_000
    options: int = 60
    tabs: int = 4


@dataclass
class Observation:
    """What there is to see: the page as text (see observe.js), and a JPEG and the document if they were asked for."""

    url: str
    title: str
    text: str
    screenshot: bytes | None = None
    html: str = ""


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
    loans: int = 0  # episodes that had it before

    def __post_init__(self) -> None:
        self._first = self.page
        self._blank_behind = True  # the next page to load has an empty one before it in the history
        self._sessions: dict[Page, CDPSession] = {}
        self._under_way: list[Request | str] = []  # requests without their answer, windows that are about to open
        self._all_came = asyncio.Event()
        self._all_came.set()

    @classmethod
    async def open(cls, context: BrowserContext, allowed: Sequence[str], limits: PageLimits) -> WebPage:
        page = await bounded(context.new_page(), limits.call_seconds, "opening a page")
        web_page = cls(context, page, allowed, limits)
        await web_page._watch(page)
        context.on("page", web_page._popup)
        context.on("request", lambda request: request.resource_type in _AWAITED and web_page._await(request))
        context.on("requestfinished", web_page._came)
        context.on("requestfailed", web_page._came)
        return web_page

    async def _watch(self, page: Page) -> None:
        page.on("dialog", self._answer_dialog)
        page.on("crash", lambda _: setattr(self, "crashed", True))
        page.on("close", self._closed)
        # Playwright tells of a new window when it has one, by when we would have taken the old one for all there is.
        await self._devtools("Page.enable", page=page)
        self._sessions[page].on("Page.windowOpen", lambda _: self._await(_WINDOW))

    async def _answer_dialog(self, dialog: Dialog) -> None:
        # Unanswered, a dialog freezes the page. An alert or a "leave this page?" has one sensible answer; a question
        # that the page puts to a person is declined, and the policy is told what was asked.
        self.dialogs[_MOST_DIALOGS - 1 :] = [f'{dialog.type}: "{one_line(dialog.message)}"']
        # The page may be closed under its own dialog.
        await quietly(dialog.accept() if dialog.type in ("alert", "beforeunload") else dialog.dismiss())

    async def _popup(self, page: Page) -> None:
        if len(self.context.pages) > self.limits.tabs:
            await quietly(page.close())
        else:
            self.page = page  # what a person would be looking at now
            await quietly(self._watch(page))
        self._came(_WINDOW)

    def _closed(self, page: Page) -> None:
        self._sessions.pop(page, None)
        if page is self.page and self.context.pages:
            self.page = self.context.pages[-1]

    def _await(self, what: Request | str) -> None:
        self._under_way.append(what)
        self._all_came.clear()

    def _came(self, what: Request | str) -> None:
        if what in self._under_way:
            self._under_way.remove(what)
        if not self._under_way:
            self._all_came.set()

    def _forget_what_is_under_way(self) -> None:
        self._under_way.clear()
        self._all_came.set()

    # ------------------------------------------------------------------------------------------------ navigation

    async def goto(self, url: str) -> None:
        """Open `url`. Raises PageNotReady if it cannot be loaded, PageDied if the page is of no further use."""
        seconds = self.limits.load_seconds
        for attempt in range(3):
            try:
                if attempt:
                    call = self.page.wait_for_load_state("domcontentloaded", timeout=seconds * 1000)
                    await bounded(call, seconds + 1, f"loading {self.page.url}")
                    if self.page.url == url:
                        break
                call = self.page.goto(url, wait_until="domcontentloaded", timeout=seconds * 1000)
                await bounded(call, seconds + 1, f"loading {url}")
                break
            except PlaywrightTimeout as error:
                raise PageNotReady(f"{url} did not load within {seconds:g} s") from error
            except PlaywrightError as error:
                # The browser may still be bringing up the error page of what failed before this, or our last attempt.
                if attempt < 2 and "interrupted by another navigation" in error.message:
                    continue
                raise (PageDied if _is_gone(error) else PageNotReady)(f"{url}: {first_line(error)}") from error
        if self._blank_behind:
            self._blank_behind = False
            await self._devtools("Page.resetNavigationHistory")

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """Run `script` in the page. One that navigates or makes way for another tab meanwhile is asked once more."""
        for attempt in range(2):
            page = self.page
            try:
                call = page.evaluate(script, argument)
                return await bounded(call, self.limits.call_seconds, "a call into the page")
            except PlaywrightError as error:
                if attempt == 0 and ("context was destroyed" in error.message or page is not self.page):
                    continue
                raise (PageDied if _is_gone(error) or self.crashed else PageNotReady)(first_line(error)) from error
        raise AssertionError("unreachable")

    async def settle(self) -> bool:
        """Wait until the page rests: nothing changes, and what it asked its server for has come.

        Returns False if it was still changing when the time was over; it may be used all the same.
        """
        end = time.monotonic() + self.limits.settle_seconds
        rested = True
        while rested:
            page = self.page
            limit = max(0.0, end - time.monotonic()) * 1000
            rested = bool(await self.evaluate(_SETTLE, {"quiet": self.limits.quiet_ms, "limit": limit}))
            if rested and page is self.page and not self._under_way:
                return True
            try:
                await asyncio.wait_for(self._all_came.wait(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                break
        self._forget_what_is_under_way()  # one that is kept open on purpose must not hold up every later step as well
        return False

    async def clean(self) -> None:
        """Leave nothing of the last episode behind: its document, storage, cookies, history, dialogs.

        What the browser cached by HTTP stays. Raises BrowserError or Playwright's Error if the page is of no further
        use; one that had more tabs is not, since windows that opened each other stay linked.
        """
        # The old document has to go first, or its timers and unload handlers would write again after the clearing.
        seconds = self.limits.action_seconds
        await bounded(self.page.goto("about:blank", timeout=seconds * 1000), seconds + 1, "leaving a page")
        await self.evaluate("window.name = ''")
        # No origin by that name exists; Chromium takes it for all of them, and for session storage and cookies too.
        await self._devtools("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
        if self.context.pages != [self._first]:
            raise PageDied("a page that has opened others is not used again")
        self._blank_behind = True
        self._forget_what_is_under_way()
        self.dialogs.clear()

    async def _devtools(self, method: str, parameters: dict | None = None, page: Page | None = None) -> dict:
        page, seconds = page or self.page, self.limits.call_seconds
        if page not in self._sessions:
            self._sessions[page] = await bounded(self.context.new_cdp_session(page), seconds, "a devtools session")
        return await bounded(self._sessions[page].send(method, parameters), seconds, method)

    # ------------------------------------------------------------------------------------------------ observing

    async def observe(self, *, skip: str | None = None, screenshot: bool = False, html: bool = False) -> Observation:
        """The page as it is now. `skip`: CSS selector of elements that are not part of what the agent may read."""
        bounds = ("nodes", "depth", "characters", "name", "text", "options", *["html"] * html)
        limits = {name: getattr(self.limits, name) for name in bounds}
        seen = await self.evaluate(_OBSERVE, {"skip": skip, "limits": limits})
        image = await self.screenshot() if screenshot else None
        return Observation(seen["url"], seen["title"], seen["text"], image, seen["html"])

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

    @property
    def viewport(self) -> tuple[int, int]:
        """Width and height in CSS pixels of what a screenshot shows."""
        size = self.page.viewport_size
        if size is None:  # a browser of somebody else's may let its window decide
            raise PageNotReady("the page has no viewport of a fixed size")
        return size["width"], size["height"]

    # ------------------------------------------------------------------------------------------------ acting

    async def act(self, action: Action) -> str | None:
        """Do one action (not `stop`: that one ends the episode). Returns feedback for the policy, or None.

        Points are in CSS pixels of the viewport (`CoordinateSpace.on_page`).

        Raises:
            ActionFailed: the page is fine, the action could not be done.
            PageDied: the page is of no further use.
        """
        page = self.page
        try:
            await self._do(action)
        except PlaywrightTimeout as error:
            raise ActionFailed(f"{action}: {_why_not(error)}") from error
        except PlaywrightError as error:
            # A tab that the action closed has done what was asked of it, as long as another is left.
            if self.crashed or _is_gone(error) and self.page is page:
                raise PageDied(first_line(error)) from error
            if not _is_gone(error):
                raise ActionFailed(f"{action}: {first_line(error)}") from error
        except PageNotReady as error:
            raise ActionFailed(f"{action}: {error}") from error
        told, self.dialogs = "; ".join(self.dialogs), []
        return f"the page showed a dialog ({told})" if told else None

    async def _do(self, action: Action) -> None:
        wait = self.limits.action_seconds * 1000
        mouse, keyboard = self.page.mouse, self.page.keyboard
        match action.name:
            case "click" | "double_click" | "right_click" if action.x is not None:
                button, clicks = ("right" if action.name == "right_click" else "left"), 1 + (action.name[0] == "d")
                await self._bounded(mouse.click(action.x, action.y, button=button, click_count=clicks))
            case "drag":
                await self._bounded(mouse.move(action.x, action.y))
                await self._bounded(mouse.down())
                try:
                    await self._bounded(mouse.move(action.x2, action.y2, steps=8))
                finally:
                    await self._bounded(mouse.up())
            case "type" if action.element is None:
                text = action.text or ""
                put = keyboard.type if len(text) <= _MOST_KEYSTROKES else keyboard.insert_text
                await self._bounded(put(text))
                if action.enter:
                    await self._bounded(keyboard.press("Enter"))
            case "hotkey":
                keys = [_KEY_NAMES.get(key, key) for key in action.keys or ()]
                # Playwright finds an unknown key only when those before it are down, and leaves them so.
                if unknown := [
                    key for key in keys if key not in _KEY_NAMES.values() and (len(key) != 1 or not "!" <= key <= "~")
                ]:
                    raise ActionFailed(f"{action}: there is no key {one_line(unknown[0])}")
                await self._bounded(keyboard.press("+".join(keys)))
            case "scroll" if action.x is not None:
                ways = zip(_DIRECTIONS[action.direction], self.viewport, strict=True)
                await self._bounded(mouse.move(action.x, action.y))
                await self._bounded(mouse.wheel(*(way * side * 0.8 for way, side in ways)))
            case "click":
                point = await self._bounded(self.page.evaluate(_POINT, {"id": action.element, "limit": wait}))
                if "error" in point:
                    raise ActionFailed(f"{action}: {one_line(point['error'])}")
                await self._bounded(self.page.mouse.click(point["x"], point["y"]))
            case "type":
                element = await self._element(action)
                await self._bounded(element.fill(action.text or "", timeout=wait))
                if action.enter:
                    await self._bounded(element.press("Enter", timeout=wait))
            case "select":
                element = await self._element(action)
                found = await self._bounded(element.evaluate(_FIND_OPTION, action.option))
                if "error" in found:
                    raise ActionFailed(f"{action}: {one_line(found['error'], 400)}")
                await self._bounded(element.select_option(index=found["index"], timeout=wait))
            case "scroll":
                element = await self._element(action) if action.element else None
                await self._bounded(self.page.evaluate(_SCROLL, [element, *_DIRECTIONS[action.direction]]))
            case "goto":
                self._check_host(action.url)
                await self.goto(action.url)
            case "back":
                # Playwright's own answer cannot tell "no earlier page" from one that needs no request, such as /#part.
                if (await self._devtools("Page.getNavigationHistory"))["currentIndex"] > 0:
                    await self._bounded(self.page.go_back(wait_until="domcontentloaded", timeout=wait))
                elif len(self.context.pages) > 1:
                    await self._bounded(self.page.close())
                else:
                    raise ActionFailed(f"{action}: there is no earlier page")
            case "wait":
                # The one sleep there is: the policy asked for it.
                seconds = 1.0 if action.seconds is None else action.seconds
                await asyncio.sleep(min(seconds, self.limits.wait_seconds))
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
        try:
            parts = urlsplit(url)
            host = f"{parts.hostname}:{parts.port or _DEFAULT_PORTS[parts.scheme]}"
        except (ValueError, KeyError):  # not a URL, or neither http nor https
            host = ""
        if not any(fnmatchcase(host, rule if ":" in rule else f"{rule}:*") for rule in self.allowed):
            raise ActionFailed(f"goto: {url} is not allowed here (allowed: {', '.join(self.allowed)})")


async def bounded(call: Awaitable[T], seconds: float, what: str) -> T:
    """Await `call` for at most `seconds`; a call that takes longer means a page that is of no further use.

    Playwright's own time-outs do not cover every call: evaluate, and closing a hung page, would wait for ever.
    """
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError as error:  # asyncio's; Playwright's is another class
        raise PageDied(f"{what} took more than {seconds:g} s") from error


async def quietly(close: Awaitable[object], seconds: float = 5.0) -> None:
    """Await something that may be dead already, most often its closing, when there is nobody to tell."""
    try:
        await asyncio.wait_for(close, seconds)
    except (PlaywrightError, PageDied, TimeoutError):
        return


def one_line(text: str, most: int = 200) -> str:
    """Words of a page as they may stand in a message: on one line, short, and with nothing that reads like a tag.

    The same that observe.js does to the words it reads.
    """
    flat = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text[: 4 * most]).split())
    flat = re.sub(r"<(?=[|/\uff5c]|[^\W\d_])", "< ", flat).encode("utf-8", "replace").decode()
    return flat if len(flat) <= most else flat[:most] + "..."


def first_line(error: PlaywrightError) -> str:
    return one_line((error.message.strip().splitlines() or [type(error).__name__])[0])


def _is_gone(error: PlaywrightError) -> bool:
    gone = ("has been closed", "Target crashed", "Page crashed", "Target closed", "Connection closed", "Browser closed")
    return any(words in error.message for words in gone)


def _why_not(error: PlaywrightError) -> str:
    """The line of Playwright's log that says what stood in the way, e.g. which element covers the target."""
    obstacles = ("intercepts pointer events", "not visible", "not enabled", "not editable", "not stable")
    for line in reversed(error.message.splitlines()):
        if any(words in line for words in obstacles):
            return one_line(line.strip().lstrip("- "))
    return first_line(error)
