"""Generation by a transformers model, several requests at once: the engine of the rollout server.

Requests join and leave the batch between two tokens. Each is read alone or with others of its length, then all rows
continue in one forward pass a token, their keys and values padded on the left to one length. The model needs plain
attention in every layer (no sliding window, no recurrent state), as Qwen2, Qwen3, Qwen2.5-VL and Qwen3-VL have.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters that a request can have; temperature 0 takes the likeliest token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: bool = True  # they are always returned: they cost nothing here
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, fine, allowed in (
            ("temperature", self.temperature >= 0, ">= 0"),
            ("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1"),
            ("top_k", self.top_k >= -1, ">= 1, or -1 or 0 for all"),
            ("repetition_penalty", self.repetition_penalty == 1, "1.0"),
        ):
            if not fine:
                raise ValueError(f"sampling parameter {name} = {getattr(self, name)!r}, allowed: {allowed}")

    @classmethod
    def of_request(cls, given: dict[str, Any], most: int, usual: int) -> Sampling:
        """most: room left in the context; usual: tokens of a request that names no limit."""
        values = dict(given)
        limit = values.pop("max_tokens", values.pop("max_new_tokens", usual))
        names = {one.name for one in fields(cls)}
        for name in values.keys() - names:
            raise ValueError(f"sampling parameter {name} = {values[name]!r} is unknown to hf, allowed: {sorted(names)}")
        return cls(max_tokens=max(1, min(limit, most)), **values)


@dataclass(eq=False)
class Row:
    """One request: what it asked for and what it has so far."""

    prompt: list[int]
    sampling: Sampling
    images: Sequence[Any] = ()
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    error: Exception | None = None
    done: bool = False
    answer: asyncio.Future | None = None

    def uniform(self, unseeded: random.Random) -> float:
        """The random number behind the next token. With a seed it depends on that and on the token's place alone."""
        if self.sampling.seed is None:
            return unseeded.random()
        return random.Random(f"{self.sampling.seed}/{len(self.prompt) + len(self.tokens)}").random()


