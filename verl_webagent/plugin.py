"""What verl imports, in each of its processes, by the entry point `verl.plugins`.

Importing this module is enough and costs next to nothing: it imports neither torch nor verl, only says what is to be
imported once verl has imported the module it registers into. A failure there is no reason to stop verl, which may be
running without us: it is logged as one ERROR line and kept in `failures`, where `python -m verl_webagent.doctor` finds
it, in Ray's workers too. Nothing goes wrong silently by that, since each register below raises on a name that it
lacks; but its message ("unknown ...") does not say why, and the line above it does.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from functools import partial

from verl_webagent.post_import import when_imported

# Right after verl has imported the module on the left, in that process, the one on the right registers its parts.
HOOKS = {
    "verl.utils.import_utils": "verl_webagent.trl_compat",
    "verl.plugin.platform": "verl_webagent.cpu.platform",
    "verl.utils.config": "verl_webagent.resolver",
    "verl.trainer.ppo.core_algos": "verl_webagent.estimators",
    "verl.trainer.ppo.v1": "verl_webagent.trainers",
    "verl.experimental.agent_loop.agent_loop": "verl_webagent.agent_loop",
    "verl.experimental.reward_loop.reward_manager": "verl_webagent.reward_manager",
}

# The same, only where verl's platform is "cpu".
CPU_HOOKS = {
    "verl.utils.distributed": "verl_webagent.cpu.process_group",
    "verl.workers.engine": "verl_webagent.cpu.engines",
    "verl.workers.rollout.replica": "verl_webagent.cpu.rollout_server",
    "verl.checkpoint_engine.base": "verl_webagent.cpu.checkpoint_engine",
}

# What verl's registers have to hold once verl has imported the module that keeps them: {kind: names}. Where each kind
# is kept, and how to read it, is in verl_webagent.doctor, which checks this.
EXPECTED: dict[str, tuple[str, ...]] = {
    "advantage estimator": (
        "webgym",
        "openwebrl",
        "zerogui",
        "arpo",
        "webagent_r1",
        "asyncwebrl",
        "hiconagent",
        "uitars2",
        "webrl",
    ),  # fmt: skip
    "policy loss": ("webgym", "openwebrl", "zerogui", "arpo", "webagent_r1"),
    "trainer mode": ("webagent_sync", "webagent_colocate", "webagent_separate"),
    "agent loop": ("webagent",),
    "reward manager": ("webagent",),
}
EXPECTED_ON_CPU: dict[str, tuple[str, ...]] = {
    "process group": ("cpu:gloo,cpu:gloo",),
    "engine": ("language_model", "value_model"),
    "rollout server": ("hf",),
    "rollout adapter": ("hf",),
    "checkpoint engine": ("file",),
}

# Module of ours -> traceback of why it is not there.
failures: dict[str, str] = {}

logger = logging.getLogger("verl_webagent")


def on_cpu() -> bool:
    """Whether verl runs on the platform "cpu"; verl decides at the first question and keeps to it."""
    from verl.plugin.platform import get_platform

    return get_platform().device_name == "cpu"


def load(module: str, after: str, only_on_cpu: bool) -> None:
    try:
        if not only_on_cpu or on_cpu():
            importlib.import_module(module)
    except Exception as error:
        failures[module] = traceback.format_exc()
        logger.error(
            "webagent-rl: %s did not load after %s in process %d, what it registers is missing: %s: %s",
            module, after, os.getpid(), type(error).__name__, " ".join(str(error).split()),
        )  # fmt: skip


def install() -> None:
    # verl asks which platform it is on before it reads its configuration; workers inherit the environment.
    if "trainer.device=cpu" in sys.argv:
        os.environ.setdefault("VERL_PLATFORM", "cpu")
    for hooks, only_on_cpu in ((HOOKS, False), (CPU_HOOKS, True)):
        for after, module in hooks.items():
            when_imported(after, partial(load, module, after, only_on_cpu))


install()
