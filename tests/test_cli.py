"""The `webagent` command, as a user types it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from webagent_core.cli import METHODS, app, presets
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.objectives import OBJECTIVES
from webagent_core.recipe import load_recipe, read_yaml, shipped_recipes
from webagent_core.report.run_directory import RunDirectory
from webagent_core.tasks.demonstrations import DEMONSTRATED
from webagent_core.tasks.lookup import known_tasks
from webagent_core.tasks.miniwob import NOT_REPRODUCIBLE, all_tasks

ROOT = Path(__file__).resolve().parents[1]


def webagent(*arguments: str, environment: dict[str, str] | None = None):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"} | (environment or {}))


def output(*arguments: str) -> str:
    result = webagent(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def error(*arguments: str, code: int = 1) -> str:
    """The one line on standard error that a bad command line ends with."""
    result = webagent(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


# ---------------------------------------------------------------------------------------------------------- start


def test_help_comes_without_the_heavy_libraries():
    code = """
import sys
from webagent_core.cli import app
try:
    app(["--help"])
except SystemExit as end:
    assert end.code == 0
heavy = {"torch", "transformers", "trl", "verl", "ray", "matplotlib", "playwright", "pydantic", "yaml", "aiohttp"}
print("HEAVY", sorted(heavy & set(sys.modules)))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    for command in ("ls", "validate", "cp", "tasks", "report", "doctor"):
        assert f" {command} " in done.stdout


def test_no_command_shows_the_help():
    assert "Usage:" in output() and "doctor" in output()


def test_a_usage_error_is_one_line_with_exit_code_2():
    assert "'lss'" in error("lss", code=2)
    assert "recipe" in error("validate", code=2).lower()
    assert "--nope" in error("validate", "webgym", "--nope", code=2)
    assert "--preset" in error("validate", "webgym", "--preset", code=2)


# ------------------------------------------------------------------------------------------------------------- ls


def test_ls_has_a_line_for_every_recipe():
    lines = {line.split()[0]: line for line in output("ls").splitlines() if line.strip()}
    shipped = shipped_recipes()
    assert set(shipped) == set(METHODS) == set(OBJECTIVES)
    for name, path in shipped.items():
        assert METHODS[name] in lines[name]
        assert ("released" in lines[name]) == (OBJECTIVES[name].released is not None)
        assert ("train_trl.py" in lines[name]) == (path.parent / "train_trl.py").exists()
    assert "WebAgent-R1 (EMNLP 2025) " in lines["webagent_r1"] and "embedded" in lines["webagent_r1"]
    assert "section" not in lines["webagent_r1"]


def test_the_presets_shown_are_those_that_load():
    for name, path in shipped_recipes().items():
        for preset in ("paper", "released"):
            if preset in presets(read_yaml(path)):
                assert load_recipe(name, preset, None).preset == preset
            else:
                with pytest.raises(ValueError, match="released"):
                    load_recipe(name, preset, None)


# ------------------------------------------------------------------------------------------------------- validate


def rows(text: str) -> dict[str, tuple[str, str]]:
    """setting -> (value, source) of the table that validate prints."""
    cells = [line.split() for line in text.splitlines()]
    return {c[0]: (" ".join(c[1:-1]), c[-1]) for c in cells if len(c) >= 3 and "." in c[0]}


def test_validate_shows_each_setting_with_its_source():
    shown = rows(output("validate", "webagent_r1"))
    assert shown["objective.beta"] == ("0.001", "paper")
    assert shown["rollout.group_size"] == ("4", "released")
    assert shown["train.learning_rate"] == ("1e-06", "paper")
    assert shown["policy.lora"] == ("null", "ours")
    assert shown["tasks.names"] == ("webarena-lite", "paper")


def test_validate_takes_preset_profile_and_overrides():
    text = output(
        "validate", "webagent_r1", "--preset", "released", "--profile", "embedded",
        "--set", "train.learning_rate=2e-5", "--set", "tasks.names=[miniwob/click-test, miniwob/use-slider]",
    )  # fmt: skip
    shown = rows(text)
    assert "webagent_r1, preset released, profile embedded" in text
    assert shown["objective.adv_eps"] == ("0.0001", "released")
    assert shown["policy.model"] == ("tiny", "ours")
    assert shown["train.learning_rate"] == ("2e-05", "override")
    assert shown["tasks.names"] == ("miniwob/click-test, miniwob/use-slider", "override")
    assert "2 override)" in text


