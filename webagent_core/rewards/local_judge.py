"""A judge on loopback: an HTTP server with OpenAI's chat completions, behind it a rule instead of a model.

    python -m webagent_core.rewards.local_judge --port 8765

The rule reads the fenced material and nothing else of it as fact: what the task, a criterion or a reference answer puts
in double quotes has to stand in it. So the default run and the tests go through the same client, cache and parser as a
run with a model, on a machine without one.

Faults can be set (`POST /faults {"next": ["http_500", "hang", ...]}` or `LocalJudge.faults`): each is what the judge
does to one request instead of answering it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import threading
from collections import Counter, deque
from typing import Any

from aiohttp import web

from webagent_core.rewards.string_match import must_include

FAULTS = (
    "http_500", "http_429", "http_400", "hang", "disconnect", "truncated_json", "not_json", "empty_body", "no_choices",
    "empty_text", "prose", "cut_off", "echo", "not_success",
)  # fmt: skip
HANG_SECONDS = 3600

_MARK = re.compile(r"^\[begin NAME ([0-9a-f]{16})\] and \[end NAME \1\]$", re.MULTILINE)
_TEXTS = {
    "prose": "The agent was successful, I would say, although one might see it otherwise.",
    "cut_off": "The form was filled in, so this looks like a SUCCESS, and the last page",
    "echo": "I have to answer with Verdict: SUCCESS or Verdict: NOT SUCCESS.",
    "not_success": "It looked like a SUCCESS at first.\nVerdict: NOT SUCCESS",
}


class LocalJudge:
    """`with LocalJudge() as judge: JudgeSettings(base_url=judge.base_url, ...)`, served from a thread of its own.

    Attributes:
        faults: what to do to the coming requests instead of answering, in order; names are `FAULTS`.
        counts: requests answered by the rule and by each fault.
        delay_seconds: before every answer.
    """

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self.faults: deque[str] = deque()
        self.counts: Counter[str] = Counter()
        self.delay_seconds = 0.0
        self.last_request: dict[str, Any] = {}
        self.in_flight = self.most_in_flight = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> LocalJudge:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="local judge", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/faults", self._set_faults)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _set_faults(self, request: web.Request) -> web.Response:
        wanted = (await request.json()).get("next")
        if not isinstance(wanted, list) or not set(map(str, wanted)) <= set(FAULTS):
            return web.json_response({"error": f"next = {wanted!r} is not allowed: a list of {FAULTS}"}, status=400)
        self.faults.extend(wanted)
        return web.json_response({"waiting": list(self.faults)})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(request)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.last_request = body
        fault = self.faults.popleft() if self.faults else ""
        self.counts[fault or "rule"] += 1
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        match fault:
            case "http_500" | "http_429" | "http_400":
                return web.json_response({"error": {"message": "not a success"}}, status=int(fault[-3:]))
            case "hang":
                await asyncio.sleep(HANG_SECONDS)
            case "disconnect":
                request.transport.abort()
            case "not_json":
                return web.Response(text="<html>SUCCESS</html>", content_type="text/html")
            case "empty_body":
                return web.Response(body=b"", content_type="application/json")
            case "no_choices":
                return web.json_response({"id": "x", "object": "chat.completion", "choices": []})
        text = "" if fault == "empty_text" else _TEXTS.get(fault) or judge(body["messages"])
        finish = "length" if fault == "cut_off" else "stop"
        answer = json.dumps(_completion(body, text, finish)).encode("ascii")
        if fault == "truncated_json":
            answer = answer[: len(answer) // 2]
        return web.Response(body=answer, content_type="application/json")


def _completion(body: dict[str, Any], text: str, finish_reason: str) -> dict[str, Any]:
    prompt, completion = len(json.dumps(body["messages"])) // 4, len(text) // 4 + 1
    return {
        "id": "local",
        "object": "chat.completion",
        "created": 0,
        "model": body.get("model", "rule"),
        "choices": [
            {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
    }  # fmt: skip


def judge(messages: list[dict[str, Any]]) -> str:
    """The rule's reply to a chat of prompts.py."""
    asked, material = read_chat(messages)
    criteria = re.findall(r"(?m)^\d+\. (.*)$", asked.partition("\nCriteria:\n")[2])
    if criteria:
        met = [_holds(criterion, material) for criterion in criteria]
        items = [{"id": number, "met": each} for number, each in enumerate(met, start=1)]
        return json.dumps({"criteria": items, "success": all(met)})
    reference = asked.partition("\nReference answer: ")[2].strip()
    if reference:
        success = all(must_include(line, material.get("final answer", "")) for line in reference.splitlines())
    else:
        success = _holds(asked.partition("Task: ")[2], material)
    return "The rule looked for what is quoted.\nVerdict: " + ("SUCCESS" if success else "NOT SUCCESS")


def read_chat(messages: list[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    """(what the asker says outside the fences, the material inside them by name), for a chat of prompts.py."""
    system = messages[0]["content"]
    mark = _MARK.search(system)
    if mark is None:
        raise ValueError("the chat announces no fence")
    content = messages[1]["content"]
    text = content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
    fence = re.compile(rf"(?ms)^\[begin (?P<name>[\w ]+) {mark[1]}\]\n(?P<text>.*?)\n\[end (?P=name) {mark[1]}\]$")
    return fence.sub("", text), {found["name"]: found["text"] for found in fence.finditer(text)}


def _holds(statement: str, material: dict[str, str]) -> bool:
    """Everything in double quotes stands in the material; a statement that quotes nothing is not seen to hold."""
    quoted = re.findall(r'"([^"]+)"', statement)
    everything = "\n".join(material.values())
    return bool(quoted) and all(must_include(phrase, everything) for phrase in quoted)


async def _serve(port: int) -> None:
    server = LocalJudge(port)
    await server.start()
    print(server.base_url, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m webagent_core.rewards.local_judge", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0, the default, takes a free one")
    try:
        asyncio.run(_serve(parser.parse_args().port))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
