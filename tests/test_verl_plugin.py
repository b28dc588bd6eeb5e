"""How verl finds this package, what that costs, and what the doctor says when something is not there."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_webagent import doctor, plugin
from verl_webagent.post_import import PostImportHooks


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh process outside the checkout, with verl's own defaults: none of its environment variables is set."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "RAY_"))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd="/", env=clean | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def printed(done: subprocess.CompletedProcess) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -------------------------------------------------------------------------------------------------------- entry point


def test_verl_finds_the_plugin_by_its_entry_point_and_loads_no_more_than_it_needs():
    code = "import sys, verl; print(*(name for name in sys.modules if name.startswith(('verl_webagent', 'verl.'))))"
    loaded = set(printed(python("-c", code))[-1].split())
    assert {"verl_webagent.plugin", "verl_webagent.trl_compat", "verl_webagent.cpu.platform"} <= loaded
    assert not loaded & {*plugin.HOOKS.values(), *plugin.CPU_HOOKS.values()} - {
        plugin.HOOKS[name] for name in plugin.HOOKS.keys() & loaded
    }


def test_the_plugin_alone_imports_neither_torch_nor_verl():
    code = (
        "import sys, verl_webagent.plugin; print([n for n in ('torch', 'ray', 'verl', 'pydantic') if n in sys.modules])"
    )
    assert printed(python("-c", code)) == ["[]"]


def test_the_device_on_the_command_line_is_the_platform_unless_the_environment_names_one():
    code = "import os, verl_webagent.plugin; print(os.environ.get('VERL_PLATFORM'))"
    assert printed(python("-c", code)) == ["None"]
    assert printed(python("-c", code, "trainer.device=cuda")) == ["None"]
    assert printed(python("-c", code, "trainer.device=cpu")) == ["cpu"]
    assert printed(python("-c", code, "trainer.device=cpu", VERL_PLATFORM="huawei")) == ["huawei"]


def test_a_plugin_that_comes_late_still_registers_and_says_what_is_too_late():
    code = """
