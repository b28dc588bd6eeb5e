"""The command line that every recipe's training script has, whatever trainer is behind it.

Checks all it can before a browser, a model or a heavy import starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from webagent_core.browser.chromium import find_chromium
from webagent_core.cli import override
from webagent_core.policy.smollm2 import check_installed
from webagent_core.recipe import Recipe, find_recipe, layers_of, load_recipe, refuse_unknown
from webagent_core.rewards.for_recipe import check_rewards
from webagent_core.tasks.demonstrations import check_demonstrated
from webagent_core.tasks.lookup import check_tasks
from webagent_core.tasks.targets import check_shown

# The whole walk, small: for tests, and for a first look at whether everything is in place. Under three minutes on two
# cores. A recipe takes of it what it has.
SMOKE = {
    "rollout.groups_per_update": 2,
    "rollout.group_size": 4,
    "train.updates": 2,
    "train.eval_episodes": 1,
    "policy.warm_up.demonstrations": 30,
    "policy.warm_up.steps": 20,
    "sampling.candidate_tasks": 4,
    "sampling.task_trials": 4,
    "sampling.training_steps": 24,
    "search.threshold": 0.02,  # no attempt of so small a search may succeed; ranking alone makes pairs then
}
NO_SIGNAL = 3  # exit code of a run that ended because no task gives signal any more
EPILOG = (
    "Exit codes: 0 done; 1 refused, interrupted or broken, with the reason on standard error;"
    f" {NO_SIGNAL} ended early because no task gives signal any more, with checkpoint and report written."
)


def parser(recipe_name: str, trainer: str) -> argparse.ArgumentParser:
    """The arguments; `trainer` ("trl", "verl") is for the help text and the run's name."""
    parser = argparse.ArgumentParser(description=f"Train the recipe {recipe_name} with {trainer}.", epilog=EPILOG)
    parser.add_argument("--preset", default="paper", help="paper (default) or released: where paper and code differ")
    parser.add_argument(
        "--profile", default="embedded", help="numbers for a machine; embedded (default): two CPU cores"
    )
    parser.add_argument("--seed", type=int, default=0, help="fixes tasks, pages, warm-up, sampling and training")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    parser.add_argument("--name", help="name of the run (default: <recipe>-<preset>-seed<seed>)")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/<name>)")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="the whole walk, real pages included, in under three minutes; it learns next to nothing. Sets (--set still"
        f" wins, and a recipe takes what it has): {', '.join(f'{name}={value}' for name, value in SMOKE.items())}",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved settings and their sources, and stop"
    )
    return parser


def run_folder(recipe_name: str, trainer: str, arguments: argparse.Namespace) -> Path:
    """Where the run goes: --out, else runs/ and its --name, else a name made of what it is."""
    parts = [recipe_name, *([] if trainer == "trl" else [trainer]), arguments.preset, f"seed{arguments.seed}"]
    return arguments.out or Path("runs") / (arguments.name or "-".join(parts + ["smoke"] * arguments.smoke))


def overrides_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that the arguments change. Raises ValueError for one that cannot be read."""
    changed: dict[str, Any] = {"train.seed": arguments.seed}
    if arguments.smoke:
        shipped = layers_of(find_recipe(arguments.recipe_folder))[0]
        changed |= {name: value for name, value in SMOKE.items() if _has(shipped, name)}
    return changed | dict(map(override, arguments.set))


def _has(shipped: dict[str, Any], setting: str) -> bool:
    try:
        refuse_unknown(shipped, "", "", setting)
    except ValueError:
        return False
    return True


def checked_recipe(recipe_folder: Path, arguments: argparse.Namespace, checkpoint: object) -> Recipe:
    """The recipe, with everything checked that can be checked cheaply; `checkpoint` is what --resume would go on from.

    Raises ValueError or FileNotFoundError whose message names the field, its value and what is allowed.
    """
    recipe = load_recipe(recipe_folder, arguments.preset, arguments.profile, overrides_of(arguments))
    pictures = recipe.context is not None and recipe.context.observation == "screenshot"
    if recipe.policy.model == ("tiny" if pictures else "tiny_vision"):
        observation = recipe.context.observation if recipe.context else "text"
        raise ValueError(
            f"policy.model = {recipe.policy.model!r} is not allowed with context.observation = {observation!r}: "
            "tiny reads text, tiny_vision sees screenshots"
        )
    check_taught = check_shown if pictures else check_demonstrated
    check_tasks(recipe)
    for name in recipe.tasks.names if recipe.policy.warm_up else ():
        check_taught(name)
    if recipe.rollout.temperature == 0:
        raise ValueError("rollout.temperature = 0: allowed are numbers > 0, or all attempts at a task would be equal")
    _check_model("policy.model", recipe.policy.model)
    if recipe.policy.reference is not None:
        _check_model("policy.reference", recipe.policy.reference)
    check_rewards(recipe)
    if arguments.resume and not checkpoint:
        raise FileNotFoundError(f"--resume: {arguments.out} holds no checkpoint to go on from")
    if not arguments.resume and (arguments.out / "metrics.jsonl").exists():
        raise ValueError(
            f"--out {arguments.out}: this run exists; go on with --resume, or give another --name or --out"
        )
    if not recipe.tasks.server:
        find_chromium()
    return recipe


def _check_model(setting: str, name: str | None) -> None:
    """Raise FileNotFoundError, naming the setting, unless `name` is a tiny policy, a model's folder or one on the hub.

    Raises ModuleNotFoundError for smollm2 where its package is missing."""
    if name == "smollm2":
        return check_installed()
    if name in ("tiny", "tiny_vision") or (name and (Path(name) / "config.json").is_file()):
        return
    allowed = "tiny, tiny_vision, smollm2, a folder with a config.json, the name of a model on the hub"
    if name and not Path(name).exists():
        from huggingface_hub import HfApi, constants

        try:
            if not constants.HF_HUB_OFFLINE and HfApi().model_info(name, timeout=10):
                return
        except Exception as error:  # whatever the hub or the way to it answers, the user's remedy is the same
            allowed += f" (it answers {type(error).__name__})"
    raise FileNotFoundError(f"{setting} = {name!r}: no such model; allowed are {allowed}")
