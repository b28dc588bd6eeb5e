"""One Chromium, several pages, each lent to one episode at a time in a fresh state.

A page that dies takes its own episode with it and nothing else; a browser that dies takes the episodes that are on it.
Either is replaced when the next episode asks for a page.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from playwright.async_api import Browser, BrowserContext, Playwright, async_playwright
from playwright.async_api import Error as PlaywrightError

from webagent_core.browser.chromium import LAUNCH_ARGS, find_chromium
from webagent_core.browser.errors import BrowserError, PageDied
from webagent_core.browser.page import PageLimits, WebPage, bounded, first_line

# Nothing listens on the discard port: whatever the bypass list does not name ends here, redirects, web sockets, workers
# and aliases of localhost included, which request interception would not see.
DEAD_PROXY = "http://127.0.0.1:9"

Isolation = Literal["context", "page"]


@dataclass
class BrowserPool:
    """A pool of `pages` pages on one browser.

    Args:
        pages: how many episodes run at a time. Two to four a core keeps a core busy; more only adds latency.
        allowed_hosts: "host:port" (or "*" wildcards as Chromium's proxy bypass list takes them) that pages may reach.
        isolation: "context" opens a new browser context for every episode, which suits any site. "page" keeps the context
            and empties it (cookies, storage, history, tabs): a third of the CPU, for sites whose state lives in the page.
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
    _idle: list[WebPage] = field(default_factory=list)
    _launching: asyncio.Lock = field(default_factory=asyncio.Lock)
    _free: asyncio.Semaphore | None = None

    async def __aenter__(self) -> BrowserPool:
        self._free = asyncio.Semaphore(self.pages)
        self._playwright = await async_playwright().start()
        await self._living_browser()
        return self

    async def __aexit__(self, *_: object) -> None:
        for close in (self._browser and self._browser.close(), self._playwright and self._playwright.stop()):
            if close:
                await _quietly(close)

    @property
    def browser_version(self) -> str:
        return self._browser.version if self._browser else ""

    @asynccontextmanager
    async def page(self) -> AsyncIterator[WebPage]:
        """Lend a page in a fresh state. Raises BrowserError if none can be had; what the borrower raises passes through."""
        assert self._free is not None, "enter the pool first: async with BrowserPool(...) as pool"
        async with self._free:
            web_page = await self._fresh_page()
            try:
                yield web_page
            except BaseException:
                await self._discard(web_page)
                raise
            else:
                if self.isolation == "page" and not web_page.crashed:
                    self._idle.append(web_page)
                else:
                    await self._discard(web_page)

    async def _fresh_page(self) -> WebPage:
        while self._idle:
            web_page = self._idle.pop()
            try:
                await web_page.clean()
                return web_page
            except (BrowserError, PlaywrightError):
                await self._discard(web_page)  # it died between two episodes: nobody's loss
        for attempt in range(2):  # the browser may die between the check and the call
            browser = await self._living_browser()
            try:
                context = await bounded(self._new_context(browser), self.limits.call_seconds, "opening a context")
                return await WebPage.open(context, self.allowed_hosts, self.limits)
            except (PlaywrightError, PageDied) as error:
                if attempt:
                    raise PageDied(f"no new page: {error}") from error
                await self._give_up(browser)
        raise AssertionError("unreachable")

    async def _new_context(self, browser: Browser) -> BrowserContext:
        width, height = self.viewport
        context = await browser.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=1,
            accept_downloads=False,
            service_workers="block",
            reduced_motion="reduce",
            locale="en-US",
            timezone_id="UTC",
            proxy={"server": DEAD_PROXY, "bypass": ",".join(self.allowed_hosts)},
        )
        if self.init_script:
            await context.add_init_script(self.init_script)
        return context

    async def _living_browser(self) -> Browser:
        async with self._launching:
            if self._browser is None or not self._browser.is_connected():
                self._idle.clear()
                assert self._playwright is not None
                try:
                    self._browser = await self._playwright.chromium.launch(
                        executable_path=find_chromium(), args=list(LAUNCH_ARGS), chromium_sandbox=False, timeout=60_000
                    )
                except PlaywrightError as error:
                    raise BrowserError(f"Chromium does not start: {first_line(error)}") from error
                self.launches += 1
            return self._browser

    async def _give_up(self, browser: Browser) -> None:
        """Close a browser that answers no more, so that the next one who asks gets a new one."""
        async with self._launching:
            if self._browser is browser:
                self._browser = None
        await _quietly(browser.close())

    async def _discard(self, web_page: WebPage) -> None:
        # A context does not close while a page of it spins; the page does.
        await _quietly(web_page.page.close())
        await _quietly(web_page.context.close())


async def _quietly(close) -> None:
    """Await the closing of something that may be dead already; there is nobody left to tell."""
    try:
        await asyncio.wait_for(close, 5)
    except (PlaywrightError, TimeoutError):
        return
