"""The `webagent` command: look at recipes, check settings, list tasks, remake reports, see what is installed.

Training is not here: a recipe's train_trl.py does that. Whatever is heavy is imported by the command that needs it, so
that `webagent --help` answers at once. Every error is one line on standard error: exit code 2 for a command line that
cannot be read, 1 for everything else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from rich.console import Console
    from rich.table import Table

# Kind of method, in a few words; `webagent ls` shows them.
METHODS = {
    "agentq": "tree search, DPO on its pairs",
    "arpo": "GRPO with replay of successes",
    "asyncwebrl": "GRPO on stale data",
    "hiconagent": "GRPO on recorded single steps",
    "openwebrl": "GRPO over turns, asymmetric clip",
    "uitars": "DPO on corrected steps",
    "uitars2": "PPO with a pretrained critic",
    "webagent_r1": "multi-turn GRPO on page text",
    "webgym": "imitation of own successes",
    "webrl": "regression to advantages",
    "zerogui": "GRPO with a voting judge",
}


def fail(message: object) -> NoReturn:
    print("error: " + " ".join(str(message).split()), file=sys.stderr)
    raise typer.Exit(1)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a user can have got wrong ends in a line; anything else is a bug and keeps its traceback."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail(error)


class OneLineUsage(TyperGroup):
    """typer's group, with a usage error in one line instead of a box of five."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except Exception as error:
            # typer 0.29 has click built in and older ones import it, so its errors are known by what they can do.
            if not hasattr(error, "format_message"):
                raise
            where = error.ctx.command_path if getattr(error, "ctx", None) else "webagent"
            print(f"error: {' '.join(error.format_message().split())} See: {where} --help", file=sys.stderr)
            code = error.exit_code
        if not standalone_mode:
            return code
        sys.exit(code or 0)


app = typer.Typer(
    cls=OneLineUsage,
    help="Recipes of web-agent papers: look, check, copy; tasks, reports, and what is installed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"  # is there in a clone
INSTALL = f"-e '{PYPROJECT.parent}[EXTRA]'" if PYPROJECT.is_file() else "'webagent-rl[EXTRA]'"

RecipeName = Annotated[str, typer.Argument(help="A shipped recipe, a recipe.yaml, or a folder with one.")]


@app.callback()
def help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# ---------------------------------------------------------------------------------------------------------- recipes


@app.command()
def ls() -> None:
    """List the recipes: paper, kind of method, presets, profiles, and the training script if it has one."""
    from webagent_core.recipe import read_yaml, shipped_recipes

    table = make_table("recipe", "paper", "method", "presets", "profiles", "training")
    with one_line_errors():
        for name, path in shipped_recipes().items():
            content = read_yaml(path)
            paper = content["paper"].partition("),")[0].removesuffix(")") + ")"  # without the section
            scripts = sorted(script.name for script in path.parent.glob("train_*"))
            table.add_row(
                name,
                paper,
                METHODS[name],
                ", ".join(presets(content)),
                ", ".join(content.get("profiles", {})) or "-",
                ", ".join(scripts) or "-",
            )
    console().print(table)


def presets(content: Mapping[str, Any]) -> list[str]:
    """Preset "released" is there where the authors' code is public, which the objective's numbers then say."""
    cells = content["objective"].values()
    return ["paper", "released"] if any(isinstance(cell, dict) and "released" in cell for cell in cells) else ["paper"]


@app.command()
def validate(
    recipe: RecipeName,
    preset: Annotated[str, typer.Option(help="paper, or released: where paper and code differ.")] = "paper",
    profile: Annotated[
        str | None, typer.Option(help="Numbers for a machine, e.g. embedded. Without: the recipe's own.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeat it for more."),
    ] = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the settings as YAML, without their sources.")] = False,
) -> None:
    """Check a recipe and print every setting with its value and where the value comes from."""
    with one_line_errors():
        from webagent_core.recipe import load_recipe
        from webagent_core.tasks.miniwob import PREFIX, check_name

        loaded = load_recipe(recipe, preset, profile, dict(map(override, set_ or [])))
        for name in loaded.tasks.names:
            if name.startswith(PREFIX):
                check_name(name)
    settings = loaded.resolved()
    if as_yaml:
        print_yaml(settings)
    else:
        print_settings(settings)


def override(text: str) -> tuple[str, Any]:
    """("rollout.group_size", 8) of "rollout.group_size=8"; the value is read as a recipe file's would be."""
    import yaml

    from webagent_core.recipe import Loader

    setting, equals, value = text.partition("=")
    if not equals or not setting:
        raise ValueError(f"--set {text!r}: allowed is SECTION.KEY=VALUE, e.g. rollout.group_size=8")
    try:
        return setting, yaml.load(value, Loader)
    except yaml.YAMLError:
        raise ValueError(f"--set {text!r}: the value is not readable as YAML") from None


def print_yaml(settings: Mapping[str, Any]) -> None:
    """The settings as a recipe file: it loads again, to the same values."""
    import yaml

    from webagent_core.report.run_directory import settings_in

    plain: dict[str, Any] = {"type": settings["type"]}
    for path, value, source in settings_in(settings):
        if source is None:  # type, preset, profile
            continue
        section, *inner, last = path
        place = plain.setdefault(section, {})
        for part in inner:
            place = place.setdefault(part, {})
        place[last] = value
    print(f"# {title(settings)}")
    print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120), end="")


