"""`python -m verl_webagent.doctor`: is what this package registers into verl there, here and inside a Ray worker?

A plugin that fails to load is invisible in verl, and a worker may see another environment than the driver. So both
import verl as training does, then every module that keeps a register, and compare it with plugin.EXPECTED.

Exit code 1, and one line on standard error that names it, if anything is missing. `--json` prints everything, for
`webagent doctor`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import ModuleType
from typing import Any

PACKAGES = ("verl", "trl", "torch", "transformers", "ray", "TransferQueue")
GROUP, ENTRY, PLUGIN = "verl.plugins", "webagent", "verl_webagent.plugin"
PROCESSES = ("driver", "worker")
BROKEN = ("missing", "failed")


def process_groups(module: ModuleType) -> Collection[str]:
    import torch.distributed

    return torch.distributed.Backend.backend_list


def engines_on_cpu(module: ModuleType) -> Collection[str]:
    return [kind for kind, backends in module.EngineRegistry._engines.items() if "cpu" in backends.get("fsdp2", {})]


# kind of name -> (verl's module that keeps the register, the names in it)
REGISTERS: dict[str, tuple[str, Callable[[ModuleType], Collection[str]]]] = {
    "advantage estimator": ("verl.trainer.ppo.core_algos", lambda module: module.ADV_ESTIMATOR_REGISTRY),
    "policy loss": ("verl.trainer.ppo.core_algos", lambda module: module.POLICY_LOSS_REGISTRY),
    "trainer mode": ("verl.trainer.ppo.v1", lambda module: module.trainer_base.TRAINER_REGISTRY),
    "agent loop": ("verl.experimental.agent_loop.agent_loop", lambda module: module._agent_loop_registry),
    "reward manager": (
        "verl.experimental.reward_loop.reward_manager", lambda module: module.registry.REWARD_MANAGER
    ),
    "process group": ("verl.utils.distributed", process_groups),
    "engine": ("verl.workers.engine", engines_on_cpu),
    "rollout server": ("verl.workers.rollout.replica", lambda module: module.RolloutReplicaRegistry._registry),
    "rollout adapter": (
        "verl.workers.rollout.replica",
        lambda module: {name for name, _ in sys.modules["verl.workers.rollout.base"]._ROLLOUT_REGISTRY},
    ),
    "checkpoint engine": ("verl.checkpoint_engine.base", lambda module: module.CheckpointEngineRegistry._registry),
}  # fmt: skip


def inspect_process() -> dict[str, Any]:
    """What this process has: {"python", "versions", "platform", "rows"}; rows are of `row` below.

    `verl_webagent.plugin` is not imported from here: whether verl does that is the first thing to find out.
    """
    versions = {package: installed_version(package) for package in PACKAGES}
    found = {"python": f"{platform.python_version()} ({sys.executable})", "versions": versions, "platform": None}
    if not any(one.name == ENTRY for one in entry_points(group=GROUP)):
        return found | {"rows": [row("entry point", ENTRY, "missing", f"no package declares it in {GROUP}")]}
    try:
        importlib.import_module("verl")
    except Exception as error:
        return found | {"rows": [row("entry point", ENTRY, "missing", f"import verl fails: {last_line(error)}")]}
    if PLUGIN not in sys.modules:
        return found | {"rows": [row("entry point", ENTRY, "missing", why_not_loaded())]}

    plugin = importlib.import_module(PLUGIN)
    on_cpu = plugin.on_cpu()
    expected = plugin.EXPECTED | (plugin.EXPECTED_ON_CPU if on_cpu else {})
    hooks = plugin.HOOKS | plugin.CPU_HOOKS
    rows = [row("entry point", ENTRY, "ok")]
    for kind, names in expected.items():
        keeper, read = REGISTERS[kind]
        try:
            there, reason = read(importlib.import_module(keeper)), ""
        except Exception as error:
            there, reason = (), f"import {keeper} fails: {last_line(error)}"
        failure = plugin.failures.get(hooks[keeper], "").strip()
        reason = reason or failure.rpartition("\n")[2] or f"{hooks[keeper]} does not register it"
        rows += [row(kind, name, "ok") if name in there else row(kind, name, "missing", reason) for name in names]
    for module, trace in plugin.failures.items():
        rows.append(row("hook", module, "failed", trace.strip().rpartition("\n")[2], trace))
    return found | {"platform": "cpu" if on_cpu else "accelerator", "rows": rows}


def row(kind: str, name: str, state: str, reason: str = "", trace: str = "") -> dict[str, str]:
    """state: ok, missing (from its register) or failed (a hook); trace: of the exception, where there was one."""
    return {"kind": kind, "name": name, "state": state, "reason": reason, "traceback": trace}


def why_not_loaded() -> str:
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if policy.strip().lower() != "auto" and ENTRY not in [name.strip() for name in policy.split(",")]:
        return f"VERL_USE_EXTERNAL_PLUGINS = {policy!r} excludes it, allowed: unset, auto, or a list with {ENTRY}"
    try:
        importlib.import_module(PLUGIN)
    except Exception as error:
        return f"import {PLUGIN} fails: {last_line(error)}"
    return f"verl did not load {PLUGIN}, though it can be imported: is this verl older than 0.9?"


def last_line(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def inspect_worker() -> dict[str, Any]:
    """`inspect_process` of a Ray worker: of the cluster in RAY_ADDRESS, or of one started for this."""
    import ray

    local = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": 1, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="error", **local)
    try:
        return ray.get(ray.remote(num_cpus=0)(inspect_process).remote())
    finally:
        ray.shutdown()


def inspect() -> dict[str, Any]:
    """{"driver", "worker": as `inspect_process`, "table": of `side_by_side`, "problems": one line each}"""
    report: dict[str, Any] = {"driver": inspect_process(), "worker": None, "problems": []}
    if report["driver"]["versions"]["verl"] != "-":
        try:
            report["worker"] = inspect_worker()
        except Exception as error:
            report["problems"].append(f"no Ray worker can be asked: {last_line(error)}")
    report["table"] = side_by_side(report)
    broken: dict[tuple[str, str], list[str]] = {}  # (where, why): what; one failed hook takes several names with it
    for one in report["table"]:
        where = " and the ".join(process for process in PROCESSES if one[process] in BROKEN)
        if where:
            broken.setdefault((where, one["reason"]), []).append(f"{one['kind']} {one['name']}")
    report["problems"] += [f"{', '.join(what)} missing in the {where}: {why}" for (where, why), what in broken.items()]
    return report


def side_by_side(report: dict[str, Any]) -> list[dict[str, str]]:
    """Rows {"kind", "name", "driver", "worker", "reason"}: a state is "-" where that process says nothing of it."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for process in PROCESSES:
        for one in report[process]["rows"] if report[process] else ():
            key = one["kind"], one["name"]
            line = table.setdefault(key, {"kind": key[0], "name": key[1], "driver": "-", "worker": "-", "reason": ""})
            line[process] = one["state"]
            line["reason"] = line["reason"] or one["reason"]
    return list(table.values())


def show(report: dict[str, Any]) -> None:
    """A table of versions and one of registered names, the driver's column beside the worker's."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False, soft_wrap=True)
    there = [process for process in PROCESSES if report[process]]
    versions = Table("", *there, box=None)
    versions.add_row("Python", *(report[process]["python"] for process in there))
    versions.add_row("platform", *(report[process]["platform"] or "-" for process in there))
    for package in PACKAGES:
        versions.add_row(package, *(report[process]["versions"][package] for process in there))
    console.print(versions)
    names = Table("kind", "name", *PROCESSES, "reason", box=None)
    for one in report["table"]:
        names.add_row(*one.values())
    console.print(names)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_webagent.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    wants = parser.parse_args()
    warnings.simplefilter("ignore")  # verl's, about engines that are not installed
    logging.getLogger("verl_webagent").disabled = True  # what it would say is in the report
    report = inspect()
    if wants.json:
        print(json.dumps(report))
    else:
        show(report)
    if report["problems"]:
        print("error: " + "; ".join(report["problems"]), file=sys.stderr)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
