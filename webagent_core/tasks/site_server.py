"""The process behind a site with a database an episode: pages over HTTP, commands over its own standard input.

`python -m webagent_core.tasks.site_server MODULE FOLDER` serves `MODULE.App(FOLDER, address)` on loopback, prints its
port and ends with its standard input. An app is a WSGI application for each episode, and says how the episode stands:

    begin(episode, task, seed) -> {"goal": words, "start": path}    makes the episode's own database
    application(episode) -> a WSGI application, LookupError for an episode that is not there
    judge(episode, answer) -> {"reward": 0.0 or 1.0, "detail": words}
    end(episode)                                                    throws the database away

A command is one line, {"id": 7, "do": "begin", "arguments": [...]}; so is its reply, {"id": 7, "result": ...} or
{"id": 7, "error": words}. Commands have a way of their own because a page must not be able to give any.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

HEADER = "X-Episode"  # of every request of an episode's pages


class App(Protocol):
    def begin(self, episode: str, task: str, seed: int) -> dict[str, Any]: ...

    def application(self, episode: str) -> Callable[..., Iterable[bytes]]: ...

    def judge(self, episode: str, answer: str | None) -> dict[str, Any]: ...

    def end(self, episode: str) -> None: ...


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64  # a page asks for many files at once


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        return

    def address_string(self) -> str:  # the usual one looks the name up
        return self.client_address[0]


def serve(module: str, folder: Path) -> None:
    app: App | None = None

    def route(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            application = app.application(environ.get(f"HTTP_{HEADER.upper().replace('-', '_')}", ""))
        except LookupError:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"no such episode"]
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, route, _Server, _Quiet)
    # What an app prints would be read as an answer.
    replies, sys.stdout = sys.stdout, sys.stderr
    app = importlib.import_module(module).App(folder, f"http://127.0.0.1:{server.server_port}/")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, file=replies, flush=True)
    writing = threading.Lock()

    def run(command: dict[str, Any]) -> None:
        try:
            reply = {"result": getattr(app, command["do"])(*command["arguments"])}
        except Exception as error:  # whatever it is, the other side has to hear of it
            reply = {"error": f"{type(error).__name__}: {error}"}
        with writing:
            print(json.dumps({"id": command["id"], **reply}), file=replies, flush=True)

    with ThreadPoolExecutor(4) as workers:
        for line in sys.stdin:
            workers.submit(run, json.loads(line))
    server.shutdown()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"site_server takes two arguments, a module and a folder; got {sys.argv[1:]}")
    serve(sys.argv[1], Path(sys.argv[2]))