def test_a_text_that_looks_like_markup_is_shown_as_it_is(tmp_path):
    shown = rows(output("validate", "webgym", "--set", "policy.model='[red]/models/[b]'"))
    assert shown["policy.model"] == ("[red]/models/[b]", "override")


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_yaml_of_validate_is_a_recipe_with_the_same_settings(name, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(output("validate", name, "--yaml", "--set", "train.updates=7"))
    again, first = load_recipe(file, profile=None), load_recipe(name, "paper", None, {"train.updates": 7})
    assert again.model_dump(exclude={"provenance"}) | {"objective": again.load_objective().model_dump()} == (
        first.model_dump(exclude={"provenance"}) | {"objective": first.load_objective().model_dump()}
    )
    assert yaml.safe_load(file.read_text())["train"]["updates"] == 7


def test_validate_takes_a_file_and_a_folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text("type: openwebrl\nrollout: {group_size: 6}\n")
    for place in (tmp_path, tmp_path / "recipe.yaml"):
        shown = rows(output("validate", str(place)))
        assert shown["rollout.group_size"] == ("6", "ours")
        assert shown["objective.eps_high"] == ("0.28", "paper")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], ["recipe = 'nope'", "webagent_r1"]),
        (["webgym", "--preset", "papers"], ["preset = 'papers'", "paper, released"]),
        (["uitars", "--preset", "released"], ["released", "uitars"]),
        (["webagent_r1", "--profile", "laptop"], ["profile = 'laptop'", "embedded"]),
        (["agentq", "--profile", "laptop"], ["profile = 'laptop'", "there are embedded"]),
        (["webgym", "--set", "train.lr=1"], ["unknown key", "train.lr", "learning_rate"]),
        (["webgym", "--set", "trian.updates=1"], ["unknown key", "trian.updates", "train"]),
        (["webgym", "--set", "rollout.group_size=1"], ["rollout.group_size = 1", ">= 2"]),
        (["webgym", "--set", "rollout.max_steps=0"], ["rollout.max_steps = 0", ">= 1"]),
        (["webgym", "--set", "train.learning_rate=fast"], ["train.learning_rate = 'fast'", "a number > 0"]),
        (["webgym", "--set", "train.updates"], ["'train.updates'", "SECTION.KEY=VALUE"]),
        (["webgym", "--set", "train.updates=[1"], ["'train.updates=[1'", "YAML"]),
        (["openwebrl", "--set", "objective.eps_low=1.5"], ["eps_low = 1.5", "< 1"]),
        (["webagent_r1", "--set", "tasks.names=[miniwob/clik-button]"], ["miniwob/clik-button", "click-button"]),
    ],
)
def test_validate_refuses_in_one_line_that_names_field_value_and_what_is_allowed(arguments, said):
    line = error("validate", *arguments)
    for word in said:
        assert word in line


def test_validate_refuses_a_broken_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("type: [webgym\n")
    assert str(file) in error("validate", str(file))
    file.write_text("rollout: {group_size: 4}\n")
    assert "type = None" in error("validate", str(file))


# -------------------------------------------------------------------------------------------------------------- cp


def test_a_copied_recipe_is_whole_and_validates(tmp_path):
    folder = tmp_path / "new" / "mine"
    assert str(folder) in output("cp", "webagent_r1", str(folder))
    original = shipped_recipes()["webagent_r1"].parent
    files = {path.name for path in original.iterdir() if path.name != "__pycache__"}
    assert {path.name for path in folder.iterdir()} == files
    for name in files:
        assert (folder / name).read_bytes() == (original / name).read_bytes()
    edited = (folder / "recipe.yaml").read_text().replace("beta: {paper: 0.001,", "beta: {paper: 0.25,")
    (folder / "recipe.yaml").write_text(edited)
    assert rows(output("validate", str(folder)))["objective.beta"] == ("0.25", "paper")


