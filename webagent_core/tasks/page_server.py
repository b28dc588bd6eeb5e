"""Static pages on loopback, from a process of their own.

Served from the process that also drives browsers and runs the policy, pages load at half the speed and wait whenever
that process is busy. `python -m webagent_core.tasks.page_server FOLDER` prints its port and ends with its standard
input, so it cannot outlive whoever started it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from aiohttp import web


class PageServer:
    """Serve `folder` under http://127.0.0.1:<port>/ for as long as the `with` block lasts.

    Raises:
        FileNotFoundError: there is no such folder.
        RuntimeError: the server process ended instead of printing its port.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"page folder {str(folder)!r} does not exist")
        self.folder = folder
        self.port = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> PageServer:
        command = [sys.executable, "-m", __spec__.name, str(self.folder)]
        # In a session of its own, Ctrl-C at the terminal does not reach it; it ends when we do.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line.strip().isdigit():
            self.__exit__()
            raise RuntimeError(
                f"the page server of {str(self.folder)!r} did not start: exit {self._process.returncode}"
            )
        self.port = int(line)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def serve(folder: Path) -> None:
    app = web.Application()
    app.router.add_static("/", folder)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"page_server takes one argument, the folder to serve; got {sys.argv[1:]}")
    asyncio.run(serve(Path(sys.argv[1])))
