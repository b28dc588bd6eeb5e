"""Command line of a recipe's train_trl.py: see webagent_core/command_line.py."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from webagent_core.command_line import checked_recipe, parser, run_folder


def main(recipe_folder: Path, argv: list[str] | None = None) -> None:
    """Run the recipe in `recipe_folder`; a bad argument or setting ends with one line on standard error."""
    known = parser(recipe_folder.name, "TRL")
    known.add_argument("--report-to", default="none", help="where TRL logs as well, e.g. tensorboard or wandb")
    arguments = known.parse_args(argv)
    arguments.out = run_folder(recipe_folder.name, "trl", arguments)
    try:
        recipe = checked_recipe(recipe_folder, arguments, last_checkpoint(arguments.out))
    except (ValueError, FileNotFoundError, ModuleNotFoundError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    if arguments.dry_run:
        print(yaml.safe_dump(recipe.resolved(), sort_keys=False, allow_unicode=True, width=120), end="")
        return
    from trl_webagent.console import be_quiet
    from trl_webagent.run import Run

    be_quiet()

    try:
        Run(recipe, arguments.out, arguments.resume, arguments.report_to).go()
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted: what was done is in {arguments.out}; --resume goes on from its last checkpoint")


def last_checkpoint(out: Path) -> str | None:
    """Folder of the newest checkpoint of the run in `out`, or None."""
    found = sorted((out / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))
    return str(found[-1]) if found else None
