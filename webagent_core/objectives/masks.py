"""Which tokens of a row the policy is responsible for."""

from __future__ import annotations

from collections.abc import Iterable


def response_mask(segments: Iterable[tuple[str, int]], max_len: int | None = None) -> list[int]:
    """1 for every token that the model sampled, 0 for all others, of a row made of (role, tokens) segments.

    Role "model" is what the policy generated, thinking included; observations, separators and generation prompts that
    a chat template adds are somebody else's. The row may be cut at `max_len` tokens, wherever that falls.
    """
    mask = [int(role == "model") for role, tokens in segments for _ in range(tokens)]
    return mask if max_len is None else mask[:max_len]
