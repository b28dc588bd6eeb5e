"""A process group for verl's workers on CPU.

verl opens its group with one backend for the CPU and one for the device: "cpu:gloo,cuda:nccl". On CPU that string is
"cpu:gloo,cpu:gloo", which torch refuses for naming a device twice. A backend may have any name, so this string is
registered as one: plain gloo.
"""

from __future__ import annotations

import torch.distributed as dist

NAME = "cpu:gloo,cpu:gloo"


def make_gloo(store: dist.Store, rank: int, size: int, timeout) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, make_gloo, devices=["cpu"])
