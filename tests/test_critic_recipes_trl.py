"""The TRL scripts of the recipes with a critic, on real pages, small."""

from __future__ import annotations

import pytest
from test_recipes_trl import NAMES, cache, played, run, trained

__all__ = ["cache"]  # a fixture of this module too


@pytest.mark.slow
def test_uitars2_trains_its_critic_first_and_tells_tokens_apart(tmp_path, cache):
    out = tmp_path / "run"
    done = run("uitars2", out, cache, rollout__temperature=1.3, tasks__names=NAMES, objective__pretrain_updates=1)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = trained(out)
    assert (first["loss"], first["rows"]) == (0, 0) and second["loss"] != 0 and second["rows"] > 0
    assert first["value_mean"] == 0 and second["value_mean"] != 0  # asked before the critic learned from the batch
    for update in (1, 2):
        assert all(len(t["advantage"]) == len(t["steps"]) for t in played(out, update) if t["valid"])
    assert list((out / "checkpoints").glob("*/critic.pt")) and (out / "report.html").is_file()


@pytest.mark.slow
def test_webrl_replays_and_makes_new_tasks_between_phases(tmp_path, cache):
    out = tmp_path / "run"
    phases = {"sampling__updates_per_phase": 1, "sampling__new_tasks_per_phase": 2}
    wide = {"sampling__replay_min_probability": 0.001, "sampling__replay_max_probability": 1.0}
    wide |= {"sampling__new_task_min_value": 0.0, "sampling__new_task_max_value": 1.0}
    done = run("webrl", out, cache, rollout__temperature=1.3, tasks__names=NAMES, **phases, **wide)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = trained(out)
    before, after = played(out, 1), played(out, 2)
    outcomes: dict[str, list[bool]] = {}
    for trajectory in before:
        outcomes.setdefault(trajectory["group"], []).append(trajectory["success"])
    failed = [group for group, of_group in outcomes.items() if not any(of_group)]
    assert "new_tasks/joined" not in first and second["new_tasks/joined"] == (2 if failed else 0)
    stored = [sum(t["success"] for t in trajectories) for trajectories in (before, before + after)]
    assert [line["replay/stored"] for line in (first, second)] == stored
    assert first["replay/rows"] == 0 and (second["replay/rows"] > 0) == (stored[0] > 0)
    new = sum(len(t["steps"]) for t in after if t["valid"])
    assert second["rows"] == new + second["replay/rows"] <= 3 * new
