"""HCPOTrainer on hand-made recorded steps: both branches of its rows, and what they cost, are the objective's."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from test_image_rows import recorded as sampled_logps
from test_step_grpo_trainer import (
    PLAIN_STEPS,
    G,
    Gradients,
    assert_same_gradient,
    assert_same_loss,
    assert_same_tensors,
    load,
    settings,
    with_weights,
)
from toy_policy import one_thread, random_policy
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from trl_webagent.hcpo_trainer import HCPOTrainer
from webagent_core.episode.contexts import Budget, HiconAgentContext, chat_counter
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.objectives import Evaluation, Objective, evaluate, load_objective
from webagent_core.policy.tiny_vision import build_vision_policy, write_start
from webagent_core.policy.vision_processing import load_processing_class
from webagent_core.sampling.step_answers import AnsweredStep, StepAnswers, draw_history
from webagent_core.tasks.recorded_steps import RecordedStep

__all__ = ["one_thread"]  # a fixture of this module too

PAGES = ["OK 1 <button>\nCancel 2 <button>", 'unnamed 3 <input text> = "red"', "Submit 4 <button>", "OK 1 <button>"]
ACTIONS = ["click(2)", 'type(3, "red")', "click(4)"]
# What the answers to each step are worth, whatever they say; None: nobody could tell.
REWARDS: dict[str, list[float | None]] = {
    "mixed/3": [3.0, 1.0, 0.0, 2.0],
    "flat/1": [2.0, 2.0, 2.0, 2.0],
    "lone/2": [3.0, None, None, None],
    "partly/0": [1.0, None, 3.0, 1.0],
}
BETA, CONSISTENCY = 0.1, 0.3


def recorded(name: str) -> RecordedStep:
    episode, number = name.split("/")
    past = int(number)
    return RecordedStep("task", episode, "OK Cancel", PAGES[: past + 1], [""] * (past + 1), ACTIONS[:past], "click(1)")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return random_policy(tmp_path_factory.mktemp("policy"), [*PAGES, *ACTIONS])


def tokenizer_of(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base, padding_side="left")


def answering(base: Path, history: Callable[[int], int] | None = None, rewards: dict = REWARDS) -> Callable:
    """A `play` of real answers by the policy in training, worth what `rewards` says."""
    answers = StepAnswers(HiconAgentContext(observation="text"), Budget(chat_counter(tokenizer_of(base)), 400, 6))

    def play(rows: list[dict], generate: Callable) -> list[Trajectory]:
        trajectories = answers(rows, generate, history)
        seen: Counter[str] = Counter()
        for trajectory in trajectories:
            trajectory.reward = rewards[trajectory.group][seen[trajectory.group]]
            seen[trajectory.group] += 1
            if trajectory.reward is None:
                trajectory.exit_status = ExitStatus.JUDGE_ERROR
        return trajectories

    return play


def replaying(played: list[Trajectory]) -> Callable:
    return lambda rows, generate: copy.deepcopy(played)


class Watched(HCPOTrainer):
    """The trainer, and what passed through it: rows, weights and loss of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batches: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch):
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.micro_batches.append({"weights": weights, "loss": float(loss)})
        return loss

    def _prepare_inputs(self, inputs):
        self.rows = super()._prepare_inputs(inputs)
        return self.rows


def objective(**changed: Any) -> Objective:
    return load_objective("hiconagent", **({"beta": BETA, "consistency": CONSISTENCY, "hcpo": True} | changed))


