"""A recipe's script with --smoke, as a user first runs it. For the tests of both backends, which are two files so that
they run at the same time."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs here keep and find their warmed-up policy."""
    return tmp_path_factory.mktemp("cache")


def run_small(command: list[str], script: Path, out: Path, cache: Path, *arguments: str) -> list[dict]:
    """The script to its end: every loss a number, the policy measured before and after, and the report.

    Returns the metrics of its updates."""
    environment = os.environ | {"WEBAGENT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(script), "--smoke", "--out", str(out), *arguments],
        env=environment, cwd=out.parent, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert "success on held-out seeds" in done.stdout.splitlines()[-1]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["phase"] == "before" and lines[-1]["phase"] == "after"
    trained = [line for line in lines if line["phase"] == "train"]
    assert trained
    assert all(math.isfinite(line.get("loss", 0.0)) for line in trained)
    assert (out / "report.html").is_file() and (out / "learning_curve.png").is_file()
    return trained
