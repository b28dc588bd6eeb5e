"""PhaseTrainer on hand-made episodes: WebRL's reference, replay and new tasks, over two phases of two updates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from test_critic_trainer import critic_with, plain_outputs
from test_step_grpo_trainer import load, plain_logps, settings, step_of, with_weights
from toy_policy import PAGES, one_thread, random_policy
from transformers import AutoTokenizer

from trl_webagent import CriticConfig
from trl_webagent.phase_trainer import PhaseTrainer
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.objectives import RowTensors, TrajectoryFacts
from webagent_core.recipe import Recipe, load_recipe
from webagent_core.sampling.state import Sampling
from webagent_core.sampling.stored import trajectory_of
from webagent_core.tasks.task import Task

__all__ = ["one_thread"]  # a fixture of this module too

EASY, HARD = "miniwob/click-button", "miniwob/click-tab"
UPDATES, GROUPS, G = 4, 2, 4


def recipe(**sampling: Any) -> Recipe:
    """WebRL with phases of two updates. A policy with random weights is surprised by whatever it says, so every action
    is taken back from the buffer."""
    changed = {
        "replay_min_probability": 1e-9,
        "replay_max_probability": 1.0,
        "replay_ratio": 0.5,
        "updates_per_phase": 2,
        "new_tasks_per_phase": 2,
    } | sampling
    overrides = {f"sampling.{name}": value for name, value in changed.items()}
    overrides |= {"tasks.names": [EASY, HARD], "train.updates": UPDATES, "objective.beta": 0.5}
    return load_recipe("webrl", overrides=overrides)


def play(rows: list[dict], generate: Callable) -> list[Trajectory]:
    """Episodes of one to three steps; the easy task always succeeds, but for one whose page broke, all others fail."""
    trajectories = []
    for index, row in enumerate(rows):
        task = Task(row["task"], row["seed"])
        trajectory = Trajectory(task.name, task.seed, task.group)
        chat = [{"role": "user", "content": f"{task.name} {PAGES[index % len(PAGES)]}"}]
        for answer in generate([chat] * (1 + index % 3)):
            trajectory.steps.append(step_of(chat, answer))
        trajectory.exit_status = ExitStatus.ENV_ERROR if index == 3 else ExitStatus.ANSWERED
        trajectory.reward = None if index == 3 else float(task.name == EASY)
        trajectories.append(trajectory)
    return trajectories


class Watched(PhaseTrainer):
    """The trainer, and what each update began with and did."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.updates: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def _train_critic(self, plan, first):
        models = {"policy": self.model, "reference": self.ref_model, "critic": self.critic}
        weights = {
            kind: {name: tensor.clone() for name, tensor in model.state_dict().items()}
            for kind, model in models.items()
        }
        replayed = dict(self.sampling._replayed)
        self.updates.append(
            weights | {"played": self._trajectories, "joined": list(self._joined), "replayed": replayed}
        )
        super()._train_critic(plan, first)

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.updates[-1]["loss"] = float(loss)
        return loss


def trainer_of(tmp_path: Path, base: Path, **kwargs: Any) -> Watched:
    config = {
        "per_device_train_batch_size": GROUPS * G,
        "max_steps": UPDATES,
        "max_rows_per_forward": 5,
        "critic_learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    return Watched(
        str(base),
        objective=recipe().load_objective(),
        play=play,
        args=settings(tmp_path, CriticConfig, **config),
        sampling=Sampling(recipe()),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "a task"}]}] * GROUPS * UPDATES),
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
        **kwargs,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return random_policy(tmp_path_factory.mktemp("policy"), [*PAGES, EASY, HARD])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def whole(base, folder) -> Watched:
    trainer = trainer_of(folder, base)
    trainer.train()
    return trainer


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_reference_is_the_policy_at_the_start_of_the_phase(base, whole):
    first, second, third, fourth = whole.updates
    started = load(base).state_dict()
    for update in (first, second):
        assert same(update["reference"], started)
    for update in (third, fourth):
        assert same(update["reference"], third["policy"])
    assert not same(second["policy"], started) and not same(fourth["policy"], third["policy"])


def test_successes_of_earlier_phases_are_replayed_half_as_many_as_new_actions(whole):
    logs = whole.state.log_history[:UPDATES]
    assert [bool(update["joined"]) for update in whole.updates] == [False, False, True, True]
    for number, (log, update) in enumerate(zip(logs, whole.updates, strict=True)):
        new = sum(len(t.steps) for t in update["played"] if t.valid)
        replayed = sum(map(len, update["replayed"].values()))
        assert log["replay/rows"] == replayed <= new // 2 and log["rows"] == new + replayed
        assert all(entry.task.startswith(EASY) and entry.update < 2 <= number for entry in update["joined"])
    assert logs[2]["replay/rows"] > 0 and logs[1]["replay/stored"] > logs[0]["replay/stored"] > 0


def test_the_loss_is_the_mean_over_new_and_chosen_actions_of_the_objective(base, whole):
    objective, update = whole.objective, whole.updates[2]
    policy, reference = (with_weights(load(base), update[name]) for name in ("policy", "reference"))
    critic = critic_with(base, update["critic"])
    joined = [trajectory_of(entry.data) for entry in update["joined"]]
    chosen = [update["replayed"][entry.id] for entry in update["joined"]]
    trajectories = [t for t in update["played"] if t.valid]
    chosen = [range(len(t.steps)) for t in trajectories] + chosen
    losses = []
    with torch.no_grad():
        for trajectory, steps in zip(trajectories + joined, chosen, strict=True):
            values = [objective.values(plain_outputs(critic, step, "state")) for step in trajectory.steps]
            tokens = [len(step.response_ids) for step in trajectory.steps]
            rows = objective.plan([TrajectoryFacts("", trajectory.reward, True, tokens, values=values)]).rows
            for index in steps:
                logp = plain_logps(policy, trajectory.steps[index]).unsqueeze(0)
                row = RowTensors(
                    logp=logp,
                    ref_logp=plain_logps(reference, trajectory.steps[index]).unsqueeze(0),
                    mask=torch.ones_like(logp, dtype=torch.bool),
                    advantage=torch.tensor([rows[index].advantage]),
                    coefficient=torch.ones(1),
                )
                losses.append(float(objective.loss(row).loss))
    assert update["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_what_failed_becomes_new_tasks_that_join_the_next_phase(whole):
    single = [entry for entry in whole.sampling.tasks.entries if isinstance(entry, Task)]
    assert len(single) == 2 and all(task.name.startswith("miniwob/click-tab") for task in single)
    logged = [log.get("new_tasks/joined") for log in whole.state.log_history[:UPDATES]]
    assert logged == [None, None, 2.0, None] and whole.sampling.phases.phase == 2
    failed = {task.task.name for task in whole.sampling.phases.failed()}  # of the second phase, which went on
    assert failed and EASY not in failed


def test_a_resumed_run_has_reference_buffer_and_tasks_of_the_one_that_was_not_stopped(base, folder, whole, tmp_path):
    rest = trainer_of(tmp_path, base)
    rest.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    (update,) = rest.updates
    expected = whole.updates[3]
    for name in ("policy", "reference", "critic"):
        assert same(update[name], expected[name]), name
    assert (update["loss"], update["replayed"]) == (expected["loss"], expected["replayed"])
    assert same(rest.model.state_dict(), whole.model.state_dict())
    assert rest.sampling.state_dict() == whole.sampling.state_dict()


def test_phases_are_refused_with_lora(base, tmp_path):
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"^sampling\.updates_per_phase = 2 is not allowed with LoRA"):
        trainer_of(tmp_path, base, peft_config=lora)