def print_settings(settings: Mapping[str, Any]) -> None:
    from collections import Counter

    from webagent_core.report.run_directory import settings_in

    colour = {"paper": "green", "released": "cyan", "ours": "", "override": "bold yellow"}
    table, sources, section = make_table("setting", "value", "from"), Counter(), None
    table.columns[1].max_width = 80
    for path, value, source in settings_in(settings):
        if source is None:  # type, preset, profile
            continue
        if section not in (None, path[0]):
            table.add_section()
        section = path[0]
        sources[source] += 1
        table.add_row(".".join(path), shown(value), source, style=colour[source])
    console().print(title(settings), style="bold")
    console().print(table)
    counts = ", ".join(f"{sources[source]} {source}" for source in colour if sources[source])
    console().print(f"valid: {sources.total()} settings ({counts})")


def title(settings: Mapping[str, Any]) -> str:
    return f"{settings['type']}, preset {settings['preset']}, profile {settings['profile'] or 'none'}"


def shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@app.command()
def cp(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe.")],
    folder: Annotated[Path, typer.Argument(help="Where the copy goes; must not exist yet.")],
) -> None:
    """Copy a recipe's folder out, to edit it."""
    import shutil

    from webagent_core.recipe import shipped_recipes

    with one_line_errors():
        shipped = shipped_recipes()
        if recipe not in shipped:
            raise ValueError(f"recipe = {recipe!r} is not known; there are {', '.join(shipped)}")
        if folder.exists() or folder.is_symlink():
            raise ValueError(f"folder = {str(folder)!r} is not allowed: it exists, and is not overwritten")
        shutil.copytree(shipped[recipe].parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"{recipe} is copied to {folder}; check what you edit with: webagent validate {folder}")


# ---------------------------------------------------------------------------------------------------- tasks and runs


@app.command()
def tasks(pattern: Annotated[str, typer.Argument(help="Only names like this, e.g. 'click-*'.")] = "*") -> None:
    """List the tasks; marked are those that can be demonstrated, are not the same twice, or need more settings."""
    from collections import Counter
    from fnmatch import fnmatchcase

    with one_line_errors():
        from webagent_core.tasks.demonstrations import DEMONSTRATED
        from webagent_core.tasks.lookup import NAME, known_tasks
        from webagent_core.tasks.miniwob import NOT_REPRODUCIBLE, PREFIX

        names = known_tasks()
        found = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n.removeprefix(PREFIX), pattern)]
        if not found:
            raise ValueError(f"pattern = {pattern!r} matches none of the {len(names)} tasks; 'click-*' matches some")
    marks = dict.fromkeys(DEMONSTRATED, "demonstrator") | {NAME: "needs tasks.sites"}
    marks |= {PREFIX + page: "not reproducible" for page in NOT_REPRODUCIBLE}
    for name in found:
        print(f"{name:38}  {marks.get(name, '')}".rstrip())
    counts = Counter(marks.get(name) for name in found)
    counted = f"{counts['demonstrator']} with a demonstrator, {counts['not reproducible']} not reproducible"
    print(f"{len(found)} tasks, {counted}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/webagent_r1-paper-seed0.")]) -> None:
    """Make learning_curve.png and report.html of a run again, finished or not."""
    if not (run / "metrics.jsonl").is_file():
        fail(f"run = {str(run)!r} is not a run: a folder with metrics.jsonl is")
    with one_line_errors():
        from webagent_core.report.run_directory import RunDirectory
        from webagent_core.report.viewer import make_report

        curve, page = make_report(RunDirectory(run))
    print(curve)
    print(page)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; seeds of one setting are one line.")],
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("comparison.png"),
) -> None:
    """Set runs side by side: success before and after, seed by seed, and a picture of their learning curves."""
    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            fail(f"run = {str(run)!r} is not a run: a folder with metrics.jsonl is")
    with one_line_errors():
        from webagent_core.report.comparison import arms, comparison_rows, plot_comparison
        from webagent_core.report.run_directory import RunDirectory

        compared = arms(map(RunDirectory, runs))
        plot_comparison(compared, out)
    table = make_table("runs", "seeds", "before", "after", "rise")
    for row in comparison_rows(compared):
        table.add_row(*row)
    console().print(table)
    print(out)


# ------------------------------------------------------------------------------------------------------------ doctor