def test_cp_overwrites_nothing(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for target in (taken, tmp_path, tmp_path / "dangling"):
        assert f"folder = {str(target)!r}" in error("cp", "webgym", str(target))
    assert taken.read_text() == "precious" and not (tmp_path / "nowhere").exists()
    assert str(taken / "below") in error("cp", "webgym", str(taken / "below"))


def test_cp_knows_only_shipped_recipes(tmp_path):
    assert "recipe = 'nope' is not known; there are agentq, arpo" in error("cp", "nope", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


# ----------------------------------------------------------------------------------------------------------- tasks


def test_tasks_lists_all_with_their_marks():
    *lines, counted = output("tasks").splitlines()
    marks = {line.split()[0]: line.split(maxsplit=1)[1:] for line in lines}
    assert list(marks) == known_tasks() and [*marks][:130] == sorted(all_tasks())
    assert {name.partition("/")[0] for name in [*marks][130:]} == {"shop", "tracker", "webarena"}
    assert {name for name, mark in marks.items() if mark == ["demonstrator"]} == set(DEMONSTRATED)
    moving = {f"miniwob/{page}" for page in NOT_REPRODUCIBLE}
    assert {name for name, mark in marks.items() if mark == ["not reproducible"]} == moving
    shown = f"{len(marks)} tasks, {len(DEMONSTRATED)} with a demonstrator, {len(NOT_REPRODUCIBLE)} not "
    assert counted.startswith(shown)


def test_tasks_takes_a_pattern_with_and_without_the_prefix():
    expected = [name for name in sorted(all_tasks()) if name.startswith("miniwob/click-tab")]
    for pattern in ("click-tab*", "miniwob/click-tab*"):
        assert [line.split()[0] for line in output("tasks", pattern).splitlines()[:-1]] == expected
    assert len(expected) > 1


def test_a_pattern_that_matches_nothing_is_an_error():
    assert "pattern = 'clik*'" in error("tasks", "clik*")


# ---------------------------------------------------------------------------------------------------------- report


def test_report_remakes_both_files_of_a_run(tmp_path):
    run = RunDirectory(tmp_path / "my-run")
    page = "Submit 3 <button>"
    step = Step("http://x/", page, [{"role": "user", "content": page}], response="click(3)")
    episode = Trajectory("miniwob/click-test", 5, "g", "a goal to find", [step], ExitStatus.ANSWERED, reward=1.0)
    run.log_metrics({"update": 1, "phase": "train", "success": 1.0, "loss": 0.5, "exit_status/answered": 1})
    run.log_trajectories(1, "train", [episode], [0.0])
    (run.path / "report.html").write_text("old")
    said = output("report", str(run.path))
    assert (run.path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    page = (run.path / "report.html").read_text()
    assert "a goal to find" in page and "my-run" in page
    assert said.split() == [str(run.path / "learning_curve.png"), str(run.path / "report.html")]


def test_report_refuses_what_is_no_run_and_leaves_nothing(tmp_path):
    missing = tmp_path / "gone"
    assert f"run = {str(missing)!r}" in error("report", str(missing))
    assert "metrics.jsonl" in error("report", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_report_names_the_line_of_a_broken_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "phase": "train"}\nnonsense\n')
    assert "metrics.jsonl, line 2" in error("report", str(tmp_path))


# ---------------------------------------------------------------------------------------------------------- doctor


def test_doctor_shows_versions_chromium_and_what_each_extra_lacks():
    from importlib.metadata import PackageNotFoundError, version

    text = output("doctor")
    cells = {line.split()[1]: line for line in text.splitlines() if line.split()[:1] in (["core"], ["trl"], ["verl"])}
    for package in ("torch", "transformers", "playwright", "trl", "peft"):
        assert f" {version(package)} " in cells[package] and cells[package].rstrip().endswith("ok")
    try:
        assert version("verl") in cells["verl"]
    except PackageNotFoundError:
        assert cells["verl"].rstrip().endswith("missing") and "extra verl lacks verl, " in text
    assert "extra trl is complete" in text
    assert "Chromium: " in text


def test_doctor_fails_without_a_chromium_that_starts(tmp_path):
    for path, said in (
        (tmp_path / "no-chrome", "is not an executable file"),
        (shutil.which("false"), "does not start"),
    ):
        result = webagent("doctor", environment={"WEBAGENT_CHROMIUM": str(path)})
        assert result.exit_code == 1
        assert said in result.stderr and str(path) in result.stderr and result.stderr.count("\n") == 1
        assert "torch" in result.stdout


@pytest.fixture
def installed(tmp_path):
    """An installation as from a wheel: the package and its metadata, no pyproject.toml. Takes the lines of METADATA."""

    def install(*lines: str) -> subprocess.CompletedProcess:
        shutil.copytree(
            ROOT / "webagent_core", tmp_path / "webagent_core", ignore=shutil.ignore_patterns("__pycache__")
        )
        info = tmp_path / "webagent_rl-9.9.dist-info"
        info.mkdir()
        head = ("Metadata-Version: 2.4", "Name: webagent-rl", "Version: 9.9")
        (info / "METADATA").write_text("\n".join([*head, *lines, ""]))
        return subprocess.run(
            [sys.executable, "-m", "webagent_core.cli", "doctor"],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    return install


def test_doctor_of_an_installed_wheel_reads_its_metadata(installed):
    done = installed(
        "Provides-Extra: one", "Provides-Extra: two", "Requires-Dist: rich>=13",
        'Requires-Dist: no-such-package-here>=2; extra == "one"', 'Requires-Dist: typer; extra == "two"',
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "extra one lacks no-such-package-here" in done.stdout and "extra two is complete" in done.stdout
    assert "pip install 'webagent-rl[EXTRA]'" in done.stdout


def test_doctor_fails_where_a_core_dependency_is_missing_or_of_another_version(installed):
    done = installed("Requires-Dist: rich>=1000", "Requires-Dist: no-such-package-here", "Requires-Dist: typer")
    assert done.returncode == 1
    assert done.stderr == "error: core dependencies missing or of another version: rich, no-such-package-here\n"
    assert "another version" in done.stdout and "missing" in done.stdout
