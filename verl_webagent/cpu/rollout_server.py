"""A rollout server on CPU: `actor_rollout_ref.rollout.name=hf` generates with the transformers model itself.

Requests join and leave the running batch between two tokens, so that an episode never waits for another's long answer.
A request with a `seed` gets the same tokens whatever it shares its batch with, also if it is aborted and resumed.
The log-probabilities that come back are what verl's actor computes for the same tokens: of the whole vocabulary, logits
divided by the sampling temperature. top_p, top_k and the ids that are never sampled only restrict the choice.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

import ray
import torch
import torch.nn.functional as F
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator, get_vision_placeholder_token_ids


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


class HFServer:
    """The Ray actor. What it has to answer to is verl's: see vLLMHttpServer for the same methods."""

    def __init__(self, config, model_config, replica_rank: int = 0) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self.config = omega_conf_to_dataclass(config)
        settings = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        hf_config = settings.hf_config
        hf_config._attn_implementation = "sdpa"
        family = AutoModelForImageTextToText if hasattr(hf_config, "vision_config") else AutoModelForCausalLM
        model = family.from_pretrained(
            settings.local_path, config=hf_config, dtype=torch.float32, trust_remote_code=settings.trust_remote_code
        ).eval()
        ends = settings.generation_config.eos_token_id if settings.generation_config else None
        ends = ends if isinstance(ends, list) else [ends]
        words = len(settings.tokenizer)
        self.batch = Batch(
            model,
            eos=[one for one in (*ends, settings.tokenizer.eos_token_id) if one is not None],
            # A placeholder without an image breaks whatever reads the sequence later; the rows of the embedding beyond
            # the vocabulary are no tokens.
            never=[
                *get_vision_placeholder_token_ids(settings.processor),
                *range(words, hf_config.get_text_config().vocab_size),
            ],
            processor=settings.processor,
            seed=self.config.seed + replica_rank,
        )
        self.global_steps: int | None = None
        self.waiting: list[Row] = []
        self.work, self.gate, self.rejecting = asyncio.Event(), asyncio.Event(), False
        self.gate.set()
        self.boundary = asyncio.Lock()  # held while a token is made: who takes it stands between two tokens
        self.thread = ThreadPoolExecutor(1)

    async def start(self) -> None:
        self.task = asyncio.create_task(self._generate_forever())

    async def _generate_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.work.wait()
            async with self.boundary:
                room = self.config.max_num_seqs - len(self.batch.rows)
                arriving, self.waiting = self.waiting[:room], self.waiting[room:]
                try:
                    done = await loop.run_in_executor(self.thread, self.batch.advance, arriving)
                except Exception as error:  # of the whole batch: each caller gets it, the next batch starts afresh
                    done = self.batch.rows + [row for row in arriving if row not in self.batch.rows]
                    for row in done:
                        row.error = error
                    self.batch.clear()
                self._hand_back(done, "completed")
                if not self.waiting and not self.batch.rows:
                    self.work.clear()

    def _hand_back(self, rows: Iterable[Row], reason: str) -> None:
        for row in rows:
            if row.answer.done():  # its caller has gone
                continue
            if row.error:
                row.answer.set_exception(row.error)
            else:
                row.answer.set_result(self._output(row.tokens, row.log_probs, reason))

    def _output(self, tokens: list[int], log_probs: list[float], reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=tokens, log_probs=log_probs, stop_reason=reason, extra_fields={"global_steps": self.global_steps}
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str,
        image_data: Sequence[Any] | None = None, video_data: Sequence[Any] | None = None, **kwargs: Any,
    ) -> TokenOutput:  # fmt: skip
        """The tokens after `prompt_ids`, in which the images' placeholders are already as many as their patches.

        Raises ValueError for a prompt that fills the context, for videos, and for unknown sampling parameters.
        """
        if video_data:
            raise ValueError(f"video_data of {len(video_data)} videos: hf reads images only")
        usual, context = self.config.response_length, self.config.prompt_length + self.config.response_length
        room = (self.config.max_model_len or context) - len(prompt_ids)
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens fills the context of {room + len(prompt_ids)}")
        sampling = Sampling.of_request(sampling_params, most=room, usual=min(usual, max(1, context - len(prompt_ids))))
        while not self.gate.is_set():
            if self.rejecting:
                return self._output([], [], "aborted")
            await self.gate.wait()
        row = Row(list(prompt_ids), sampling, image_data or (), answer=asyncio.get_running_loop().create_future())
        self.waiting.append(row)
        self.work.set()
        return await row.answer

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Hand back what there is, "aborted", and admit nothing until `resume_generation`.

        reject_request: requests that come meanwhile are handed back empty instead of waiting.
        """
        self.gate.clear()
        self.rejecting = reject_request
        async with self.boundary:
            rows = self.batch.rows + self.waiting
            self._hand_back(rows, "aborted")
            self.batch.clear()
            self.waiting = []
        return {"aborted_count": len(rows)}

    async def resume_generation(self) -> None:
        self.rejecting = False
        self.gate.set()

    async def load(self, state: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """New weights, between two tokens. Raises ValueError if they are not the model's."""
        async with self.boundary:
            await asyncio.get_running_loop().run_in_executor(self.thread, load_weights, self.batch.model, state)
            self.global_steps = global_steps

    async def nothing(self, *args: Any, **kwargs: Any) -> None:
        """Weights and cache stay in main memory; there is nothing to free or to profile."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


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


class HFReplica(RolloutReplica):
    """One server, which is one process: rollout.tensor_model_parallel_size has to be 1."""

    def rollout_worker_use_gpu(self) -> bool:
        return False

    async def launch_servers(self) -> None:
        if self.world_size != 1:
            raise ValueError(f"tensor, data and pipeline parallel sizes multiply to {self.world_size}, hf allows 1")
        role = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else "policy"
        name = server_name(self.replica_rank, role) + self.name_suffix
        actor = ray.remote(HFServer).options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
        server = actor.remote(self.config, self.model_config, self.replica_rank)
        await server.start.remote()
        self.servers, self._server_handle, self._server_address = [server], server, f"ray:{name}"


def server_name(replica_rank: int, role: str = "policy") -> str:
    return f"webagent_hf_{role}_{replica_rank}"


class HFAdapter(BaseRollout):
    """The worker's side of the server: hands it the actor's weights."""

    def __init__(self, config, model_config, device_mesh, *args: Any, replica_rank: int = -1, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank if replica_rank >= 0 else int(os.environ["RANK"])
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    @torch.no_grad()
    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors", global_steps: int | None = None, peft_config: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        if wire_format != "named_tensors" or peft_config is not None:
            raise ValueError(
                f"wire_format = {wire_format!r}, peft_config = {peft_config!r}: hf takes whole weights, "
                "'named_tensors'; LoRA with actor_rollout_ref.model.lora.merge=True"
            )
        state = {}
        async for name, tensor in ensure_async_iterator(weights):
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            state[name] = full.detach().float().cpu().clone()
        await ray.get_actor(server_name(self.replica_rank)).load.remote(state, global_steps)


RolloutReplicaRegistry.register("hf", lambda: HFReplica)
base._ROLLOUT_REGISTRY[("hf", "async")] = f"{__name__}.HFAdapter"  # verl has no function for this one
