"""What to do with a chat that does not fit: cut it by rule, or end the episode. Both are on record."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from webagent_core.episode.contexts.base import CUT_HERE, ContextManager, ContextOverflow, inert
from webagent_core.episode.trajectory import Step

CountTokens = Callable[[list[dict]], int]  # tokens of a chat as the policy gets it, pictures and generation prompt too


class Fit(NamedTuple):
    """A chat that fits."""

    messages: list[dict]
    cut: str | None = None  # in words, what was cut to make it fit
    page: str | None = None  # what is left of a page that was cut


@dataclass(frozen=True)
class Budget:
    """Tokens that a chat may take.

    What is cut, in this order, and never more than needed:
    - history, oldest first, in the order that the context's class states, if that alone makes room for the page;
    - else the page's text, from its end, at a line boundary and with a marker line. It keeps at least half of the room
      that the task and the last step leave it: history goes, oldest first, until it does.
    The system prompt, the task, feedback, the newest screenshot and the last step are never cut, nor is anything in the
    middle of a picture. If that is still too much the episode ends with `context_overflow`.

    Args:
        count_tokens: of a chat.
        max_tokens: prompt and answer together.
        reserve: tokens of these that are kept for the answer.
    """

    count_tokens: CountTokens
    max_tokens: int
    reserve: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < self.max_tokens:
            raise ValueError(f"reserve = {self.reserve} is not allowed: 0 <= reserve < max_tokens = {self.max_tokens}")

    def fit(
        self,
        context: ContextManager,
        goal: str,
        steps: Sequence[Step],
        observation: str,
        screenshot: bytes | None = None,
    ) -> Fit:
        """The chat, cut if it has to be.

        Raises:
            ContextOverflow: nothing that may be cut makes it fit.
        """
        limit, page = self.max_tokens - self.reserve, inert(observation)
        most = context.most_less(steps)

        def chat(less: int, page: str) -> list[dict]:
            return context.render(goal, steps, page, screenshot, less)

        def size(less: int, page: str) -> int:
            return self.count_tokens(chat(less, page))

        messages = chat(0, page)
        if (whole := self.count_tokens(messages)) <= limit:
            return Fit(messages)
        if size(most, page) <= limit:
            less, kept = _first(most, lambda less: size(less, page) <= limit), page
        elif context.shows_page and (least := size(most, CUT_HERE)) <= limit:
            half = (limit - least) // 2
            less = _first(most, lambda less: size(less, CUT_HERE) + half <= limit)
            lines = page.split("\n")
            lost = _first(len(lines), lambda lost: size(less, _without_last(lines, lost)) <= limit)
            kept = _without_last(lines, lost)
        else:
            raise ContextOverflow(f"a prompt of {whole} tokens, {limit} fit, and what must stay is more than that")
        messages = chat(less, kept)
        if (tokens := self.count_tokens(messages)) > limit:  # a tokenizer may make more tokens of less text
            raise ContextOverflow(f"a prompt of {tokens} tokens when cut, {limit} fit")
        cut = [context.lost(steps, less)] if less else []
        cut += [f"the last {lost} of {len(lines)} lines of the page"] if kept != page else []
        return Fit(messages, "; ".join(cut), kept if kept != page else None)


def _first(most: int, fits: Callable[[int], bool]) -> int:
    """The smallest of 0..most that fits; `most` does."""
    return bisect_left(range(most), True, key=fits)


def _without_last(lines: list[str], lost: int) -> str:
    return "\n".join([*lines[: len(lines) - lost], CUT_HERE]) if lost else "\n".join(lines)


def chat_counter(tokenizer: Any, tokens_per_picture: int = 0) -> CountTokens:
    """Count with a tokenizer's own chat template; a picture counts as `tokens_per_picture`, wherever it stands."""

    def count(messages: list[dict]) -> int:
        pictures, flat = 0, []
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                pictures += sum(part["type"] == "image" for part in content)
                content = "\n".join(part["text"] for part in content if part["type"] == "text")
            flat.append({"role": message["role"], "content": content})
        encoded = tokenizer.apply_chat_template(flat, add_generation_prompt=True, tokenize=True, return_dict=True)
        return len(encoded["input_ids"]) + pictures * tokens_per_picture

    return count
