"""Real parts that several tests share: a folder of pages served over loopback, a pool of Chromium pages, MiniWoB++."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from webagent_core.browser.page import PageLimits
from webagent_core.browser.pool import BrowserPool
from webagent_core.tasks.miniwob import MiniWoB
from webagent_core.tasks.page_server import PageServer

QUICK = PageLimits(load_seconds=2, call_seconds=4, action_seconds=1, settle_seconds=1)


@dataclass
class Site:
    """Pages that a test writes, on a real server."""

    folder: Path
    host: str

    def page(self, name: str, body: str) -> str:
        """Write a page and return its address."""
        (self.folder / f"{name}.html").write_text(f"<!doctype html><meta charset=utf-8><body>{body}", "utf-8")
        return f"http://{self.host}/{name}.html"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with PageServer(folder) as server:
        yield Site(folder, server.host)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(site: Site) -> AsyncIterator[BrowserPool]:
    """For tests marked `asyncio(loop_scope="module")`, and of those only for what leaves the browser alive."""
    async with BrowserPool(pages=4, allowed_hosts=(site.host,), limits=QUICK) as pool:
        yield pool


@pytest.fixture(scope="session")
def miniwob() -> Iterator[MiniWoB]:
    with MiniWoB() as tasks:
        yield tasks
