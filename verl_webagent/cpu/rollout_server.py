"""A rollout server on CPU: `actor_rollout_ref.rollout.name=hf` generates with the transformers model itself.

Requests join and leave the running batch between two tokens, so that an episode never waits for another's long answer.
A request with a `seed` gets the same tokens whatever it shares its batch with, also if it is aborted and resumed.
The log-probabilities that come back are what verl's actor computes for the same tokens: of the whole vocabulary, logits
divided by the sampling temperature. top_p, top_k and the ids that are never sampled only restrict the choice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator, get_vision_placeholder_token_ids

from verl_webagent.cpu.decoding import Batch, Row, Sampling, load_weights


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
