"""Runs side by side: what is one arm, what arms are called, and what is said of them."""

from __future__ import annotations

from io import BytesIO

import pytest
from PIL import Image
from typer.testing import CliRunner

from webagent_core.cli import app
from webagent_core.report.comparison import arms, comparison_rows, plot_comparison
from webagent_core.report.run_directory import RunDirectory


def make_run(path, seed: int, after: float, updates: int = 6, **settings) -> RunDirectory:
    run = RunDirectory(path)
    leaves = {"group_size": 4, "temperature": 1.0} | settings
    run.write_config(
        {
            "type": "arpo",
            "preset": "paper",
            "profile": None,
            "rollout": {name: {"value": value, "from": "ours"} for name, value in leaves.items()},
            "train": {"seed": {"value": seed, "from": "ours"}},
        }
    )
    run.log_metrics({"update": 0, "phase": "before", "success": 0.5, "episodes": 40})
    for update in range(1, updates + 1):
        share = 0.5 + (after - 0.5) * update / updates
        run.log_metrics({"update": update, "phase": "train", "success": share, "steps": 3.0, "failed_steps": 4.0})
    run.log_metrics({"update": updates, "phase": "after", "success": after, "episodes": 40})
    return run


def test_seeds_of_one_setting_are_one_arm_named_by_what_differs(tmp_path):
    runs = [make_run(tmp_path / f"on{seed}", seed, 0.8 + 0.1 * seed) for seed in (1, 0)]
    runs.append(make_run(tmp_path / "off", 0, 0.6, group_size=8))
    first, second = arms(runs)
    assert (first.label, first.seeds) == ("group_size=4", [0, 1])
    assert (second.label, second.seeds) == ("group_size=8", [0])
    assert comparison_rows([first, second]) == [
        ("group_size=4", "0, 1", "0.50 0.50", "0.80 0.90", "+0.35 (+0.30 to +0.40)"),
        ("group_size=8", "0", "0.50", "0.60", "+0.10"),
    ]


def test_a_setting_that_only_one_of_them_has_tells_them_apart(tmp_path):
    runs = [make_run(tmp_path / "a", 0, 0.8), make_run(tmp_path / "b", 0, 0.8, replay=False)]
    assert [arm.label for arm in arms(runs)] == ["replay=None", "replay=False"]


def test_a_run_that_is_not_over_has_no_rise(tmp_path):
    run = make_run(tmp_path / "a", 0, 0.8)
    run.truncate_after(3)  # leaves no evaluation after
    assert comparison_rows(arms([run])) == [("arpo, paper", "0", "0.50", "-", "-")]


def test_the_picture_has_a_colour_for_each_arm(tmp_path):
    runs = [make_run(tmp_path / "a", 0, 0.8), make_run(tmp_path / "b", 0, 0.9, group_size=8)]
    pictures = []
    for shown in (runs[:1], runs):
        file = BytesIO()
        plot_comparison(arms(shown), file)
        with Image.open(file) as picture:
            pictures.append({colour for _, colour in picture.convert("RGB").getcolors(1 << 20)})
    blue, orange = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)
    assert blue in pictures[0] and orange not in pictures[0]
    assert {blue, orange} <= pictures[1]


def test_the_command_prints_the_table_and_writes_the_picture(tmp_path):
    make_run(tmp_path / "a", 0, 0.8)
    said = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), "--out", str(tmp_path / "c.png")])
    assert said.exit_code == 0, said.output
    assert "+0.30" in said.output
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path, there):
    if there:
        (tmp_path / "metrics.jsonl").write_text("")  # but no settings
    said = CliRunner().invoke(app, ["compare", str(tmp_path), "--out", str(tmp_path / "c.png")])
    assert said.exit_code == 1
    assert "is not a run" in said.output
