"""One Chromium, several pages, each lent to one episode at a time in a fresh state.

A page that dies takes its own episode with it and nothing else; a browser that dies takes the episodes that are on it.
Either is replaced when the next episode asks for a page.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from playwright.async_api import Browser, BrowserContext, CDPSession, Playwright, async_playwright
from playwright.async_api import Error as PlaywrightError

from webagent_core.browser.chromium import LAUNCH_ARGS, find_chromium
from webagent_core.browser.errors import BrowserError, PageDied
from webagent_core.browser.page import PageLimits, WebPage, bounded, first_line, quietly

# Nothing listens on the discard port: whatever the bypass list does not name ends here, redirects, web sockets, workers
# and aliases of localhost included, which request interception would not see.
DEAD_PROXY = "http://127.0.0.1:9"

Isolation = Literal["context", "page"]

# Playwright, on both of its sides, keeps something of every request until its context is closed (65 kB an episode).
MOST_LOANS = 100


@dataclass
class BrowserPool:
    """A pool of `pages` pages on one browser.

    Args:
        pages: how many episodes run at a time. Two to four a core keeps a core busy; more only adds latency.
        allowed_hosts: "host:port" that pages may reach; "*" stands for any part of a name, and no port for all ports.
        isolation: "context" opens a new browser context for every episode, which suits any site. "page" keeps the page
            and empties it (document, cookies, storage, history) for a third of the CPU; what HTTP cached stays.
        viewport: CSS pixels, one device pixel each.
    """

    pages: int = 4
    allowed_hosts: Sequence[str] = ()
    isolation: Isolation = "context"
    viewport: tuple[int, int] = (1280, 720)
    limits: PageLimits = field(default_factory=PageLimits)
    init_script: str | None = None
    launches: int = 0  # how many browsers were started so far; above 1, one died

    _playwright: Playwright | None = None
    _browser: Browser | None = None
    _devtools: CDPSession | None = None
    _pid: int = 0  # of the browser's main process
    _idle: list[WebPage] = field(default_factory=list)
    _closing: set[asyncio.Task] = field(default_factory=set)
    _launching: asyncio.Lock = field(default_factory=asyncio.Lock)
    _free: asyncio.Semaphore | None = None

    async def __aenter__(self) -> BrowserPool:
        self._free = asyncio.Semaphore(self.pages)
        try:
            await self._living_browser()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._closing:
            await asyncio.wait(self._closing)
        if self._browser:
            await self._end(self._browser, self._pid)
        await self._stop_driver()

    @property
    def browser_version(self) -> str:
        return self._browser.version if self._browser else ""

    @asynccontextmanager
    async def page(self, hosts: Sequence[str] | None = None) -> AsyncIterator[WebPage]:
        """Lend a page in a fresh state.

        Args:
            hosts: all that it may reach, of `allowed_hosts`; None: all of those.

        Raises BrowserError if none can be had; what the borrower raises passes through.
        """
        assert self._free is not None, "enter the pool first: async with BrowserPool(...) as pool"
        async with self._free:
            web_page = await self._fresh_page(self.allowed_hosts if hosts is None else hosts)
            keep = False
            try:
                yield web_page
                web_page.loans += 1
                keep = self.isolation == "page" and not web_page.crashed and web_page.loans < MOST_LOANS
            finally:
                if keep:
                    self._idle.append(web_page)
                else:
                    await self._discard(web_page.context)

    async def _fresh_page(self, hosts: Sequence[str]) -> WebPage:
        while self._idle:
            web_page = self._idle.pop()
            if web_page.allowed != hosts:
                await self._discard(web_page.context)
                continue
            try:
                await web_page.clean()
                return web_page
            except BaseException as error:
                await self._discard(web_page.context)
                if not isinstance(error, (BrowserError, PlaywrightError)):  # those died between two episodes: no loss
                    raise
        for attempt in range(2):  # the browser may die between the check and the call
            browser = await self._living_browser()
            try:
                return await self._new_page(browser, hosts)
            except (PlaywrightError, PageDied) as error:
                if attempt:
                    raise PageDied(f"no new page: {error}") from error
                if not await self._answers(browser):
                    await self._give_up(browser)
        raise AssertionError("unreachable")

    async def _new_page(self, browser: Browser, hosts: Sequence[str]) -> WebPage:
        context = await bounded(self._new_context(browser, hosts), self.limits.call_seconds, "opening a context")
        try:
            return await WebPage.open(context, hosts, self.limits)
        except BaseException:
            await self._discard(context)
            raise

    async def _new_context(self, browser: Browser, hosts: Sequence[str]) -> BrowserContext:
        width, height = self.viewport
        context = await browser.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=1,
            accept_downloads=False,
            service_workers="block",
            reduced_motion="reduce",
            locale="en-US",
            timezone_id="UTC",
            proxy={"server": DEAD_PROXY, "bypass": ",".join(hosts)},
        )
        if self.init_script:
            await context.add_init_script(self.init_script)
        return context

    async def _living_browser(self) -> Browser:
        async with self._launching:
            if self._browser is None or not self._browser.is_connected():
                self._idle.clear()  # these went down with the browser they were on
                try:
                    await self._launch()
                except PlaywrightError:
                    # Playwright's driver, a process of its own, may be what died; it takes the browser with it.
                    await self._stop_driver()
                    try:
                        await self._launch()
                    except PlaywrightError as error:
                        raise BrowserError(f"Chromium does not start: {first_line(error)}") from error
            assert self._browser is not None
            return self._browser

    async def _launch(self) -> None:
        path = find_chromium()
        if self._playwright is None:
            self._playwright = await async_playwright().start()
        self._browser = await self._playwright.chromium.launch(
            executable_path=path, args=list(LAUNCH_ARGS), chromium_sandbox=False, timeout=60_000
        )
        self.launches += 1
        self._devtools = await self._browser.new_browser_cdp_session()
        processes = (await self._devtools.send("SystemInfo.getProcessInfo"))["processInfo"]
        self._pid = next(process["id"] for process in processes if process["type"] == "browser")

    async def _answers(self, browser: Browser) -> bool:
        """Whether the browser as such is well: a slow machine is no reason to end the other episodes."""
        if browser is not self._browser or not browser.is_connected():
            return False
        try:
            await bounded(self._devtools.send("Browser.getVersion"), self.limits.call_seconds, "asking the browser")
        except (PlaywrightError, PageDied):
            return False
        return True

    async def _give_up(self, browser: Browser) -> None:
        """End a browser that answers no more, so that the next one who asks gets a new one."""
        async with self._launching:
            if self._browser is not browser:
                return
            self._browser = None
            await self._end(browser, self._pid)

    async def _end(self, browser: Browser, pid: int) -> None:
        await quietly(browser.close())
        if browser.is_connected():  # stopped or stuck: it has not even taken note
            os.kill(pid, signal.SIGKILL)

    async def _stop_driver(self) -> None:
        if self._playwright:
            playwright, self._playwright = self._playwright, None
            await quietly(playwright.stop())

    async def _discard(self, context: BrowserContext) -> None:
        """Close a context with its pages. That goes on if the caller is cancelled meanwhile."""
        closing = asyncio.create_task(self._close(context))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def _close(self, context: BrowserContext) -> None:
        # A context alone does not close while a page of it spins, nor a page alone while it is on its way elsewhere.
        await asyncio.gather(*(quietly(each.close()) for each in (*context.pages, context)))
