"""A recipe run on verl, from its settings to its report: `python -m verl_webagent.train recipes/webagent_r1 --help`.

`python -m verl.trainer.main_ppo` with the recipe's verl.yaml runs the same trainer. This adds what a person at a small
machine wants around it: settings checked first, the warm-up, one process less to start, one line an update.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from webagent_core.cli import override
from webagent_core.command_line import NO_SIGNAL, checked_recipe, overrides_of, parser, run_folder
from webagent_core.policy.tiny import start_of
from webagent_core.recipe import Recipe
from webagent_core.rewards.reward_manager import RewardError
from webagent_core.sampling.filters import NoSignal

if TYPE_CHECKING:
    from omegaconf import DictConfig

# What verl, TransferQueue and Ray say beside our lines; --verbose leaves them be.
QUIET = {
    "VERL_LOGGING_LEVEL": "WARNING",
    "TQ_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
SETTINGS = {"TRANSFER_QUEUE_ENABLE": "1", "TOKENIZERS_PARALLELISM": "false", "TQ_NUM_THREADS": "2"}


def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    folder = arguments.recipe_folder
    arguments.out = run_folder(folder.resolve().name, "verl", arguments)
    started = time.monotonic()
    _environment(arguments)
    try:
        recipe = checked_recipe(folder, arguments, last_checkpoint(arguments.out))
        config = _compose(folder, arguments, recipe)
    except (ValueError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    if arguments.dry_run:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(config, resolve=True), end="")
        return
    from verl_webagent.checks import left_to_trl

    for what in left_to_trl(recipe):
        print(f"not on verl: {what}")
    start = arguments.out / "start"
    # A resumed run keeps the policy it began with, which is its reference too.
    if config.actor_rollout_ref.model.path == str(start) and not (arguments.resume and start.exists()):
        _warm_up(folder, arguments)
    try:
        run(config, arguments.verbose)
    except NoSignal as error:
        _report(arguments.out)
        print(f"stopped: {error}. What was done is in {arguments.out}", file=sys.stderr)
        sys.exit(NO_SIGNAL)
    except RewardError as error:
        _report(arguments.out)
        sys.exit(f"{error.__cause__}\nerror: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted: what was done is in {arguments.out}; --resume goes on from its last checkpoint")
    _close(recipe, arguments.out, time.monotonic() - started)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    known = parser("RECIPE_FOLDER", "verl")
    known.add_argument("recipe_folder", type=Path, help="a folder with recipe.yaml and verl.yaml")
    known.add_argument("overrides", nargs="*", metavar="VERL.KEY=VALUE", help="overrides of verl's own configuration")
    known.add_argument("--verbose", action="store_true", help="everything that verl, Ray and TransferQueue say")
    return known.parse_intermixed_args(argv)


def _environment(arguments: argparse.Namespace) -> None:
    """Before verl is imported here, and for the processes that it starts."""
    import torch

    settings = SETTINGS | {"VERL_FILE_LOGGER_PATH": str(arguments.out / "verl.jsonl")}
    for name, value in (settings if arguments.verbose else settings | QUIET).items():
        os.environ.setdefault(name, value)
    if not torch.accelerator.is_available():
        os.environ.setdefault("VERL_PLATFORM", "cpu")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share few cores


def _compose(folder: Path, arguments: argparse.Namespace, recipe: Recipe) -> DictConfig:
    """verl's whole configuration for this run, checked by verl's own validation and ours."""
    import verl  # noqa: F401  (its plugins: the resolver of ${webagent:...}, and the CPU platform)
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from verl_webagent.checks import check_pictures, is_read
    from verl_webagent.validation import validate

    check_pictures(recipe)
    if not (folder / "verl.yaml").is_file():
        raise FileNotFoundError(f"{folder / 'verl.yaml'} does not exist: this recipe has no verl run yet")
    # What --smoke makes small and verl does not read anyway is not to be refused as if somebody had asked for it.
    asked = {setting for setting, _ in map(override, arguments.set)}
    overrides = {name: value for name, value in overrides_of(arguments).items() if is_read(name) or name in asked}
    changed = [f"{name}={json.dumps(value)}" for name, value in overrides.items()]
    node = {"recipe": str(folder.resolve()), "preset": arguments.preset, "profile": arguments.profile,
            "seed": arguments.seed, "set": changed, "out": str(arguments.out)}  # fmt: skip
    model = start_of(recipe)
    with initialize_config_dir(config_dir=str(folder.resolve()), version_base=None):
        config = compose("verl", overrides=[f"actor_rollout_ref.model.path={model}", *arguments.overrides])
    OmegaConf.update(config, "webagent", node, merge=True)
    OmegaConf.update(config, "trainer.resume_mode", "auto" if arguments.resume else "disable")
    if arguments.resume:  # the evaluation before training is in the run's folder already
        OmegaConf.update(config, "trainer.val_before_train", False)
    if not arguments.verbose:
        OmegaConf.update(config, "ray_kwargs.ray_init.log_to_driver", False, force_add=True)
        OmegaConf.update(config, "ray_kwargs.ray_init.logging_level", "error", force_add=True)
    validate(config)  # looks into the model's folder, where the warm-up's result is not yet
    if recipe.policy.warm_up and config.actor_rollout_ref.model.path == model:
        OmegaConf.update(config, "actor_rollout_ref.model.path", str(arguments.out / "start"))
    return config


def _warm_up(folder: Path, arguments: argparse.Namespace) -> None:
    """The policy that a TRL run of these settings would start from, at OUT/start. In a process of its own: TRL's."""
    command = [sys.executable, "-m", "trl_webagent.warm_up", str(folder), "--link", str(arguments.out / "start"),
               "--preset", arguments.preset, "--profile", arguments.profile, "--seed", str(arguments.seed)]  # fmt: skip
    command += ["--smoke"] * arguments.smoke + [part for each in arguments.set for part in ("--set", each)]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(f"error: the warm-up ended with exit code {done.returncode}; its own lines above say why")