class Batch:
    """The rows in generation and their keys and values, left-padded to one length."""

    def __init__(self, model, *, eos: Iterable[int], never: Sequence[int] = (), processor=None, seed: int = 0) -> None:
        self.model = model
        self.eos = frozenset(eos)
        self.never = list(never)
        self.processor = processor
        self.vision = hasattr(model.config, "vision_config")
        self.unseeded = random.Random(seed)
        self.clear()

    def clear(self) -> None:
        self.rows: list[Row] = []
        self.cache = None
        self.mask = torch.zeros(0, 0, dtype=torch.long)  # (rows, cached tokens)
        self.positions = torch.zeros(0, dtype=torch.long)  # (rows,) of the token that is read next

    @torch.inference_mode()
    def advance(self, arriving: Sequence[Row]) -> list[Row]:
        """One token for every row; returns those that are done, which includes arriving ones that cannot be read."""
        if self.rows:
            self._read_last_tokens()
        failed = []
        # Prompts of one length are read together, without padding; those with images one by one.
        for _, group in groupby(sorted(arriving, key=group_key), key=group_key):
            rows = list(group)
            try:
                self._read_prompts(rows)
            except Exception as error:
                for row in rows:
                    row.error = error
                failed += rows
        done = [row for row in self.rows if row.done]
        if done:
            self._keep([i for i, row in enumerate(self.rows) if not row.done])
        return done + failed

    def _read_last_tokens(self) -> None:
        self.mask = F.pad(self.mask, (0, 1), value=1)
        logits = self._forward(
            torch.tensor([[row.tokens[-1]] for row in self.rows]), self.positions[:, None], self.cache, self.mask
        )
        self.positions = self.positions + 1
        self._choose(self.rows, logits)

    def _read_prompts(self, rows: list[Row]) -> None:
        ids = torch.tensor([row.prompt for row in rows])
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        inputs, after = {}, torch.full((len(rows),), ids.shape[1])
        if rows[0].images:
            images = self.processor.image_processor(images=list(rows[0].images), return_tensors="pt")
            inputs = {name: images[name] for name in ("pixel_values", "image_grid_thw")}
            inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).long()
            positions = None  # the model lays them out in two dimensions
        output = self.model(
            input_ids=ids, position_ids=self._layout(positions), attention_mask=torch.ones_like(ids),
            use_cache=True, logits_to_keep=1, **inputs,
        )  # fmt: skip
        if rows[0].images:
            after = after + self.model.model.rope_deltas.flatten()
        self._choose(rows, output.logits)
        self._append(rows, output.past_key_values, after)

    def _forward(self, ids, positions, cache, mask) -> torch.Tensor:
        return self.model(
            input_ids=ids, position_ids=self._layout(positions), attention_mask=mask, past_key_values=cache,
            use_cache=True,
        ).logits  # fmt: skip

    def _layout(self, positions: torch.Tensor | None) -> torch.Tensor | None:
        """Qwen-VL numbers tokens by time, height and width, which are one number for text."""
        return positions.expand(3, *positions.shape) if self.vision and positions is not None else positions

    def _append(self, rows: list[Row], cache, positions: torch.Tensor) -> None:
        length = cache.get_seq_length()
        if self.cache is None:
            self.cache = cache
            self.mask = torch.ones(len(rows), length, dtype=torch.long)
        else:
            longest = max(length, self.mask.shape[1])
            old, new = longest - self.mask.shape[1], longest - length
            for mine, other in zip(self.cache.layers, cache.layers, strict=True):
                mine.keys = torch.cat([F.pad(mine.keys, (0, 0, old, 0)), F.pad(other.keys, (0, 0, new, 0))])
                mine.values = torch.cat([F.pad(mine.values, (0, 0, old, 0)), F.pad(other.values, (0, 0, new, 0))])
            added = F.pad(torch.ones(len(rows), length, dtype=torch.long), (new, 0))
            self.mask = torch.cat([F.pad(self.mask, (old, 0)), added])
        self.rows += rows
        self.positions = torch.cat([self.positions, positions])

    def _keep(self, which: list[int]) -> None:
        if not which:
            return self.clear()
        mask = self.mask[which]
        start = int(mask.any(0).nonzero()[0])  # columns that only rows now gone had used
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[which, :, start:], layer.values[which, :, start:]
        self.rows = [self.rows[i] for i in which]
        self.mask, self.positions = mask[:, start:], self.positions[which]

    def _choose(self, rows: list[Row], logits: torch.Tensor) -> None:
        logits = logits[:, -1].float()
        temperature = torch.tensor([row.sampling.temperature for row in rows])[:, None]
        log_probs = torch.log_softmax(logits / temperature.where(temperature > 0, torch.tensor(1.0)), -1)
        allowed = log_probs.clone()
        allowed[:, self.never] = -torch.inf
        uniform = torch.tensor([row.uniform(self.unseeded) for row in rows], dtype=torch.float64)[:, None]
        cumulative = restrict(allowed, rows).exp().double().cumsum(-1)
        whole = cumulative[:, -1:]
        at = torch.minimum(uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
        drawn = torch.searchsorted(cumulative, at, right=True)  # the first whose share ends beyond it: probability > 0
        chosen = torch.where(temperature > 0, drawn, allowed.argmax(-1, keepdim=True))
        kept = log_probs.gather(-1, chosen)
        for row, token, log_prob in zip(rows, chosen.flatten().tolist(), kept.flatten().tolist(), strict=True):
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            ended = token in self.eos and not row.sampling.ignore_eos
            row.done = ended or len(row.tokens) >= row.sampling.max_tokens


def group_key(row: Row) -> tuple[int, int]:
    return len(row.prompt), id(row) if row.images else 0


def restrict(log_probs: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """-inf for what top_k and top_p leave out, as vLLM does: first the k likeliest, then the fewest that sum to p."""
    if all(row.sampling.top_k <= 0 and row.sampling.top_p == 1 for row in rows):
        return log_probs
    size = log_probs.shape[-1]
    top_k = torch.tensor([row.sampling.top_k if row.sampling.top_k > 0 else size for row in rows])[:, None]
    top_p = torch.tensor([row.sampling.top_p for row in rows])[:, None]
    values, order = log_probs.sort(-1, descending=True)
    shares = values.masked_fill(torch.arange(size) >= top_k, -torch.inf).softmax(-1)
    out = (shares == 0) | ((shares.cumsum(-1) - shares >= top_p) & (top_p < 1))
    return log_probs.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)


@torch.no_grad()
def load_weights(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Copy every tensor of `state` into the model. A tied weight may come under one of its names.

    Raises ValueError if a name is not the model's, or a weight of the model does not come.
    """
    weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    unknown = sorted(state.keys() - weights.keys())
    given = {weights[name].data_ptr() for name in state.keys() & weights.keys()}
    absent = sorted(name for name, one in model.named_parameters() if one.data_ptr() not in given)
    if unknown or absent:
        raise ValueError(f"weights of another model than the server's: unknown {unknown[:3]}, absent {absent[:3]}")
    for name, tensor in state.items():
        weights[name].copy_(tensor)
