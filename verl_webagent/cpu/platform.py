"""verl's platform "cpu": what verl asks its accelerator for, answered by a machine that has none.

Chosen by VERL_PLATFORM=cpu, which `trainer.device=cpu` on the command line implies (see verl_webagent.plugin), and by
itself where torch is a CPU build, as then nothing else can be meant. It is not chosen for a torch that could drive an
accelerator and sees none: that is also how a login node of a GPU cluster looks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def memory() -> tuple[int, int]:
    """(free, all) main memory in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def zero(*args: Any, **kwargs: Any) -> int:
    return 0


def device_module() -> ModuleType:
    """torch.cpu, and the functions of torch.cuda that verl calls beyond it."""
    module = ModuleType("verl_webagent_cpu_device")
    module.__dict__.update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, zero)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device"):
        setattr(module, name, nothing)
    module.mem_get_info = lambda *args: memory()
    module.get_device_name = lambda *args: "cpu"
    module.get_device_properties = lambda *args: SimpleNamespace(name="cpu", total_memory=memory()[1], uuid="cpu")
    module.get_rng_state = lambda *args: torch.get_rng_state()
    module.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return torch.version.cuda is None and torch.version.hip is None and not hasattr(torch, "npu")

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # verl counts "GPU" (or "NPU") by name before it starts workers, so Ray has to be told of some that it hands
        # out one a worker: `+ray_kwargs.ray_init.num_gpus=1`.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
