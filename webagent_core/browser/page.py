"""One live page: go somewhere, observe, act. Every await is bounded; what fails is told apart (see errors.py)."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, CDPSession, Dialog, ElementHandle, Frame, Page, Request
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import TimeoutError as PlaywrightTimeout

from webagent_core.browser.errors import ActionFailed, PageDied, PageNotReady
from webagent_core.episode.actions import Action

T = TypeVar("T")


def _script(name: str) -> str:
    return files(__package__).joinpath(name).read_text()


_PREPARE = _script("prepare.js")


def _prepared(name: str) -> str:
    """A script that also runs where the browser ran none before it, such as on its own error page."""
    return f"argument => {{ {_PREPARE} return (\n{_script(name)}\n)(argument); }}"


_OBSERVE, _SETTLE, _POINT = (_prepared(name) for name in ("observe.js", "settle.js", "point.js"))
_INTO, _SCROLL = _script("into.js"), _script("scroll.js")
_ELEMENT = """([id, text]) => {
  const element = window.__webagent?.elements.get(id)?.deref();
  if (!element?.isConnected || !element.ownerDocument.defaultView) return null;
  if (!text || element.tagName !== "INPUT") return element;
  // A field of dates, say, would take a text that is no date for nothing at all.
  const probe = document.createElement("input");
  probe.type = element.type;
  probe.value = text;
  return probe.value || !/^(date|time|datetime-local|month|week|number)$/.test(probe.type) ? element : probe.type;
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
KEY_NAMES = {  # of a hotkey, as Playwright spells those that it does not spell as we do
    **{"ctrl": "Control", "shift": "Shift", "alt": "Alt", "meta": "Meta", "capslock": "CapsLock", "esc": "Escape"},
    **{name: name.capitalize() for name in "enter tab space backspace delete insert home end".split()},
    **{"pageup": "PageUp", "pagedown": "PageDown", **{f"f{number}": f"F{number}" for number in range(1, 13)}},
    **{way: f"Arrow{way.capitalize()}" for way in ("up", "down", "left", "right")},
}
_MOST_KEYSTROKES = 300  # a longer text is put in at once, as by pasting: each key is a call to the browser
_MOST_NOTICES = 5  # told of at once; a page may show any number of dialogs
_ELSEWHERE = re.compile("\x01([0-9]+)\x01")  # where observe.js met a frame that it cannot look into
_ERROR_PAGE = "chrome-error:"  # scheme of what the browser shows in place of a page that did not load
_WRITTEN = {  # fields that take a value in one spelling only
    "date": "2031-04-09", "time": "13:45", "datetime-local": "2031-04-09T13:45", "month": "2031-04",
    "week": "2031-W15", "number": "12.5",
}  # fmt: skip


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
    frames: int = 20  # of another origin
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
    notices: list[str] = field(default_factory=list)  # what happened that is to be seen nowhere on the page
    crashed: bool = False
    loans: int = 0  # episodes that had it before

    def __post_init__(self) -> None:
        self._first = self.page
        self._tabs = [self.page]  # those that stay open; more than a few are closed as soon as they open
        self._blank_behind = True  # the next page to load has an empty one before it in the history
        self._sessions: dict[Page, CDPSession] = {}
        self._under_way: list[Request | str] = []  # requests without their answer, windows that are about to open
        self._all_came = asyncio.Event()
        self._all_came.set()
        # The next document of the page, while nothing of it has come. Until then the browser keeps calls into the page
        # back: they are not answered, and that is not the page's fault.
        self._leaving: Request | None = None
        self._arrived = asyncio.Event()
        self._arrived.set()
        self._last = Observation("", "", "")
        self._failure = ""  # why a page did not load, of the last that did not
        self._hung = False
        self._frames: dict[str, Frame] = {}  # of another origin, by the letters before the ids of their elements

    @classmethod
    async def open(cls, context: BrowserContext, allowed: Sequence[str], limits: PageLimits) -> WebPage:
        await bounded(context.add_init_script(_PREPARE), limits.call_seconds, "preparing a context")
        page = await bounded(context.new_page(), limits.call_seconds, "opening a page")
        web_page = cls(context, page, allowed, limits)
        await web_page._watch(page)
        context.on("page", web_page._popup)
        context.on("request", lambda request: request.resource_type in _AWAITED and web_page._await(request))
        context.on("response", lambda response: web_page._answered(response.request))
        context.on("requestfinished", web_page._came)
        context.on("requestfailed", web_page._failed)
        return web_page

    async def _watch(self, page: Page) -> None:
        page.on("dialog", self._answer_dialog)
        page.on("crash", lambda _: setattr(self, "crashed", True))
        page.on("close", self._closed)
        page.on("download", lambda file: self._note(f"a download was offered and not kept: {file.suggested_filename}"))
        page.on("filechooser", lambda _: self._note("the page asked for a file; there is none to give"))
        # Playwright tells of a new window when it has one, by when we would have taken the old one for all there is.
        await self._devtools("Page.enable", page=page)
        self._sessions[page].on("Page.windowOpen", lambda _: self._await(_WINDOW))

    async def _answer_dialog(self, dialog: Dialog) -> None:
        # Unanswered, a dialog freezes the page. A question that was brought about by what the policy did is answered
        # with yes, or no task behind one could ever be done; a prompt wants words that nobody has.
        answer, told = (dialog.dismiss, "declined") if dialog.type == "prompt" else (dialog.accept, "answered with OK")
        self._note(f'{dialog.type} dialog, {told}: "{dialog.message}"')
        await quietly(answer())  # the page may be closed under its own dialog

    def _note(self, notice: str) -> None:
        self.notices[_MOST_NOTICES - 1 :] = [one_line(notice)]

    async def _popup(self, page: Page) -> None:
        if page in self._tabs:
            return
        if len(self._tabs) >= self.limits.tabs:
            self._note(f"a new window was closed; {self.limits.tabs} are open")
            await quietly(page.close())
        else:
            self._tabs.append(page)
            self.page = page  # what a person would be looking at now
            await quietly(self._watch(page))
        self._came(_WINDOW)

    def _closed(self, page: Page) -> None:
        self._sessions.pop(page, None)
        if page in self._tabs:
            self._tabs.remove(page)
        if page is self.page and self._tabs:
            self.page = self._tabs[-1]

    def _await(self, what: Request | str) -> None:
        self._under_way.append(what)
        self._all_came.clear()
        if isinstance(what, Request) and _is_document_of(what, self.page):
            self._leaving = what
            self._arrived.clear()

    def _answered(self, request: Request) -> None:
        if request is self._leaving:
            self._leaving = None
            self._arrived.set()

    def _came(self, what: Request | str) -> None:
        if what in self._under_way:
            self._under_way.remove(what)
        if not self._under_way:
            self._all_came.set()
        if isinstance(what, Request):
            self._answered(what)

    def _failed(self, request: Request) -> None:
        if _is_document_of(request, self.page):
            self._failure = f"{one_line(request.url)}: {request.failure}"
        self._came(request)

    def _forget_what_is_under_way(self) -> None:
        self._under_way.clear()
        self._all_came.set()

    # ------------------------------------------------------------------------------------------------ navigation

    async def goto(self, url: str) -> None:
        """Open `url`. Raises PageNotReady if it cannot be loaded, PageDied if the page is of no further use."""
        if self.crashed or self._hung:
            await self._replace()
        seconds = self.limits.load_seconds
        for attempt in range(3):
            try:
                if attempt:
                    call = self.page.wait_for_load_state("domcontentloaded", timeout=seconds * 1000)
                    await self._within(call, seconds + 1, f"loading {self.page.url}")
                    if self.page.url == url:
                        break
                call = self.page.goto(url, wait_until="domcontentloaded", timeout=seconds * 1000)
                await self._within(call, seconds + 1, f"loading {url}")
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

    async def _replace(self) -> None:
        """A new tab in place of one that crashed or hangs: cookies and storage stay, its document and history go."""
        dead = self.page
        await quietly(dead.close())
        self._closed(dead)
        self.crashed = self._hung = False
        self._forget_what_is_under_way()
        await self._popup(await self._within(self.context.new_page(), self.limits.call_seconds, "opening a page"))
        if dead is self._first:
            self._first = self.page
        self._blank_behind = True

    async def evaluate(self, script: str, argument: Any = None) -> Any:
        """Run `script` in the page. One that navigates or makes way for another tab meanwhile is asked again."""
        for attempt in range(3):
            page = self.page
            try:
                call = page.evaluate(script, argument)
                return await self._within(call, self.limits.call_seconds, "a call into the page")
            except PlaywrightError as error:
                if attempt < 2 and ("context was destroyed" in error.message or page is not self.page):
                    continue
                raise (PageDied if _is_gone(error) or self.crashed else PageNotReady)(first_line(error)) from error
        raise AssertionError("unreachable")

    async def _within(self, call: Awaitable[T], seconds: float, what: str) -> T:
        try:
            return await bounded(call, seconds, what)
        except PageDied as error:
            if self._leaving:
                raise PageNotReady(f"the next page is still loading: {one_line(self._leaving.url)}") from error
            self._hung = True
            raise

    async def _unless_leaving(self, call: Awaitable[T], seconds: float) -> T | None:
        """Await a call into the page. None: after `seconds` it is still kept back, for the page is being left."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait([task], timeout=seconds)
            return None if self._leaving and not task.done() else await task
        finally:
            task.cancel()

    async def settle(self) -> bool:
        """Wait until the page rests: nothing changes, and what it asked its server for has come.

        Returns False if it was still changing when the time was over; it may be used all the same.
        """
        end = time.monotonic() + self.limits.settle_seconds
        rested = True
        while rested:
            page = self.page
            limit = max(0.0, end - time.monotonic()) * 1000
            call = self.evaluate(_SETTLE, {"quiet": self.limits.quiet_ms, "limit": limit})
            rested = bool(await self._unless_leaving(call, limit / 1000 + 0.25))
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
        self._leaving, self._last = None, Observation("", "", "")
        self._arrived.set()
        self._frames.clear()
        self.notices.clear()

    async def _devtools(self, method: str, parameters: dict | None = None, page: Page | None = None) -> dict:
        page, seconds = page or self.page, self.limits.call_seconds
        if page not in self._sessions:
            self._sessions[page] = await self._within(self.context.new_cdp_session(page), seconds, "a devtools session")
        return await self._within(self._sessions[page].send(method, parameters), seconds, method)

    # ------------------------------------------------------------------------------------------------ observing

    async def observe(self, *, skip: str | None = None, screenshot: bool = False, html: bool = False) -> Observation:
        """The page as it is now. `skip`: CSS selector of elements that are not part of what the agent may read.

        Lines in square brackets are ours: what happened since the last observation and left no trace on the page (a
        dialog, a download), a page that is still loading or that did not load, and where something was cut.
        """
        if self.page.url.startswith(_ERROR_PAGE):
            seen = Observation(self.page.url, "", f"[the page did not load: {self._failure}]")
        else:
            seen = await self._unless_leaving(self._read(skip, html), self.limits.settle_seconds)
        if seen and screenshot:
            seen.screenshot = await self.screenshot()
        # A page that is being left cannot be read any more; what was on it may be all there is to see for a while.
        now = seen or replace(self._last, text=f"{self._last.text}\n[the next page is still loading]".lstrip())
        self._last = seen or self._last
        told, self.notices = [f"[{notice}]" for notice in self.notices], []
        return replace(now, text="\n".join([*told, now.text] if now.text else told))

    async def _read(self, skip: str | None, html: bool) -> Observation:
        bounds = ("nodes", "depth", "characters", "name", "text", "options", "frames", *["html"] * html)
        limits = {name: getattr(self.limits, name) for name in bounds}
        seen = await self.evaluate(_OBSERVE, {"skip": skip, "limits": limits, "prefix": ""})
        if seen["frames"]:
            limits |= {"html": 0, "frames": limits["frames"] - seen["frames"]}
            seen["text"] = await self._with_frames(self.page.main_frame, seen, skip, limits)
        return Observation(seen["url"], seen["title"], seen["text"], html=seen["html"])

    async def _with_frames(self, frame: Frame, seen: dict, skip: str | None, limits: dict) -> str:
        """The text that was read in a frame, with what the frames of another origin show at their places.

        `limits` is what is left for all of them together, and is used up.
        """
        limits["characters"] -= len(seen["text"])
        parts = _ELSEWHERE.split(seen["text"])
        for place in range(1, len(parts), 2):
            parts[place] = await self._text_of_frame(frame, int(parts[place]), skip, limits)
        return "".join(parts)

    async def _text_of_frame(self, outer: Frame, number: int, skip: str | None, limits: dict) -> str:
        seconds = self.limits.call_seconds
        try:
            handle = await self._within(
                outer.evaluate_handle("number => window.__webagent.frames[number] ?? null", number), seconds, "a frame"
            )
            element = handle.as_element()
            frame = element and await self._within(element.content_frame(), seconds, "a frame")
            if frame is None or frame.url.startswith(_ERROR_PAGE):
                return "[a frame that did not load]"
            arguments = {"skip": skip, "limits": limits, "prefix": self._prefix(frame)}
            seen = await self._within(frame.evaluate(_OBSERVE, arguments), seconds, "a call into a frame")
        except PlaywrightError:  # it went away, or elsewhere, while it was read
            return "[a frame that is still loading]"
        limits["frames"] -= seen["frames"]
        return await self._with_frames(frame, seen, skip, limits) or "[an empty frame]"

    def _prefix(self, frame: Frame) -> str:
        """The letters before the ids of a frame's elements: a, b, ..., z, aa, ab, ..."""
        for letters, known in self._frames.items():
            if known is frame:
                return letters
        number, letters = len(self._frames) + 1, ""
        while number:
            number, digit = divmod(number - 1, 26)
            letters = chr(ord("a") + digit) + letters
        self._frames[letters] = frame
        return letters

    async def screenshot(self) -> bytes:
        """The visible part of the page as JPEG."""
        try:
            return await self._within(
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

    async def act(self, action: Action) -> None:
        """Do one action (not `stop`: that one ends the episode).

        Points are in CSS pixels of the viewport (`CoordinateSpace.on_page`). What the page does in answer, a dialog
        say, is in the next observation.

        Raises:
            ActionFailed: the page is fine, the action could not be done.
            PageDied: the page is of no further use.
        """
        if self._leaving and action.name not in ("goto", "back", "wait"):
            try:
                await asyncio.wait_for(self._arrived.wait(), self.limits.action_seconds)
            except TimeoutError as error:
                raise ActionFailed(f"{_short(action)}: the next page is still loading") from error
        page = self.page
        try:
            await self._do(action)
        except PlaywrightTimeout as error:
            raise ActionFailed(f"{_short(action)}: {_why_not(error)}") from error
        except PlaywrightError as error:
            # A tab that the action closed has done what was asked of it, as long as another is left.
            if self.crashed or _is_gone(error) and self.page is page:
                raise PageDied(first_line(error)) from error
            if not _is_gone(error):
                raise ActionFailed(f"{_short(action)}: {first_line(error)}") from error
        except PageNotReady as error:
            raise ActionFailed(f"{_short(action)}: {error}") from error

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
                keys = [KEY_NAMES.get(key, key) for key in action.keys or ()]
                # Playwright finds an unknown key only when those before it are down, and leaves them so.
                if unknown := [
                    key for key in keys if key not in KEY_NAMES.values() and (len(key) != 1 or not "!" <= key <= "~")
                ]:
                    raise ActionFailed(f"{_short(action)}: there is no key {one_line(unknown[0])}")
                await self._bounded(keyboard.press("+".join(keys)))
            case "scroll" if action.x is not None:
                ways = zip(_DIRECTIONS[action.direction], self.viewport, strict=True)
                await self._bounded(mouse.move(action.x, action.y))
                await self._bounded(mouse.wheel(*(way * side * 0.8 for way, side in ways)))
            case "click":
                x, y = await self._point_of(action)
                await self._bounded(mouse.click(x, y))
            case "type":
                element = await self._element(action)
                await self._bounded(element.fill(action.text or "", timeout=wait))
                if action.enter:
                    await self._bounded(element.press("Enter", timeout=wait))
            case "select":
                element = await self._element(action)
                found = await self._bounded(element.evaluate(_FIND_OPTION, action.option))
                if "error" in found:
                    raise ActionFailed(f"{_short(action)}: {one_line(found['error'], 400)}")
                await self._bounded(element.select_option(index=found["index"], timeout=wait))
            case "scroll":
                frame = self._frame_of(action.element)[0] if action.element else self.page.main_frame
                element = await self._element(action) if action.element else None
                await self._bounded(frame.evaluate(_SCROLL, [element, *_DIRECTIONS[action.direction]]))
            case "goto":
                self._check_host(action.url)
                await self.goto(action.url)
            case "back":
                # Playwright's own answer cannot tell "no earlier page" from one that needs no request, such as /#part.
                if (await self._devtools("Page.getNavigationHistory"))["currentIndex"] > 0:
                    await self._bounded(self.page.go_back(wait_until="domcontentloaded", timeout=wait))
                elif len(self._tabs) > 1:
                    await self._bounded(self.page.close())
                else:
                    raise ActionFailed("back: there is no earlier page")
            case "wait":
                # The one sleep there is: the policy asked for it.
                seconds = 1.0 if action.seconds is None else action.seconds
                await asyncio.sleep(min(seconds, self.limits.wait_seconds))
            case _:
                raise ValueError(f"a page cannot do {action.name!r}")

    def _frame_of(self, element: str) -> tuple[Frame, str]:
        """The frame that an element's id speaks of, and the element's own id there."""
        letters = element.rstrip("0123456789").lower()
        frame = self._frames.get(letters) if letters else self.page.main_frame
        if frame is None or frame.is_detached() or frame.page is not self.page:
            raise ActionFailed(f"there is no element {one_line(element)} on this page")
        return frame, element[len(letters) :]

    async def _element(self, action: Action) -> ElementHandle:
        frame, local = self._frame_of(action.element)
        handle = await self._bounded(frame.evaluate_handle(_ELEMENT, [local, action.text]))
        element = handle.as_element()
        if element is None and (kind := await self._bounded(handle.json_value())):
            raise ActionFailed(f"{_short(action)}: this field takes a {kind} as in {_WRITTEN[kind]}")
        if element is None:
            raise ActionFailed(f"{_short(action)}: there is no element {action.element} on this page")
        return element

    async def _point_of(self, action: Action) -> tuple[float, float]:
        """Where in the window to click an element; in the frame of it first, then in what shows that frame."""
        frame, local = self._frame_of(action.element)
        arguments = {"id": local, "name": action.element, "limit": self.limits.action_seconds * 1000}
        point = await self._bounded(frame.evaluate(_POINT, arguments))
        while "error" not in point and frame.parent_frame:
            shows = await self._bounded(frame.frame_element())
            point = await self._bounded(shows.evaluate(_INTO, point))
            frame = frame.parent_frame
        if "error" in point:
            raise ActionFailed(f"{_short(action)}: {one_line(point['error'])}")
        return point["x"], point["y"]

    async def _bounded(self, call: Awaitable[T]) -> T:
        return await self._within(call, self.limits.call_seconds, "an action on the page")

    def _check_host(self, url: str) -> None:
        if not is_allowed(url, self.allowed):
            raise ActionFailed(f"goto: {one_line(url)} is not allowed here (allowed: {', '.join(self.allowed)})")


def host_of(url: str) -> str:
    """The "host:port" that an http(s) address speaks of; "" for anything else."""
    try:
        parts = urlsplit(url)
        return f"{parts.hostname}:{parts.port or _DEFAULT_PORTS[parts.scheme]}" if parts.hostname else ""
    except (ValueError, KeyError):
        return ""


def is_allowed(url: str, hosts: Sequence[str]) -> bool:
    """Whether an address is on one of `hosts`: "host:port"; "*" stands for any part of it, and no port for all."""
    return any(fnmatchcase(host_of(url), rule if ":" in rule else f"{rule}:*") for rule in hosts)


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


_UNSEEN = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufff9-\ufffb\U000e0000-\U000e007f]")


def one_line(text: str, most: int = 200) -> str:
    """Words of a page as they may stand in a message: on one line, short, and with nothing that reads like a tag.

    The same that observe.js does to the words it reads.
    """
    flat = " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", _UNSEEN.sub("", text[: 4 * most])).split())
    flat = re.sub(r"<(?=[|/\uff5c]|[^\W\d_])", "< ", flat).encode("utf-8", "replace").decode()
    return flat if len(flat) <= most else flat[:most] + "..."


def _short(action: Action) -> str:
    """An action in a message that goes back to whoever wrote it."""
    written = str(action)
    return written if len(written) <= 120 else written[:120] + "..."


def _is_document_of(request: Request, page: Page) -> bool:
    """Whether it asks for the page's next document, not for one in a frame of it or in another tab."""
    try:
        return request.is_navigation_request() and request.frame == page.main_frame
    except PlaywrightError:  # a window that is about to open has no frame yet
        return True


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