@app.command()
def doctor() -> None:
    """Show what is installed, what each extra lacks, and what verl sees of this package.

    Exit code 1 if a core dependency, Chromium or, where verl is installed, something of ours in verl is missing.
    """
    import platform

    from rich.text import Text

    with one_line_errors():
        needs = requirements()
    table = make_table("for", "package", "installed", "needed", "")
    lacking: dict[str, list[str]] = {}
    for group, required in needs.items():
        for requirement in required:
            installed, state = look_at(requirement)
            if state != "ok":
                lacking.setdefault(group, []).append(requirement.name)
            needed = ",".join(sorted(map(str, requirement.specifier), reverse=True))  # the lower bound first
            colour = "green" if state == "ok" else "red" if group == "core" else "yellow"
            table.add_row(group, requirement.name, installed, needed or "any", Text(state, style=colour))
        table.add_section()
    path, browser = chromium()

    say = console().print
    say(f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}")
    say(table)
    if path:
        say(f"Chromium: {browser} ({path})")
    for extra in [group for group in needs if group != "core"]:
        say(f"extra {extra} lacks {', '.join(lacking[extra])}" if extra in lacking else f"extra {extra} is complete")
    if set(lacking) - {"core"}:
        say(f"an extra is installed with: pip install {INSTALL}")
    problems = [] if path else [browser]
    if "core" in lacking:
        problems.append(f"core dependencies missing or of another version: {', '.join(lacking['core'])}")
    if "verl" in needs and not problems:  # it takes verl half a minute to answer, and it needs all of the above
        problems += verl_problems()
    if problems:
        fail("; ".join(problems))
    say("what every recipe needs is there", style="green")


def verl_problems() -> list[str]:
    """Show what verl and its workers have of this package, where verl is installed; returns what is broken."""
    import json
    import subprocess
    from importlib.util import find_spec

    if find_spec("verl") is None:
        console().print("verl is not installed: how it sees this package is not checked")
        return []
    # In a process of its own: this package's core never imports verl.
    done = subprocess.run(
        [sys.executable, "-m", "verl_webagent.doctor", "--json"], capture_output=True, text=True, timeout=600
    )
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return [f"verl cannot be asked: {lines[-1]}"]
    from rich.text import Text

    table = make_table("in verl", "name", "driver", "worker", "")
    for part in report["table"]:
        states = [
            Text(state, style={"ok": "green", "-": ""}.get(state, "red")) for state in (part["driver"], part["worker"])
        ]
        table.add_row(part["kind"], part["name"], *states, part["reason"])
    console().print(table)
    return report["problems"]


def look_at(requirement: Requirement) -> tuple[str, str]:
    """(version installed or "-", "ok", "missing" or "another version")."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return "-", "missing"
    return installed, "ok" if requirement.specifier.contains(installed, prereleases=True) else "another version"


def requirements() -> dict[str, list[Requirement]]:
    """What "core" and each extra ask for: a clone's pyproject.toml as it is now, else the installed metadata."""
    import tomllib
    from importlib.metadata import PackageNotFoundError, metadata

    from packaging.requirements import Requirement  # transformers, a core dependency, is what brings it

    if PYPROJECT.is_file():
        project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
        lines = {"core": project["dependencies"]} | project["optional-dependencies"]
        return {group: [Requirement(line) for line in part] for group, part in lines.items()}
    try:
        installed = metadata("webagent-rl")
    except PackageNotFoundError:
        raise ValueError("webagent-rl is not installed: pip install webagent-rl") from None
    extras = installed.get_all("Provides-Extra") or []
    needs: dict[str, list[Requirement]] = {group: [] for group in ("core", *extras)}
    for line in installed.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        marker = requirement.marker
        group = "core" if marker is None or marker.evaluate({"extra": ""}) else None
        group = group or next((extra for extra in extras if marker.evaluate({"extra": extra})), None)
        if group:
            needs[group].append(requirement)
    return needs


def chromium() -> tuple[str | None, str]:
    """Path of the Chromium that would be driven and what it says its version is; or None and what is wrong."""
    import subprocess

    from webagent_core.browser.chromium import ChromiumNotFound, find_chromium

    try:
        path = find_chromium()
        said = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=30)
    except ChromiumNotFound as error:
        return None, str(error)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"Chromium does not start: {error}"
    if said.returncode:
        return None, f"Chromium does not start: {path} --version ends with {said.returncode} {said.stderr[-200:]}"
    return path, said.stdout.strip()


# ------------------------------------------------------------------------------------------------------------ output


def console() -> Console:
    """As wide as the terminal; in a pipe or a file as wide as the lines are, so that nothing is cut or folded."""
    from rich.console import Console

    on_terminal = sys.stdout.isatty()
    return Console(highlight=False, markup=False, width=None if on_terminal else 1000, soft_wrap=not on_terminal)


def make_table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


if __name__ == "__main__":
    app()
