"""Real parts that several tests share: pages and a chat model served over loopback, a pool of pages, MiniWoB++."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from webagent_core.browser.page import PageLimits
from webagent_core.browser.pool import BrowserPool
from webagent_core.rewards.judge_client import JudgeSettings
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


@dataclass
class ChatServer:
    """A chat-completions server that answers from a list, or by a rule; what it was asked is kept."""

    settings: JudgeSettings
    replies: list[str] = field(default_factory=list)
    questions: list[dict[str, Any]] = field(default_factory=list)
    answer: Callable[[dict[str, Any]], str] | None = None  # the rule


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chats.questions.append(question)
            reply = chats.answer(question) if chats.answer else chats.replies.pop(0)
            message = {"role": "assistant", "content": reply}
            body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        chats = ChatServer(JudgeSettings(base_url=url, model="m", api_key_env=None))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield chats
        server.shutdown()
