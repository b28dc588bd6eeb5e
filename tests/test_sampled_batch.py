"""The batch that a run's sampling asks for, filled by one process and by two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from trl_webagent.sampled_batch import SampledBatch, play_batch
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.recipe import load_recipe
from webagent_core.sampling.state import Sampling
from webagent_core.tasks.schedule import training_tasks
from webagent_core.tasks.task import Task

G = 4
SIZES = {"rollout.group_size": G, "rollout.groups_per_update": 6}


def play(tasks: Sequence[Task]) -> list[Trajectory]:
    """Groups whose seed is odd have signal."""
    played = [Trajectory(t.name, t.seed, t.group, exit_status=ExitStatus.ANSWERED) for t in tasks]
    for index, trajectory in enumerate(played):
        trajectory.reward = (1.0, 0.0, 0.0, 1.0)[index % G] if trajectory.seed % 2 else 0.0
    return played


def filtered(places: int, rank: int = 0, ranks: int = 1) -> tuple[SampledBatch, Sampling]:
    """This rank's share of the second batch of a run."""
    sampling = Sampling(load_recipe("openwebrl", overrides=SIZES))
    for _ in range(2):
        batch = play_batch(sampling, play, places=places, group_size=G, rank=rank, ranks=ranks)
    return batch, sampling


def test_a_filtered_batch_holds_whole_groups_with_signal_and_what_was_left_out_stands_beside_it():
    batch, _ = filtered(6 * G)
    assert len(batch.trajectories) == 6 * G and all(t.seed % 2 for t in batch.trajectories)
    assert list(Counter(t.group for t in batch.trajectories).values()) == [G] * 6
    assert batch.left_out and all(t.seed % 2 == 0 for t in batch.left_out)
    assert batch.metrics["groups/played"] * G == len(batch.trajectories) + len(batch.left_out)


def test_without_a_filter_tasks_come_in_the_order_of_the_schedule():
    recipe = load_recipe("webagent_r1", overrides=SIZES)
    sampling = Sampling(recipe)
    batches = [play_batch(sampling, play, places=6 * G, group_size=G, rank=0, ranks=1) for _ in range(2)]
    played = [Task(t.task, t.seed) for batch in batches for t in batch.trajectories]
    assert played == [task for task in training_tasks(recipe)[:12] for _ in range(G)]
    assert not any(batch.left_out or batch.metrics for batch in batches)


@pytest.mark.slow
def test_two_processes_fill_the_batch_that_one_fills(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    alone, sampling = filtered(6 * G)
    assert ranks[0]["state"] == ranks[1]["state"] == json.loads(json.dumps(sampling.state_dict()))
    assert ranks[0]["metrics"] == ranks[1]["metrics"] == alone.metrics
    for rank in ranks:
        assert [rank["groups"].count(group) for group in set(rank["groups"])] == [G] * 3
    assert set(ranks[0]["groups"]) | set(ranks[1]["groups"]) == {t.group for t in alone.trajectories}
    left_out = Counter(ranks[0]["left_out"]) + Counter(ranks[1]["left_out"])
    assert left_out == Counter(t.group for t in alone.left_out)


def one_of_two_processes(folder: Path) -> None:
    import torch.distributed
    from accelerate import PartialState

    rank = PartialState(cpu=True).process_index
    batch, sampling = filtered(3 * G, rank, 2)
    result = {
        "groups": [t.group for t in batch.trajectories],
        "left_out": [t.group for t in batch.left_out],
        "metrics": batch.metrics,
        "state": sampling.state_dict(),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    one_of_two_processes(Path(sys.argv[1]))