def run(config: DictConfig, verbose: bool = False) -> None:
    """What verl's TaskRunner does, in this process: one less to start, and no dump of the whole configuration."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.v1 import get_trainer_cls

    environment = get_ppo_ray_runtime_env(config)
    environment.setdefault("env_vars", {}).update(TRANSFER_QUEUE_ENABLE="1")
    arguments: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    given = arguments.pop("runtime_env", None) or {}
    ray.init(**arguments, runtime_env=OmegaConf.to_container(OmegaConf.merge(environment, given)))
    runner = TaskRunnerV1.__ray_metadata__.modified_class()
    OmegaConf.update(config, "transfer_queue.enable", True)
    OmegaConf.resolve(config)
    with redirect_stdout(sys.stdout if verbose else open(os.devnull, "w")):
        tq.init(config.transfer_queue)
        try:
            runner.config = config
            runner.trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
            runner.trainer.init()
            runner.init_agent_loop_manager()
            runner.trainer.fit(runner.agent_loop_manager)
        finally:
            tq.close()
            ray.shutdown()


def last_checkpoint(out: Path) -> Path | None:
    """Folder of the newest whole checkpoint of the run in `out`, or None: the one that verl's tracker file names."""
    tracker = out / "checkpoints" / "latest_checkpointed_iteration.txt"
    return tracker.parent / f"global_step_{tracker.read_text().strip()}" if tracker.is_file() else None


def _report(out: Path) -> None:
    """The report and the plot, of all that the run's folder holds by now."""
    from webagent_core.report.run_directory import RunDirectory
    from webagent_core.report.viewer import make_report

    make_report(RunDirectory(out))


def _close(recipe: Recipe, out: Path, seconds: float) -> None:
    from webagent_core.report.run_directory import RunDirectory
    from webagent_core.report.summary import closing_lines, duration

    metrics = RunDirectory(out).metrics()
    if not any(line["phase"] == "after" for line in metrics):
        return
    *by_task, overall = closing_lines(metrics, recipe.tasks.names, recipe.train.seed)
    print("\n".join(by_task))
    print(f"{duration(seconds)} in all; every step to click through: {out / 'report.html'}")
    print(overall)


if __name__ == "__main__":
    main()
