"""Asking a judge: bounded, retried, cached, counted. Any server that speaks OpenAI's chat completions.

A judge that fails or cannot be read is asked again; when that does not help, `JudgeError` says so and holds everything
that was said. A reply that was read is kept on disk under the hash of all that determined it, so that scoring the same
trajectories again costs nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, TypeAdapter, field_validator

from webagent_core.rewards.reward_manager import JudgeError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

ADDRESS = "OPENAI_BASE_URL"  # the environment variable that OpenAI's own client reads


class JudgeSettings(BaseModel):
    """Where the judge is and how it is asked.

    The key is read from the environment variable `api_key_env` and stands in no file, log, error or evidence.
    """

    # A recipe holds these as `reward.judge`. Address and model may be left open in it; whoever asks needs both.

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str | None = None  # None: what $OPENAI_BASE_URL says
    model: str | None = Field(default=None, min_length=1)
    api_key_env: str | None = "OPENAI_API_KEY"  # None: the server wants no key
    max_tokens: int = Field(default=1024, ge=1)
    concurrency: int = Field(default=32, ge=1)  # requests in flight, of each process that scores (verl: several)
    timeout_seconds: float = Field(default=60, gt=0)  # of one request, its reply included
    attempts: int = Field(default=4, ge=1)  # at one question, for a failed request as for a reply that cannot be read
    backoff_seconds: float = Field(default=1, ge=0)  # before the second attempt; doubled before each further one
    most_backoff_seconds: float = Field(default=30, ge=0)
    cache: Annotated[Path, PlainSerializer(str)] | None = None  # folder; None: no cache
    price_per_million_prompt_tokens: float = Field(default=0, ge=0)
    price_per_million_completion_tokens: float = Field(default=0, ge=0)

    @field_validator("base_url")
    @classmethod
    def address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"reward.judge.base_url = {value!r} is not allowed: an address, http(s)://..., or null")
        return value

    def complete(self) -> JudgeSettings:
        """With the address from the environment, where none is given.

        Raises:
            ValueError: address or model is missing, or the key of a judge that is not on this machine.
        """
        url = self.base_url or os.environ.get(ADDRESS, "")
        if not url.startswith(("http://", "https://")):
            missing = f"${ADDRESS} = {url!r}" if url else f"is not set, and neither is ${ADDRESS}"
            raise ValueError(
                f"reward.judge.base_url {missing}: allowed is the address of a chat-completions API, http(s)://..."
            )
        if not self.model:
            raise ValueError("reward.judge.model is not set: allowed is the name of a model that its server has")
        local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        if self.api_key_env and not os.environ.get(self.api_key_env) and not local:
            raise ValueError(
                f"reward.judge.api_key_env = {self.api_key_env!r}: this environment variable is not set; allowed is "
                "one that holds the key, or null for a judge that wants none"
            )
        return self.model_copy(update={"base_url": url})


def check_packages() -> None:
    """Raises ModuleNotFoundError, with the remedy, where a package that judges need is not installed."""
    for package in ("openai", "tenacity"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"judges need the package {package}: pip install 'webagent-rl[judge]'")


@dataclass(frozen=True)
class Reply:
    """What the judge said."""

    text: str
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    cached: bool = False


@dataclass
class Counters:
    """Since the client was made. Costs are in the unit of the prices."""

    questions: int = 0
    cache_hits: int = 0
    requests: int = 0
    failed_requests: int = 0
    unread_replies: int = 0
    given_up: int = 0  # questions that got no answer
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0  # summed over requests; over `requests` it is the mean latency
    longest_seconds: float = 0.0


@dataclass
class JudgeClient:
    """`await client.ask(chat, read)`. Usable from one event loop after the other, one at a time."""

    settings: JudgeSettings
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        check_packages()
        self.settings = self.settings.complete()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._key = os.environ.get(self.settings.api_key_env or "", "")

    async def ask(
        self,
        chat: list[dict[str, Any]],
        read: Callable[[Reply], Any],
        *,
        temperature: float = 0.0,
        sample: int = 0,
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Ask until `read` makes something of the reply; returns that and the evidence: a record of every attempt.

        Args:
            read: what the reply says, or None if it cannot be read.
            sample: which of several independent answers to the same question this is.

        Raises:
            JudgeError: no reply could be had or read in `settings.attempts`. Its evidence is that of all attempts.
        """
        import tenacity

        self.counters.questions += 1
        key = self._cache_key(chat, temperature, sample)
        evidence: list[dict[str, Any]] = []
        if (known := self._load(key)) is not None and (said := read(known)) is not None:
            self.counters.cache_hits += 1
            return said, [self._record(known)]
        waiting = tenacity.wait_exponential_jitter(
            multiplier=self.settings.backoff_seconds,
            max=self.settings.most_backoff_seconds,
            jitter=self.settings.backoff_seconds,
        )
        try:
            async for attempt in tenacity.AsyncRetrying(
                stop=tenacity.stop_after_attempt(self.settings.attempts),
                wait=waiting,
                retry=tenacity.retry_if_exception(lambda error: isinstance(error, _Failed) and error.may_pass),
                reraise=True,
            ):
                with attempt:
                    try:
                        reply = await self._request(chat, temperature)
                    except _Failed as failure:
                        self.counters.failed_requests += 1
                        evidence.append(self._record_failure(failure))
                        raise
                    evidence.append(self._record(reply))
                    said = read(reply)
                    if said is None:
                        self.counters.unread_replies += 1
                        raise _Failed(f"reply cannot be read: {reply.text[:200]!r}")
                    self._store(key, reply)
                    return said, evidence
        except _Failed as failure:
            self.counters.given_up += 1
            what = f"{self.settings.model} at {self.settings.base_url}, {len(evidence)} attempt(s): {failure}"
            raise JudgeError(f"no verdict from {what}", evidence) from None
        raise AssertionError("unreachable")

    async def _request(self, chat: list[dict[str, Any]], temperature: float) -> Reply:
        client, slots = self._connection()
        counters = self.counters
        async with slots:
            counters.requests += 1
            started = time.monotonic()
            try:
                text, finish_reason, tokens = await self._answer(client, chat, temperature)
            except _Failed as failure:
                failure.seconds = time.monotonic() - started
                raise
            finally:
                seconds = time.monotonic() - started
                counters.seconds += seconds
                counters.longest_seconds = max(counters.longest_seconds, seconds)
        reply = Reply(text, finish_reason, *tokens, seconds)
        counters.prompt_tokens += reply.prompt_tokens
        counters.completion_tokens += reply.completion_tokens
        counters.cost += self._cost(reply)
        return reply

    async def _answer(
        self, client: AsyncOpenAI, chat: list[dict[str, Any]], temperature: float
    ) -> tuple[str, str | None, tuple[int, int]]:
        """(text, finish reason, tokens of prompt and reply), or `_Failed`."""
        import openai

        settings = self.settings
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                answer = await client.chat.completions.create(
                    model=settings.model, messages=chat, temperature=temperature, max_tokens=settings.max_tokens
                )
        except (TimeoutError, openai.APITimeoutError):
            raise _Failed(f"no reply within {settings.timeout_seconds:g} s") from None
        except openai.APIStatusError as error:
            # What is wrong with the question, the key or the address stays wrong.
            may_pass = error.status_code in (408, 409, 425, 429) or error.status_code >= 500
            raise _Failed(self._safe(f"HTTP {error.status_code}: {error.message[:300]}"), may_pass) from None
        except (openai.OpenAIError, ValueError) as error:  # connections; ValueError: a body that is no JSON
            raise _Failed(self._safe(f"{type(error).__name__}: {error}"[:300])) from None
        try:
            choice, usage = answer.choices[0], answer.usage
            text = choice.message.content
            tokens = (int(usage.prompt_tokens), int(usage.completion_tokens)) if usage else (0, 0)
        except (AttributeError, IndexError, TypeError, ValueError):
            raise _Failed("the reply is no chat completion") from None
        if not isinstance(text, str) or not text.strip():
            raise _Failed("the reply is empty")
        return self._safe(text), choice.finish_reason, tokens

    def _connection(self) -> tuple[AsyncOpenAI, asyncio.Semaphore]:
        """Connections and slots of the running loop; those of one that has ended went with it."""
        from openai import AsyncOpenAI

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._client = AsyncOpenAI(
                base_url=self.settings.base_url,
                api_key=self._key or "none",
                max_retries=0,  # retries are ours, so that they are counted and kept as evidence
                timeout=self.settings.timeout_seconds,
            )
            self._slots = asyncio.Semaphore(self.settings.concurrency)
        return self._client, self._slots

    async def close(self) -> None:
        """Close the connections of the running loop."""
        if self._loop is asyncio.get_running_loop():
            await self._client.close()
            self._loop = None

    def _safe(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text

    def _cost(self, reply: Reply) -> float:
        settings = self.settings
        cost = reply.prompt_tokens * settings.price_per_million_prompt_tokens
        return (cost + reply.completion_tokens * settings.price_per_million_completion_tokens) / 1e6

    def _record(self, reply: Reply) -> dict[str, Any]:
        cost = 0.0 if reply.cached else self._cost(reply)
        return {"kind": "judge_reply", "model": self.settings.model, **asdict(reply), "cost": cost}

    def _record_failure(self, failure: _Failed) -> dict[str, Any]:
        said = {"error": str(failure), "seconds": failure.seconds}
        return {"kind": "judge_failure", "model": self.settings.model, **said}

    # ------------------------------------------------------------------------------------------------ cache

    def _cache_key(self, chat: list[dict[str, Any]], temperature: float, sample: int) -> str:
        # Not the address: the same model behind another port is the same judge.
        determined_by = [self.settings.model, chat, temperature, sample, self.settings.max_tokens]
        return hashlib.sha256(json.dumps(determined_by, sort_keys=True).encode("ascii")).hexdigest()

    def _path(self, key: str) -> Path | None:
        return self.settings.cache / key[:2] / f"{key}.json" if self.settings.cache else None

    def _load(self, key: str) -> Reply | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            return _KEPT.validate_python(json.loads(path.read_bytes()) | {"cached": True})
        except (OSError, ValueError, TypeError):  # none, or a damaged one: it is asked for again and replaced
            return None

    def _store(self, key: str, reply: Reply) -> None:
        """Whole or not at all, whoever else writes the same entry."""
        path = self._path(key)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in asdict(reply).items() if name != "cached"}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", encoding="ascii", delete=False) as file:
            json.dump(kept, file)
        os.replace(file.name, path)


_KEPT = TypeAdapter(Reply)


class _Failed(Exception):
    """One attempt came to nothing; `may_pass`: another one may not. `seconds`: of the request."""

    def __init__(self, message: str, may_pass: bool = True) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        self.seconds = 0.0