def train(tmp_path: Path, base: Path, play: Callable, of: Objective | None = None, **config: Any) -> Watched:
    rows = [recorded(name).row() | {"prompt": [{"role": "user", "content": name}]} for name in REWARDS]
    trainer = Watched(
        load(base, noise=0.05),
        objective=of or objective(),
        play=play,
        args=settings(tmp_path, **({"per_device_train_batch_size": G * len(REWARDS)} | config)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of(base),
        callbacks=[gradients := Gradients()],
    )
    trainer.gradients = gradients.steps
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def played(base, tmp_path_factory) -> list[Trajectory]:
    """One batch of answers that the policy sampled, each after a history of a length of its own."""
    rng = random.Random(0)
    play = answering(base, lambda available: draw_history(available, 0.0, rng))
    return train(tmp_path_factory.mktemp("played"), base, play)._trajectories


# ----------------------------------------------------------------------------------------------- the same, done plainly


def plain_logps(model: torch.nn.Module, tokenizer: Any, chat: list[dict], response_ids: list[int]) -> torch.Tensor:
    """Log-probability of each token of a response to a chat: one sequence alone, no padding, no mask."""
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    prompt = encoded["input_ids"]
    logits = model(torch.tensor([prompt + response_ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor([response_ids]).T).squeeze(-1)


def plainly(
    trajectories: list[Trajectory],
    model: torch.nn.Module,
    base: Path,
    old: torch.nn.Module | None = None,
    **changed: Any,
) -> Evaluation:
    """`evaluate` on log-probabilities of plain forward passes; the gradient ends up in `model`."""
    tokenizer, reference = tokenizer_of(base), load(base)
    responses = []
    for trajectory in trajectories:
        (step,) = trajectory.steps
        response = {"group": trajectory.group, "reward": trajectory.reward, "valid": trajectory.valid}
        for branch, chat in (("", step.full), ("compressed_", step.compressed)):
            response[f"{branch}logp"] = plain_logps(model, tokenizer, chat, step.response_ids)
            response[f"{branch}ref_logp"] = plain_logps(reference, tokenizer, chat, step.response_ids).detach()
            if old is not None:
                response[f"{branch}old_logp"] = plain_logps(old, tokenizer, chat, step.response_ids).detach()
        responses.append(response)
    result = evaluate("hiconagent", responses=responses, **({"beta": BETA, "consistency": CONSISTENCY} | changed))
    model.zero_grad()
    result.loss.backward()
    return result


# ---------------------------------------------------------------------------------------------------- loss and gradient


def test_loss_and_gradient_are_those_of_the_objective_with_both_branches(base, tmp_path, played):
    config = {"num_iterations": 2, "max_steps": 2, "max_rows_per_forward": 3}
    trainer = train(tmp_path, base, replaying(played), **config)
    first, second = trainer.micro_batches
    start = with_weights(load(base), first["weights"])
    expected = plainly(played, start, base)
    assert_same_loss(first["loss"], expected)
    assert_same_gradient(trainer.gradients[0], start)

    # The second update on the same batch: both ratios are now to the policy that started the first.
    moved = with_weights(load(base), second["weights"])
    expected = plainly(played, moved, base, old=start)
    assert float(expected.metrics["compressed_clip_ratio"].sum) > 0  # far enough for the clip to act
    assert_same_loss(second["loss"], expected)
    assert_same_gradient(trainer.gradients[1], moved)


@pytest.mark.parametrize(
    "changed",
    [{"hcpo": False}, {"full_ratio": "one", "normaliser": "tokens"}, {"consistency": 0.0, "drop_flat_groups": True}],
    ids=lambda changed: "-".join(f"{name}={value}" for name, value in changed.items()),
)
def test_the_objectives_switches_are_the_trainers(base, tmp_path, played, changed):
    trainer = train(tmp_path, base, replaying(played), objective(**changed))
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    assert_same_loss(trainer.micro_batches[0]["loss"], plainly(played, start, base, **changed))
    assert_same_gradient(trainer.gradients[0], start)
    assert ("compressed_prompt_ids" in trainer.rows) == (changed.get("hcpo") is not False)


def test_the_teacher_gets_no_gradient_from_the_consistency_term(base, tmp_path, played):
    """With equal rewards and no reference the consistency is all there is, and only the compressed prompt feels it."""
    flat = copy.deepcopy(played)
    for trajectory in flat:
        trajectory.reward, trajectory.exit_status = 1.0, ExitStatus.ANSWERED
    trainer = train(tmp_path, base, replaying(flat), objective(kl="k2", beta=1e-12))
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    tokenizer, losses = tokenizer_of(base), []
    for trajectory in flat:
        (step,) = trajectory.steps
        teacher = plain_logps(start, tokenizer, step.full, step.response_ids).detach()
        student = plain_logps(start, tokenizer, step.compressed, step.response_ids)
        distance = teacher - student
        losses.append((distance.exp() - distance - 1).mean())
    loss = CONSISTENCY * torch.stack(losses).mean()
    assert trainer.micro_batches[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    start.zero_grad()
    loss.backward()
    assert loss.item() > 1e-5
    largest = max(float(p.grad.abs().max()) for p in start.parameters())
    for name, parameter in start.named_parameters():
        assert float((trainer.gradients[0][name] - parameter.grad).abs().max()) < 1e-3 * largest, name


SPLITS = {
    "one row a pass": {"max_rows_per_forward": 1},
    "all at once": {"max_rows_per_forward": None},
    "two micro-batches of three rows a pass": {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": G * len(REWARDS) // 2,
        "max_rows_per_forward": 3,
    },
}


def test_how_rows_are_split_changes_neither_loss_nor_gradient(base, tmp_path, played):
    results = {}
    for name, split in SPLITS.items():
        config = PLAIN_STEPS | {"num_iterations": 2, "max_steps": 2} | split
        trainer = train(tmp_path, base, replaying(played), **config)
        per_step = len(trainer.micro_batches) // 2
        losses = [sum(m["loss"] for m in trainer.micro_batches[i * per_step :][:per_step]) for i in range(2)]
        results[name] = losses, trainer.gradients, trainer.state.log_history[:2]
    losses, gradients, logs = results.pop("all at once")
    assert {"consistency", "compressed_kl", "compressed_policy_loss"} <= set(logs[0])
    for name, (other_losses, other_gradients, other_logs) in results.items():
        assert other_losses == pytest.approx(losses, rel=1e-5, abs=1e-6), name
        for step, other in zip(gradients, other_gradients, strict=True):
            assert_same_tensors(other, step)
        for key in ("consistency", "compressed_kl", "compressed_policy_loss", "compressed_ratio"):
            assert other_logs[1][key] == pytest.approx(logs[1][key], rel=1e-4, abs=1e-5), (name, key)


# ----------------------------------------------------------------------------------------------------------------- rows


def test_rows_hold_the_whole_history_and_the_compressed_one_whatever_was_sampled_after(base, tmp_path, played):
    trainer = train(tmp_path, base, replaying(played))
    tokenizer = tokenizer_of(base)
    rows = trainer.rows
    live = rows["coefficients"] != 0
    valid = [t for t in played if t.valid and t.group != "lone/2"]
    assert int(live.sum()) == len(valid) == 4 + 4 + 3

    def prompts(prefix: str) -> list[tuple[list[int], list[int]]]:
        ids, mask = rows[f"{prefix}prompt_ids"][live], rows[f"{prefix}prompt_mask"][live].bool()
        responses, filled = rows["completion_ids"][live], rows["completion_mask"][live].bool()
        return sorted((ids[i][mask[i]].tolist(), responses[i][filled[i]].tolist()) for i in range(len(ids)))

    def expected(chat_of: Callable[[AnsweredStep], list[dict]]) -> list[tuple[list[int], list[int]]]:
        steps = [trajectory.steps[0] for trajectory in valid]
        chats = [tokenizer.apply_chat_template(chat_of(s), add_generation_prompt=True, tokenize=False) for s in steps]
        return sorted((tokenizer(c)["input_ids"], s.response_ids) for c, s in zip(chats, steps, strict=True))

    assert prompts("") == expected(lambda step: step.full)
    assert prompts("compressed_") == expected(lambda step: step.compressed)
    sampled = expected(lambda step: step.messages)
    assert sampled != prompts("")  # the histories that were drawn are shorter than the whole ones
    assert sorted((s.prompt_ids, s.response_ids) for s in (t.steps[0] for t in valid)) == sampled


def test_without_drawn_histories_what_was_sampled_after_is_what_is_trained_on(base, tmp_path):
    trainer = train(tmp_path, base, answering(base))
    for trajectory in trainer._trajectories:
        (step,) = trajectory.steps
        assert step.messages == step.full
        assert step.history == trajectory.seed == int(trajectory.group.split("/")[1])
    sampled = {tuple(t.steps[0].prompt_ids) for t in trainer._trajectories if t.group != "lone/2"}
    ids, mask = trainer.rows["prompt_ids"], trainer.rows["prompt_mask"].bool()
    live = trainer.rows["coefficients"] != 0
    assert {tuple(ids[i][mask[i]].tolist()) for i in live.nonzero().flatten()} == sampled


def test_the_advantage_is_the_groups_z_score_and_is_shared_by_both_branches(base, tmp_path, played):
    seen: list[tuple[list[Trajectory], list[float | None]]] = []
    play = replaying(played)
    trainer = Watched(
        load(base),
        objective=objective(),
        play=play,
        on_trajectories=lambda trajectories, advantages: seen.append((trajectories, advantages)),
        args=settings(tmp_path, per_device_train_batch_size=G * len(REWARDS)),
        train_dataset=Dataset.from_list(
            [recorded(name).row() | {"prompt": [{"role": "user", "content": name}]} for name in REWARDS]
        ),
        processing_class=tokenizer_of(base),
    )
    trainer.train()
    ((trajectories, advantages),) = seen
    by_group: dict[str, list[float | None]] = {}
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        by_group.setdefault(trajectory.group, []).append(advantage)
    spread = (5 / 3) ** 0.5  # of 3, 1, 0, 2
    assert by_group["mixed/3"] == pytest.approx([1.5 / spread, -0.5 / spread, -1.5 / spread, 0.5 / spread])
    assert by_group["flat/1"] == [0.0] * 4
    assert by_group["lone/2"] == [None] * 4
    assert by_group["partly/0"][1] is None and by_group["partly/0"][2] > 0


# ------------------------------------------------------------------------------------------------------------- pictures


def test_each_branch_is_scored_with_the_pictures_that_its_prompt_shows(tmp_path):
    write_start(tmp_path / "sees", ["Task: Press", *ACTIONS] * 3, hidden=48, layers=2, heads=2, vision_hidden=32)
    build_vision_policy(AutoConfig.from_pretrained(tmp_path / "sees"), seed=1).save_pretrained(tmp_path / "sees")
    files = [str(tmp_path / f"{number}.jpg") for number in range(3)]
    for number, file in enumerate(files):
        Image.new("RGB", (64, 96), (80 * number, 200, 255 - 80 * number)).save(file)
    past = ["click(x=10, y=20)", "back()"]
    recorded_steps = [
        RecordedStep("task", "e", "Press", [""] * (n + 1), files[: n + 1], past[:n], "click(x=5, y=5)")
        for n in range(3)
    ]
    trainer = HCPOTrainer(
        AutoModelForImageTextToText.from_pretrained(tmp_path / "sees", dtype=torch.float32),
        objective=objective(beta=0.0),
        play=lambda rows, generate: [],
        args=settings(tmp_path, per_device_train_batch_size=G, max_rows_per_forward=2),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "a step"}]}]),
        processing_class=load_processing_class(str(tmp_path / "sees")),
    )
    calls = sampled_logps(trainer)
    answers = StepAnswers(HiconAgentContext(), Budget(lambda chat: 0, 9), at_points=True)
    steps = [t.steps[0] for t in answers([each.row() for each in recorded_steps], trainer.generate)]
    others = [
        replace(step, response_ids=answer.response_ids)
        for step, answer in zip(steps, trainer.generate([step.compressed for step in steps]), strict=True)
    ]
    full, compressed = trainer._tokens(steps), trainer._tokens(others)
    assert [len(shown) for shown in full["pictures"]] == [1, 2, 3]
    assert [len(shown) for shown in full["compressed_pictures"]] == [1, 1, 1]
    second = {name: compressed[f"compressed_{name}"] for name in ("prompt_ids", "prompt_mask", "pictures")}
    for (_, sampled), batch in zip(calls, (full, compressed | second), strict=True):
        with torch.no_grad():
            logps = trainer._logps(trainer.model, batch)
        mask = batch["completion_mask"].bool()
        assert mask.sum() > 3
        assert float((logps - sampled[:, : logps.size(1)])[mask].abs().max()) < 1e-4
