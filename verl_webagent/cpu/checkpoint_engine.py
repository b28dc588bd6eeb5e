"""Weights from the actor to standalone rollout servers of the same host, through a file in memory.

Selected by `actor_rollout_ref.rollout.checkpoint_engine.backend=file`; verl's other engines need NCCL or RDMA.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """One `torch.save` of full tensors a synchronisation.

    directory: where the file lies for the moments it exists; default /dev/shm, or the temporary folder without one.
    seconds: how long a server waits for it before TimeoutError.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, directory: str | None = None, seconds: float = 600
    ) -> None:
        self.is_master = is_master
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        self.directory = Path(directory or shared)
        self.seconds = seconds
        self.path: Path | None = None

    def prepare(self) -> dict[str, Any]:
        return {"path": str(self.directory / f"verl_weights_{uuid.uuid4().hex}.pt")}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        path = metadata[0]["path"]
        return {"path": [path] * actor_wg_world_size}, {"path": [path] * rollout_world_size}

    def init_process_group(self, path: str) -> None:
        self.path = Path(path)

    def finalize(self) -> None:
        if self.is_master and self.path:
            self.path.unlink(missing_ok=True)
        self.path = None

    @torch.no_grad()
    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        # Every rank walks the weights, for gathering a sharded one takes all of them; the first rank writes.
        state = {}
        async for name, tensor in ensure_async_iterator(weights):
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.is_master:
                state[name] = full.detach().cpu().clone()
        if self.is_master:
            partial = self.path.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(self.path)
        return {"weight_sync/bytes": float(sum(tensor.nbytes for tensor in state.values()))}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        async with asyncio.timeout(self.seconds):
            while not self.path.exists():
                await asyncio.sleep(0.01)
        for name, tensor in torch.load(self.path, weights_only=True).items():
            yield name, tensor