import json, verl, verl.utils.model, verl.workers.rollout.replica as replica
import verl_webagent.plugin as plugin
print(json.dumps([sorted(plugin.failures), "hf" in replica.RolloutReplicaRegistry._registry]))
print(list(plugin.failures.values())[0].strip().splitlines()[-1])
"""
    done = python("-c", code, VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="cpu")
    failed, reason = printed(done)[-2:]
    assert json.loads(failed) == [["verl_webagent.trl_compat"], True]
    assert reason.startswith("RuntimeError: verl.utils.model was imported before verl_webagent.plugin")
    assert done.stderr.count("webagent-rl: verl_webagent.trl_compat did not load") == 1


def test_verl_no_longer_looks_for_the_value_head_that_trl_lacks():
    import verl.models.transformers.monkey_patch
    import verl.utils.model

    assert not verl.utils.model.is_trl_available()
    assert not verl.models.transformers.monkey_patch.is_trl_available()


# -------------------------------------------------------------------------------------------------- post-import hooks


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Write importable modules `probe_*`; each takes its source. They are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> None:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        importlib.invalidate_caches()

    yield write
    for name in [name for name in sys.modules if name.startswith("probe_")]:
        del sys.modules[name]


@pytest.fixture
def hooks():
    hooks = PostImportHooks()
    yield hooks
    if hooks in sys.meta_path:
        sys.meta_path.remove(hooks)


def test_a_callback_runs_after_the_modules_last_line_and_before_its_import_returns(modules, hooks):
    modules("probe_one", "import builtins\nseen = ['first line']\nseen.append('last line')\n")
    hooks.when_imported("probe_one", lambda: sys.modules["probe_one"].seen.append("callback"))
    assert "probe_one" not in sys.modules
    import probe_one

    assert probe_one.seen == ["first line", "last line", "callback"]
    assert type(probe_one.__loader__).__name__ == type(probe_one.__spec__.loader).__name__ == "SourceFileLoader"
    importlib.reload(probe_one)
    assert probe_one.seen == ["first line", "last line"]  # once


def test_callbacks_of_a_package_come_after_those_of_the_parts_it_imports_and_in_their_own_order(modules, hooks):
    modules("probe_package.__init__", "from probe_package import part\n")
    modules("probe_package.part", "")
    order = []
    for name, what in (("probe_package", 1), ("probe_package", 2), ("probe_package.part", 3)):
        hooks.when_imported(name, partial(order.append, what))
    import probe_package  # noqa: F401

    assert order == [3, 1, 2]


def test_a_module_that_is_there_is_answered_at_once(modules, hooks):
    modules("probe_two", "")
    import probe_two  # noqa: F401

    called = []
    hooks.when_imported("probe_two", lambda: called.append(1))
    assert called == [1]


def test_a_failed_import_keeps_its_callback_for_the_next_one(modules, hooks):
    modules("probe_three", "raise ImportError('not yet')\n")
    called = []
    hooks.when_imported("probe_three", lambda: called.append(1))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("probe_three")
    assert called == []
    modules("probe_three", "ready = True  # another length, so that no cached byte code is taken\n")
    assert importlib.import_module("probe_three").ready and called == [1]


def test_a_callback_may_import_what_imports_the_module_again(modules, hooks):
    modules("probe_four", "value = 4\n")
    modules("probe_user", "from probe_four import value\n")
    hooks.when_imported("probe_four", lambda: importlib.import_module("probe_user"))
    import probe_four  # noqa: F401

    assert sys.modules["probe_user"].value == 4


def test_threads_that_import_one_module_call_back_once_and_a_late_one_waits_for_it(modules, hooks):
    modules("probe_slow", "import time\ntime.sleep(0.3)\ndone = True\n")
    called, late = [], []
    hooks.when_imported("probe_slow", lambda: called.append(1))
    threads = [threading.Thread(target=importlib.import_module, args=("probe_slow",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    while "probe_slow" not in sys.modules:
        pass
    hooks.when_imported("probe_slow", lambda: late.append(sys.modules["probe_slow"].done))
    assert late == [True]
    for thread in threads:
        thread.join()
    assert called == [1]


# ------------------------------------------------------------------------------------------------- what is registered


def test_a_hook_that_fails_is_recorded_and_named_in_one_line_and_verl_goes_on(modules, hooks, monkeypatch, caplog):
    modules("probe_verl", "alive = True\n")
    modules("probe_ours", "raise KeyError('gone')\n")
    monkeypatch.setattr(plugin, "failures", {})
    hooks.when_imported("probe_verl", partial(plugin.load, "probe_ours", "probe_verl", False))
    with caplog.at_level(logging.ERROR, logger="verl_webagent"):
        assert importlib.import_module("probe_verl").alive
    assert "probe_ours.py" in plugin.failures["probe_ours"]
    (record,) = caplog.records
    assert "probe_ours did not load after probe_verl" in record.getMessage() and "'gone'" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_each_expected_name_is_in_verls_register():
    report = doctor.inspect_process()
    assert {(one["kind"], one["name"]): one["reason"] for one in report["rows"] if one["state"] != "ok"} == {}
    expected = plugin.EXPECTED | (plugin.EXPECTED_ON_CPU if plugin.on_cpu() else {})
    assert [(one["kind"], one["name"]) for one in report["rows"]] == [
        ("entry point", "webagent"), *((kind, name) for kind, names in expected.items() for name in names)
    ]  # fmt: skip
    assert (plugin.EXPECTED | plugin.EXPECTED_ON_CPU).keys() <= doctor.REGISTERS.keys()


def test_a_name_that_nobody_registers_is_missing(monkeypatch):
    monkeypatch.setitem(plugin.EXPECTED, "agent loop", ("webagent", "nobody"))
    (one,) = [one for one in doctor.inspect_process()["rows"] if one["state"] != "ok"]
    assert (one["kind"], one["name"], one["state"]) == ("agent loop", "nobody", "missing")
    assert one["reason"] == "verl_webagent.agent_loop does not register it"


# ------------------------------------------------------------------------------------------------------------- doctor


@pytest.mark.slow
def test_the_doctor_finds_everything_in_the_driver_and_in_a_worker():
    done = python("-m", "verl_webagent.doctor")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["trainer", "mode", "webagent_sync", "ok", "ok"] in lines
    assert ["ray", *[importlib.metadata.version("ray")] * 2] in lines


@pytest.mark.slow
def test_the_doctor_names_what_is_missing_in_the_worker_alone(tmp_path: Path):
    # A module of another package that verl imports in every process, and that breaks one of ours in Ray's workers.
    (tmp_path / "breaks_workers.py").write_text(
        "import sys\n"
        "if 'default_worker' in sys.argv[0]:\n"
        "    sys.modules['verl_webagent.reward_manager'] = None\n"
    )  # fmt: skip
    done = python(
        "-m", "webagent_core.cli", "doctor",
        PYTHONPATH=str(tmp_path), VERL_USE_EXTERNAL_MODULES="breaks_workers",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: reward manager webagent, hook verl_webagent.reward_manager missing in the worker: ModuleNotFoundError"
    )
    assert done.stderr.count("\n") == 1
    lines = [line.split()[:5] for line in done.stdout.splitlines()]
    assert ["reward", "manager", "webagent", "ok", "missing"] in lines
    assert ["agent", "loop", "webagent", "ok", "ok"] in lines


@pytest.mark.slow
def test_the_doctor_says_why_the_plugin_is_not_loaded():
    done = python("-m", "verl_webagent.doctor", "--json", VERL_USE_EXTERNAL_PLUGINS="other")
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem.startswith("entry point webagent missing in the driver and the worker: VERL_USE_EXTERNAL_PLUGINS =")
    assert done.stderr == f"error: {problem}\n"
