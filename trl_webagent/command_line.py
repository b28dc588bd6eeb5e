"""Command line of a recipe's train_trl.py: see webagent_core/command_line.py."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from webagent_core.command_line import NO_SIGNAL, checked_recipe, parser, run_folder


def main(recipe_folder: Path, argv: list[str] | None = None) -> None:
    """Run the recipe in `recipe_folder`; a bad argument or setting ends with one line on standard error."""
    known = parser(recipe_folder.name, "TRL")
    known.add_argument("--report-to", default="none", help="where TRL logs as well, e.g. tensorboard or wandb")
    arguments = known.parse_args(argv)
    arguments.recipe_folder = recipe_folder
    arguments.out = run_folder(recipe_folder.name, "trl", arguments)
    try:
        recipe = checked_recipe(recipe_folder, arguments, last_checkpoint(arguments.out) or kept_pairs(arguments.out))
    except (ValueError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    if arguments.dry_run:
        print(yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True, width=120), end="")
        return
    from trl_webagent.console import be_quiet
    from webagent_core.sampling.filters import NoSignal

    if "pairs" in recipe.load_objective().inputs:
        from trl_webagent.preference_run import PreferenceRun as Run
    elif "responses" in recipe.load_objective().inputs:
        from trl_webagent.recorded_steps_run import RecordedStepsRun as Run
    else:
        from trl_webagent.run import Run

    be_quiet()

    try:
        run = Run(recipe, arguments.out, arguments.resume, arguments.report_to)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    try:
        run.go()
    except NoSignal as error:
        print(f"stopped: {error}. What was done is in {arguments.out}", file=sys.stderr)
        sys.exit(NO_SIGNAL)
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted: what was done is in {arguments.out}; --resume goes on from its last checkpoint")


def last_checkpoint(out: Path) -> str | None:
    """Folder of the newest checkpoint of the run in `out`, or None."""
    # What the trainer writes last into a checkpoint says that it is whole.
    whole = (state.parent for state in (out / "checkpoints").glob("checkpoint-*/trainer_state.json"))
    found = sorted(whole, key=lambda path: int(path.name.rsplit("-", 1)[1]))
    return str(found[-1]) if found else None


def kept_pairs(out: Path) -> Path | None:
    """A file of preference pairs that the run in `out` has gathered, or None."""
    return next((out / "rounds").glob("*/pairs.jsonl"), None)
