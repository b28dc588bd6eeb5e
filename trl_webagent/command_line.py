"""Command line of a recipe's train_trl.py. Checks all it can before a browser, a model or a heavy import starts."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from webagent_core.browser.chromium import find_chromium
from webagent_core.cli import override
from webagent_core.recipe import Recipe, load_recipe
from webagent_core.tasks.demonstrations import check_demonstrated
from webagent_core.tasks.miniwob import check_name

# The whole walk, small: for tests, and for a first look at whether everything is in place.
SMOKE = {
    "rollout.groups_per_update": 2,
    "rollout.group_size": 4,
    "train.updates": 2,
    "train.eval_episodes": 1,
    "policy.warm_up.demonstrations": 30,
    "policy.warm_up.steps": 20,
}


def main(recipe_folder: Path, argv: list[str] | None = None) -> None:
    """Run the recipe in `recipe_folder`; a bad argument or setting ends with one line on standard error."""
    arguments = _parse(recipe_folder.name, argv)
    try:
        recipe = _checked_recipe(recipe_folder, arguments)
    except (ValueError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    if arguments.dry_run:
        print(yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True, width=120), end="")
        return
    _be_quiet()
    from trl_webagent.run import Run

    try:
        Run(recipe, arguments.out, arguments.resume, arguments.report_to).go()
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted: what was done is in {arguments.out}; --resume goes on from its last checkpoint")


def _parse(recipe_name: str, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Train the recipe {recipe_name} with TRL.")
    parser.add_argument("--preset", default="paper", help="paper (default) or released: where paper and code differ")
    parser.add_argument(
        "--profile", default="embedded", help="numbers for a machine; embedded (default): two CPU cores"
    )
    parser.add_argument("--seed", type=int, default=0, help="fixes tasks, pages, warm-up, sampling and training")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--name", help="name of the run (default: <recipe>-<preset>-seed<seed>)")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/<name>)")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument("--report-to", default="none", help="where TRL logs as well, e.g. tensorboard or wandb")
    parser.add_argument(
        "--smoke", action="store_true", help="the whole walk in under three minutes; learns next to nothing"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved settings and their sources, and stop"
    )
    arguments = parser.parse_args(argv)
    name = (
        arguments.name or f"{recipe_name}-{arguments.preset}-seed{arguments.seed}{'-smoke' if arguments.smoke else ''}"
    )
    arguments.out = arguments.out or Path("runs") / name
    return arguments


def _checked_recipe(recipe_folder: Path, arguments: argparse.Namespace) -> Recipe:
    """The recipe, with everything checked that can be checked cheaply.

    Raises ValueError or FileNotFoundError whose message names the field, its value and what is allowed.
    """
    overrides: dict[str, Any] = {"train.seed": arguments.seed} | (SMOKE if arguments.smoke else {})
    overrides |= dict(map(override, arguments.set))
    recipe = load_recipe(recipe_folder, arguments.preset, arguments.profile, overrides)
    for name in recipe.tasks.names:
        check_name(name)
        if recipe.policy.warm_up:
            check_demonstrated(name)
    if recipe.rollout.temperature == 0:
        raise ValueError("rollout.temperature = 0: allowed are numbers > 0, or all attempts at a task would be equal")
    _check_model(recipe.policy.model)
    if arguments.resume and not last_checkpoint(arguments.out):
        raise FileNotFoundError(f"--resume: {arguments.out} holds no checkpoint to go on from")
    if not arguments.resume and (arguments.out / "metrics.jsonl").exists():
        raise ValueError(
            f"--out {arguments.out}: this run exists; go on with --resume, or give another --name or --out"
        )
    find_chromium()
    return recipe


def _check_model(name: str | None) -> None:
    """Raise FileNotFoundError unless `name` is tiny, the folder of a model, or a model of the hub."""
    if name == "tiny" or (name and (Path(name) / "config.json").is_file()):
        return
    allowed = "tiny, a folder with a config.json, the name of a model on the hub"
    if name and not Path(name).exists():
        from huggingface_hub import HfApi, constants

        try:
            if not constants.HF_HUB_OFFLINE and HfApi().model_info(name, timeout=10):
                return
        except Exception as error:  # whatever the hub or the way to it answers, the user's remedy is the same
            allowed += f" (it answers {type(error).__name__})"
    raise FileNotFoundError(f"policy.model = {name!r}: no such model; allowed are {allowed}")


def last_checkpoint(out: Path) -> str | None:
    """Folder of the newest checkpoint of the run in `out`, or None."""
    found = sorted((out / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    return str(found[-1]) if found else None


def _be_quiet() -> None:
    """Leave the console to the run's own lines: no banners, no bars for every file and map."""
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    for name, value in {
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
