"""StepGRPOTrainer on hand-made episodes: it trains on what was sampled, and what it computes is the objective."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from toy_policy import PAGES, base, one_thread, random_policy
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_webagent import StepGRPOConfig, StepGRPOTrainer
from webagent_core.episode.runner import ContextOverflow, Response
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.objectives import Evaluation, Objective, Plan, RowPlan, TrajectoryPlan, evaluate, load_objective
from webagent_core.objectives.evaluation import evaluate_objective
from webagent_core.objectives.webagent_r1 import WebAgentR1
from webagent_core.policy.tiny import build_policy

__all__ = ["base", "one_thread"]  # fixtures of this module too

# For comparing second updates: Adam's first step is the sign of the gradient, which makes much of a rounding error.
PLAIN_STEPS = {"optim": "sgd", "learning_rate": 0.5}
ON_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
G = 4


# --------------------------------------------------------------------------------------------------- hand-made episodes


@dataclass
class Part:
    """How one attempt goes, whatever the policy says."""

    steps: int
    reward: float | None
    exit_status: ExitStatus = ExitStatus.ANSWERED


# A long and a short success, a failure, and one that the environment broke after three steps; all alike; one left of
# four; and shaped rewards.
MIXED = {
    "uneven": [Part(9, 1.0), Part(2, 0.0, ExitStatus.STEP_LIMIT), Part(3, 1.0), Part(3, None, ExitStatus.ENV_ERROR)],
    "flat": [Part(1, 1.0), Part(2, 1.0), Part(1, 1.0), Part(2, 1.0)],
    "lone": [
        Part(2, 1.0),
        *(Part(0, None, ExitStatus.ENV_ERROR) for _ in range(2)),
        Part(1, None, ExitStatus.JUDGE_ERROR),
    ],
    "shaped": [Part(1, 0.5), Part(2, 0.0, ExitStatus.FORMAT_ERROR), Part(4, 1.0), Part(1, 0.25)],
}
GOOD = {
    "a": [Part(2, 1.0), Part(1, 0.0), Part(3, 0.0), Part(1, 1.0)],
    "b": [Part(1, 0.0), Part(1, 1.0), Part(2, 0.0)] * 2,
}
GOOD["b"] = GOOD["b"][:G]
BROKEN = {
    "a": [Part(2, None, ExitStatus.ENV_ERROR)] * G,
    "b": [Part(0, None, ExitStatus.ENV_ERROR), Part(1, None, ExitStatus.CANCELLED)] * 2,
}


def chat(group: str, attempt: int, done: list[Step]) -> list[dict]:
    """Chats of very different length, so that every batch is padded on both sides."""
    page = "\n".join(PAGES[(attempt + i) % len(PAGES)] for i in range(1 + (attempt + len(done)) % 4))
    messages = [{"role": "user", "content": f"Task: {group} {attempt}\n{page}"}]
    for step in done:
        messages += [{"role": "assistant", "content": step.response}, {"role": "user", "content": page}]
    return messages


def playing(*batches: dict[str, list[Part]]) -> Callable:
    """A `play` that samples every response from the policy in training; how the episode goes is from `batches`."""
    calls = iter(batches)

    def play(rows: list[dict], generate: Callable) -> list[Trajectory]:
        batch = next(calls)
        attempts: Counter[str] = Counter()
        trajectories, parts = [], []
        for row in rows:
            parts.append(batch[row["task"]][attempts[row["task"]]])
            trajectories.append(Trajectory(row["task"], attempts[row["task"]], row["task"]))
            attempts[row["task"]] += 1
        while live := [i for i, part in enumerate(parts) if len(trajectories[i].steps) < part.steps]:
            chats = [chat(trajectories[i].group, trajectories[i].seed, trajectories[i].steps) for i in live]
            for i, messages, answer in zip(live, chats, generate(chats), strict=True):
                if isinstance(answer, ContextOverflow):
                    parts[i] = Part(0, 0.0, ExitStatus.CONTEXT_OVERFLOW)
                else:
                    trajectories[i].steps.append(step_of(messages, answer))
        for trajectory, part in zip(trajectories, parts, strict=True):
            trajectory.reward, trajectory.exit_status = part.reward, part.exit_status
        return trajectories

    return play


def step_of(messages: list[dict], answer: Response) -> Step:
    return Step(
        url="",
        observation=messages[-1]["content"],
        messages=messages,
        response=answer.text,
        prompt_ids=answer.prompt_ids,
        response_ids=answer.response_ids,
    )


def replaying(*batches: list[Trajectory]) -> Callable:
    """A `play` of what was played before, for comparing trainers on equal tokens."""
    calls = iter(batches)
    return lambda rows, generate: copy.deepcopy(next(calls))


# --------------------------------------------------------------------------------------------------------------- policy


def load(base: Path, noise: float = 0.0) -> torch.nn.Module:
    """The policy of the folder; with `noise`, one that has moved away from it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return model


class Watched(StepGRPOTrainer):
    """The trainer, and what passed through it: weights, rows and loss of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro_batches: list[dict[str, Any]] = []
        self.batches: list[dict[str, torch.Tensor]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch):
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.micro_batches.append({"weights": weights, "loss": float(loss)})
        return loss

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.batches.append(batch)
        return batch


class Gradients(TrainerCallback):
    """The gradient of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})


def settings(tmp_path: Path, config: type = StepGRPOConfig, **changed: Any) -> Any:
    values: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "num_generations": G,
        "per_device_train_batch_size": G * len(MIXED),
        "gradient_accumulation_steps": 1,
        "max_steps": 1,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    return config(**(values | ON_CPU | changed))


def tasks(names: Any) -> Dataset:
    return Dataset.from_list([{"prompt": [{"role": "user", "content": name}], "task": name} for name in names])


def train(
    tmp_path: Path,
    base: Path,
    play: Callable,
    *,
    model: Any = None,
    names: Any = MIXED,
    objective: Objective | None = None,
    resume: str | None = None,
    config: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Watched:
    trainer = untrained(
        tmp_path, base, play, model=model, names=names, objective=objective, config=config, **kwargs
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def untrained(
    tmp_path: Path,
    base: Path,
    play: Callable,
    *,
    model: Any = None,
    names: Any = MIXED,
    objective: Objective | None = None,
    config: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Watched:
    trainer = Watched(
        load(base, noise=0.05) if model is None else model,
        objective=objective or load_objective("webagent_r1", beta=0.1),
        play=play,
        args=settings(tmp_path, **(config or {})),
        train_dataset=tasks(names),
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
        callbacks=[gradients := Gradients()],
        **kwargs,
    )
    trainer.gradients = gradients.steps
    return trainer


@pytest.fixture(scope="module")
def played(base, tmp_path_factory) -> list[Trajectory]:
    """One batch of MIXED episodes with responses that the policy sampled."""
    return train(tmp_path_factory.mktemp("played"), base, playing(MIXED))._trajectories


# ----------------------------------------------------------------------------------------------- the same, done plainly


def plain_logps(model: torch.nn.Module, step: Step, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each sampled token: one sequence alone, no padding, no mask."""
    logits = model(torch.tensor([step.prompt_ids + step.response_ids])).logits[0, len(step.prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor([step.response_ids]).T).squeeze(-1)


def plainly(
    trajectories: list[Trajectory],
    model: torch.nn.Module,
    reference: torch.nn.Module,
    old: torch.nn.Module | None = None,
    objective: Objective | None = None,
) -> Evaluation:
    """`evaluate` on log-probabilities of plain forward passes; the gradient ends up in `model`."""
    batch = []
    for trajectory in trajectories:
        steps = []
        for step in trajectory.steps:
            logps = {"logp": plain_logps(model, step), "ref_logp": plain_logps(reference, step).detach()}
            if old is not None:
                logps["old_logp"] = plain_logps(old, step).detach()
            steps.append(logps)
        batch.append(
            {"group": trajectory.group, "reward": trajectory.reward, "valid": trajectory.valid, "steps": steps}
        )
    if objective is None:
        result = evaluate("webagent_r1", trajectories=batch, beta=0.1)
    else:
        result = evaluate_objective(objective, trajectories=batch)
    model.zero_grad()
    result.loss.backward()
    return result


def with_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    model.load_state_dict(weights)
    return model


def assert_same_loss(got: float, expected: Evaluation) -> None:
    """To float32's digits: the fused head of TRL and the norms of Qwen3 compute in it whatever the model's dtype is."""
    assert got == pytest.approx(float(expected.loss.detach()), rel=1e-5, abs=1e-6)


def assert_same_gradient(got: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    assert_same_tensors(got, {name: p.grad for name, p in model.named_parameters() if p.requires_grad})


def assert_same_tensors(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 1e-3  # or there would be nothing to compare
    for name, tensor in expected.items():
        assert float((got[name] - tensor).abs().max()) < 1e-5 * largest, name


# ---------------------------------------------------------------------------------------------------- loss and gradient


def test_loss_and_gradient_are_those_of_the_objective_on_plainly_recomputed_logps(base, tmp_path):
    config = {"num_iterations": 2, "max_steps": 2, "max_rows_per_forward": 3}
    trainer = train(tmp_path, base, playing(MIXED), config=config)
    trajectories, (first, second) = trainer._trajectories, trainer.micro_batches
    assert sorted(len(t.steps) for t in trajectories)[-1] == 9
    assert not torch.equal(first["weights"]["model.norm.weight"], second["weights"]["model.norm.weight"])
    start, reference = with_weights(load(base), first["weights"]), load(base)

    expected = plainly(trajectories, start, reference)
    assert_same_loss(first["loss"], expected)
    assert_same_gradient(trainer.gradients[0], start)

    # The second update on the same batch: the ratio is now to the policy that started the first.
    moved = with_weights(load(base), second["weights"])
    expected = plainly(trajectories, moved, reference, old=start)
    assert float(expected.metrics["clip_ratio"].sum) > 0  # far enough for the clip to act
    assert_same_loss(second["loss"], expected)
    assert_same_gradient(trainer.gradients[1], moved)


def test_metrics_are_the_token_means_of_the_objective(base, tmp_path, played):
    trainer = train(tmp_path, base, replaying(played))
    moved = with_weights(load(base), trainer.micro_batches[0]["weights"])
    expected = plainly(played, moved, load(base)).metrics
    logged = trainer.state.log_history[0]
    for name in ("kl", "policy_loss", "ratio", "clip_ratio"):
        assert logged[name] == pytest.approx(float(expected[name].sum / expected[name].count), rel=1e-4, abs=1e-7), name
    assert logged["loss"] == pytest.approx(trainer.micro_batches[0]["loss"], rel=1e-4, abs=1e-4)


SPLITS = {
    "one row a pass": {"max_rows_per_forward": 1},
    "three rows a pass": {"max_rows_per_forward": 3},
    "all at once": {"max_rows_per_forward": None},
    "four micro-batches": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": G},
    "four micro-batches of three rows a pass": {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": G,
        "max_rows_per_forward": 3,
    },
}


def test_how_rows_are_split_changes_neither_loss_nor_gradient_nor_metrics(base, tmp_path, played):
    results = {}
    for name, split in SPLITS.items():
        trainer = train(
            tmp_path,
            base,
            replaying(played),
            config=PLAIN_STEPS | {"num_iterations": 2, "max_steps": 2} | split,
        )
        per_step = len(trainer.micro_batches) // 2
        assert per_step == split.get("gradient_accumulation_steps", 1)
        losses = [sum(m["loss"] for m in trainer.micro_batches[i * per_step :][:per_step]) for i in range(2)]
        results[name] = losses, trainer.gradients, trainer.state.log_history[:2]
    losses, gradients, logs = results.pop("all at once")
    for name, (other_losses, other_gradients, other_logs) in results.items():
        assert other_losses == pytest.approx(losses, rel=1e-5, abs=1e-6), name
        for step, other_step in zip(gradients, other_gradients, strict=True):
            assert_same_tensors(other_step, step)
        assert {"success", "return", "rows", "trajectories"} <= set(logs[0])
        for log, other_log in zip(logs, other_logs, strict=True):
            untimed = [
                key for key in log if not key.startswith("seconds/") and "per_second" not in key and key != "step_time"
            ]
            assert {"loss", "kl", "ratio", "clip_ratio", "entropy"} <= set(untimed)
            for key in untimed:
                assert other_log[key] == pytest.approx(log[key], rel=1e-4, abs=1e-5), (name, key)


def test_two_optimizer_steps_share_a_batch_so_that_each_is_worth_a_whole_one(base, tmp_path, played):
    """Four micro-batches, two of them an optimizer step: the expected gradient of each is the whole batch's."""
    config = {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "per_device_train_batch_size": G,
        "max_steps": 2,
        "learning_rate": 0.0,
    }
    trainer = train(tmp_path, base, replaying(played), config=config)
    whole = train(tmp_path, base, replaying(played))
    first, second = trainer.gradients
    assert_same_tensors({name: (first[name] + second[name]) / 2 for name in first}, whole.gradients[0])


def test_single_step_trajectories_train_as_in_stock_grpo_trainer(base, tmp_path):
    """Where every trajectory is one row the method is stock `loss_type="grpo"`, for two updates on the same batch."""
    parts = {name: [Part(1, reward) for reward in (0.0, 1.0, 0.25, 1.0)] for name in MIXED}
    ours = train(
        tmp_path,
        base,
        playing(parts),
        objective=load_objective("webagent_r1", beta=0.1, adv_eps=1e-4),
        config=PLAIN_STEPS | {"num_iterations": 2, "max_steps": 2},
    )
    steps = [trajectory.steps[0] for trajectory in ours._trajectories]
    losses: list[float] = []

    class Stock(GRPOTrainer):
        def training_step(self, *args):
            losses.append(float(loss := super().training_step(*args)))
            return loss

    stock = Stock(
        load(base, noise=0.05),
        reward_funcs=lambda completions, **_: [trajectory.reward for trajectory in ours._trajectories],
        args=settings(
            tmp_path,
            GRPOConfig,
            num_iterations=2,
            max_steps=2,
            loss_type="grpo",
            beta=0.1,
            use_bias_correction_kl=False,
            **PLAIN_STEPS,
        ),
        train_dataset=tasks(parts),
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
        rollout_func=lambda prompts, trainer: {
            "prompt_ids": [step.prompt_ids for step in steps],
            "completion_ids": [step.response_ids for step in steps],
            "logprobs": None,
        },
        callbacks=[gradients := Gradients()],
    )
    stock.train()
    assert [m["loss"] for m in ours.micro_batches] == pytest.approx(losses, rel=1e-5, abs=1e-6)
    for mine, theirs in zip(ours.gradients, gradients.steps, strict=True):
        assert_same_tensors(mine, theirs)


class LaterTokensMore(WebAgentR1):
    """A method that tells tokens apart, in every other step."""

    def plan(self, facts, update=None) -> Plan:
        trajectories = []
        for planned, fact in zip(super().plan(facts, update).trajectories, facts, strict=True):
            rows = [
                RowPlan(row.advantage * (1.0 + torch.arange(m)) if index % 2 else row.advantage, row.coefficient)
                for index, (row, m) in enumerate(zip(planned.rows, fact.tokens, strict=True))
            ]
            trajectories.append(TrajectoryPlan([row.advantage for row in rows], rows, planned.dropped))
        return Plan(trajectories)


def test_an_objective_may_give_every_token_its_own_advantage(base, tmp_path):
    objective = LaterTokensMore(beta=0.1)
    trainer = train(tmp_path, base, playing(MIXED), objective=objective)
    assert trainer.batches[0]["advantages"].shape == trainer.batches[0]["completion_ids"].shape
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    expected = plainly(trainer._trajectories, start, load(base), objective=objective)
    assert_same_loss(trainer.micro_batches[0]["loss"], expected)
    assert_same_gradient(trainer.gradients[0], start)


# --------------------------------------------------------------------------------------------------------------- tokens


def test_training_rows_hold_exactly_the_sampled_tokens(base, tmp_path):
    trainer = train(tmp_path, base, playing(MIXED))
    (batch,), rows = trainer.batches, Counter()
    for i in range(len(batch["coefficients"])):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        response = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
        rows[tuple(prompt), tuple(response)] += 1
    kept = [t for t in trainer._trajectories if t.valid and t.group != "lone"]
    assert rows == Counter((tuple(s.prompt_ids), tuple(s.response_ids)) for t in kept for s in t.steps)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_stored_logps_are_those_with_which_the_tokens_were_sampled(base, tmp_path, temperature):
    model, sampled = load(base, noise=0.05), {}
    generate = model.generate

    def recording(input_ids, attention_mask, **kwargs):
        out = generate(
            input_ids, attention_mask=attention_mask, output_scores=True, return_dict_in_generate=True, **kwargs
        )
        logps = torch.stack(out.scores, dim=1).log_softmax(-1)
        for prompt, mask, response, of_row in zip(
            input_ids, attention_mask, out.sequences[:, input_ids.size(1) :], logps, strict=True
        ):
            key = tuple(prompt[mask.bool()].tolist()), tuple(response.tolist())
            sampled[key] = of_row.gather(-1, response.unsqueeze(-1)).squeeze(-1)
        return out.sequences

    model.generate = recording
    trainer = train(
        tmp_path,
        base,
        playing(MIXED),
        model=model,
        config={"num_iterations": 2, "temperature": temperature, "max_steps": 2},
    )
    (batch,) = trainer.batches
    assert len(batch["coefficients"]) > 20
    for i in range(len(batch["coefficients"])):
        prompt = tuple(batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist())
        response = tuple(batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist())
        at_sampling = next(v for (p, r), v in sampled.items() if p == prompt and r[: len(response)] == response)
        stored = batch["old_per_token_logps"][i][: len(response)]
        torch.testing.assert_close(stored, at_sampling[: len(response)], rtol=1e-4, atol=1e-5)


def test_answers_come_in_the_order_of_the_chats_and_say_whether_they_were_cut(base, tmp_path):
    """The sampler is pushed towards ending its answers, so that some end by themselves."""
    ending = {"sequence_bias": [[[AutoTokenizer.from_pretrained(base).eos_token_id], 4.0]]}
    trainer = train(tmp_path, base, playing(MIXED), config={"generation_kwargs": ending})
    chats = [chat("uneven", i, trainer._trajectories[0].steps[: i % 3]) for i in range(30)]
    answers = trainer.generate(chats)
    tokenizer = trainer.processing_class
    for messages, answer in zip(chats, answers, strict=True):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert answer.prompt_ids == tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ended = answer.response_ids[-1] == tokenizer.eos_token_id
        assert answer.finish_reason == ("stop" if ended else "length")
        assert ended or len(answer.response_ids) == 6
        assert tokenizer.eos_token_id not in answer.response_ids[:-1] and tokenizer.eos_token not in answer.text
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


def test_a_response_without_tokens_counts_as_a_step_and_adds_nothing(base, tmp_path, played):
    empty = copy.deepcopy(played)
    empty[0].steps[4].response_ids = []
    trainer = train(tmp_path, base, replaying(empty), config={"max_rows_per_forward": 1})
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    expected = plainly(empty, start, load(base))
    assert_same_loss(trainer.micro_batches[0]["loss"], expected)
    assert_same_gradient(trainer.gradients[0], start)


def test_a_chat_beyond_max_context_tokens_ends_its_own_episode_alone(base, tmp_path):
    """The nine-step episode grows past the limit; the others fit, and all of them are trained on."""
    trainer = train(tmp_path, base, playing(MIXED), config={"max_context_tokens": 100})
    cut, *others = trainer._trajectories
    assert cut.exit_status is ExitStatus.CONTEXT_OVERFLOW and cut.valid and 0 < len(cut.steps) < 9
    assert all(len(step.prompt_ids) + 6 <= 100 for step in cut.steps)
    assert not any(t.exit_status is ExitStatus.CONTEXT_OVERFLOW for t in others)
    assert [len(t.steps) for t in others] == [part.steps for group in MIXED.values() for part in group][1:]
    logged = trainer.state.log_history[0]
    assert logged["exit_status/context_overflow"] == 1
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    expected = plainly(trainer._trajectories, start, load(base))
    assert_same_loss(trainer.micro_batches[0]["loss"], expected)


def test_an_episode_that_overflows_before_its_first_step_is_a_failure_that_counts(base, tmp_path):
    parts = {"a": [Part(0, 0.0, ExitStatus.CONTEXT_OVERFLOW), Part(2, 1.0), Part(1, 1.0), Part(1, 0.0)]}
    trainer = train(tmp_path, base, playing(parts), names=parts, config={"per_device_train_batch_size": G})
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    expected = plainly(trainer._trajectories, start, load(base))
    assert_same_loss(trainer.micro_batches[0]["loss"], expected)
    assert trainer.state.log_history[0]["success"] == 0.5


# ------------------------------------------------------------------------------------------------- invalid trajectories


def test_invalid_trajectories_are_counted_by_kind_and_are_in_no_statistic(base, tmp_path):
    kept = []
    trainer = train(
        tmp_path,
        base,
        playing(MIXED),
        on_trajectories=lambda t, advantages: kept.extend(zip(t, advantages, strict=True)),
    )
    for trajectory, advantage in kept:
        assert (advantage is None) == (not trajectory.valid or trajectory.group == "lone")
    assert sum(advantage for trajectory, advantage in kept if trajectory.group == "uneven" and trajectory.valid) == (
        pytest.approx(0.0, abs=1e-12)
    )
    logged = trainer.state.log_history[0]
    valid = [part for group in MIXED.values() for part in group if part.reward is not None]
    assert logged["trajectories"] == 16 and logged["invalid"] == 4
    assert logged["exit_status/env_error"] == 3 and logged["exit_status/judge_error"] == 1
    assert logged["exit_status/step_limit"] == 1 and logged["exit_status/format_error"] == 1
    assert logged["exit_status/answered"] == 10
    assert logged["success"] == pytest.approx(sum(part.reward == 1 for part in valid) / len(valid))
    assert logged["return"] == pytest.approx(sum(part.reward for part in valid) / len(valid))
    assert logged["steps"] == pytest.approx(sum(part.steps for part in valid) / len(valid))
    assert logged["rows"] == sum(part.steps for part in valid) - 2  # less the lone one's


def test_a_reward_function_cannot_make_a_broken_page_count(base, tmp_path, played):
    trainer = train(
        tmp_path, base, replaying(played), reward_funcs=lambda trajectory, **_: [1.0 * len(t.steps) for t in trajectory]
    )
    assert [math.isnan(reward) for reward in trainer._rewards] == [not t.valid for t in played]
    logged = trainer.state.log_history[0]
    assert logged["invalid"] == 4 and logged["return"] == logged["steps"] == logged["reward"]


def test_an_unscored_trajectory_is_not_printed(base, tmp_path, played, caplog):
    train(tmp_path, base, replaying(played))
    assert "Trajectory(" not in caplog.text


@pytest.mark.parametrize("peculiar", [Part(5, None, ExitStatus.ENV_ERROR), Part(0, None, ExitStatus.ENV_ERROR)])
def test_what_an_invalid_trajectory_did_changes_neither_loss_nor_gradient(base, tmp_path, played, peculiar):
    group = [t for t in played if t.group == "uneven"]
    other = copy.deepcopy(group)
    other[3].steps = [copy.deepcopy(group[0].steps[0]) for _ in range(peculiar.steps)]
    config = {"per_device_train_batch_size": G}
    first, second = (
        train(tmp_path, base, replaying(batch), names=["uneven"], config=config) for batch in (group, other)
    )
    assert first.micro_batches[0]["loss"] == second.micro_batches[0]["loss"]
    for name, gradient in first.gradients[0].items():
        assert torch.equal(second.gradients[0][name], gradient), name


def test_a_batch_of_invalid_trajectories_leaves_every_weight_as_it_was_and_training_goes_on(base, tmp_path):
    """Adam has momentum by then, and weight decay would pull as well."""
    trainer = train(
        tmp_path,
        base,
        playing(GOOD, BROKEN, GOOD, GOOD),
        names=["a", "b"] * 4,
        config={"per_device_train_batch_size": 2 * G, "max_steps": 4, "weight_decay": 0.1},
    )
    weights = [m["weights"] for m in trainer.micro_batches]
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])
    assert not all(torch.equal(weights[2][name], weights[3][name]) for name in weights[0])
    second = trainer.state.log_history[1]
    assert second["invalid"] == 8 and second["rows"] == 0 and second["loss"] == 0
    assert "success" not in second and "return" not in second
    assert all(torch.isfinite(tensor).all() for tensor in trainer.model.state_dict().values())


def test_an_optimizer_step_that_got_no_row_of_its_batch_moves_nothing(base, tmp_path):
    """Four optimizer steps a batch, and a second batch with two rows: two of its steps have one, two have none."""
    two_left = {"a": [Part(1, 1.0), Part(1, 0.0), *(Part(2, None, ExitStatus.ENV_ERROR) for _ in range(2))]}
    config = {"per_device_train_batch_size": 1, "steps_per_generation": 4, "max_steps": 8}
    trainer = train(tmp_path, base, playing({"a": GOOD["a"]}, two_left), names=["a", "a"], config=config)
    weights = [m["weights"] for m in trainer.micro_batches] + [trainer.model.state_dict()]
    moved = [
        not all(torch.equal(before[name], after[name]) for name in before)
        for before, after in zip(weights, weights[1:], strict=False)
    ]
    assert len(moved) == 8 and all(moved[:4]) and sum(moved[4:]) == 2


def test_evaluating_between_updates_does_not_decide_whether_the_next_one_counts(base, tmp_path):
    """Two updates on one batch with an evaluation in between, in which no episode is valid."""
    trainer = train(
        tmp_path,
        base,
        playing(GOOD, BROKEN, BROKEN),
        names=["a", "b"],
        eval_dataset=tasks(["a", "b"]),
        config={
            "per_device_train_batch_size": 2 * G,
            "per_device_eval_batch_size": 2 * G,
            "num_iterations": 2,
            "max_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 1,
        },
    )
    after_first, at_end = trainer.micro_batches[1]["weights"], trainer.model.state_dict()
    assert not all(torch.equal(after_first[name], at_end[name]) for name in at_end)
    evaluation = next(line for line in trainer.state.log_history if "eval_invalid" in line)
    assert evaluation["eval_invalid"] == 8 and evaluation["eval_exit_status/cancelled"] == 2


# -------------------------------------------------------------------------------------------------------------- rewards


def test_reward_functions_see_trajectories_and_none_leaves_one_out_of_everything(base, tmp_path, played):
    """Judged by length; of one trajectory the judge has no opinion, and it leaves the batch although it is valid."""

    def brevity(trajectory: list[Trajectory], **_: Any) -> list[float | None]:
        return [None if t.group == "flat" and t.seed == 0 else 1.0 / (1 + len(t.steps)) for t in trajectory]

    trainer = train(tmp_path, base, replaying(played), reward_funcs=brevity)
    judged = copy.deepcopy(played)
    for trajectory, reward in zip(judged, brevity(judged), strict=True):
        if trajectory.valid:
            trajectory.reward = reward
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    expected = plainly(judged, start, load(base))
    assert_same_loss(trainer.micro_batches[0]["loss"], expected)
    assert_same_gradient(trainer.gradients[0], start)
    logged = trainer.state.log_history[0]
    counted = [(mine, theirs) for mine, theirs in zip(judged, played, strict=True) if mine.valid]
    assert logged["invalid"] == 5 and len(counted) == 11
    assert logged["return"] == pytest.approx(sum(mine.reward for mine, _ in counted) / 11)
    assert logged["success"] == pytest.approx(sum(theirs.success for _, theirs in counted) / 11)


def test_reward_functions_add_up_with_their_weights(base, tmp_path, played):
    def own(trajectory: list[Trajectory], **_: Any) -> list[float | None]:
        return [t.reward for t in trajectory]

    def brevity(trajectory: list[Trajectory], **_: Any) -> list[float | None]:
        return [-float(len(t.steps)) if t.valid else None for t in trajectory]

    trainer = train(
        tmp_path, base, replaying(played), reward_funcs=[own, brevity], config={"reward_weights": [1.0, 0.05]}
    )
    judged = copy.deepcopy(played)
    for trajectory in judged:
        if trajectory.valid:
            trajectory.reward -= 0.05 * len(trajectory.steps)
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    expected = plainly(judged, start, load(base))
    assert_same_loss(trainer.micro_batches[0]["loss"], expected)


# ----------------------------------------------------------------------------------------------------------------- LoRA


def test_lora_trains_adapters_alone_and_takes_the_base_as_reference(base, tmp_path):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = train(
        tmp_path,
        base,
        playing(MIXED, MIXED),
        model=str(base),
        names=[*MIXED, *MIXED],
        peft_config=lora,
        config={"max_steps": 2},
    )
    before, after = trainer.micro_batches[0]["weights"], trainer.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("lora_" in name for name in changed)
    assert trainer.ref_model is None
    first, second = trainer.state.log_history[:2]
    assert first["kl"] == pytest.approx(0.0, abs=1e-6) and second["kl"] > 1e-3

    moved = with_weights(get_peft_model(load(base), lora), trainer.micro_batches[1]["weights"])
    expected = plainly(trainer._trajectories, moved, load(base))
    assert_same_loss(trainer.micro_batches[1]["loss"], expected)
    assert_same_gradient(trainer.gradients[1], moved)


# ------------------------------------------------------------------------------------------------------------ reference


def test_another_reference_is_what_the_kl_is_to(base, tmp_path, played):
    far = tmp_path / "far"
    load(base, noise=0.2).save_pretrained(far)
    AutoTokenizer.from_pretrained(base).save_pretrained(far)
    trainer = untrained(tmp_path, base, replaying(played))
    trainer.load_reference(str(far))
    trainer.train()
    start = with_weights(load(base), trainer.micro_batches[0]["weights"])
    expected = plainly(played, start, load(far))
    assert float(expected.metrics["kl"].sum) > 2 * float(plainly(played, start, load(base)).metrics["kl"].sum)
    plainly(played, start, load(far))  # its gradient again
    assert_same_loss(trainer.micro_batches[0]["loss"], expected)
    assert_same_gradient(trainer.gradients[0], start)


def test_a_reference_of_another_shape_or_vocabulary_is_refused(base, tmp_path, played):
    trainer = untrained(tmp_path, base, replaying(played))
    tokenizer = AutoTokenizer.from_pretrained(base)
    build_policy(tokenizer, hidden=64, layers=2, heads=2).save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"^reference = .*wide' .*: its parameters must be like"):
        trainer.load_reference(str(tmp_path / "wide"))
    words = list(reversed(PAGES))
    words[0] = words[0].replace("red", "blue")
    random_policy(tmp_path / "words", words)
    with pytest.raises(ValueError, match=r"^reference = .*words' .*: its vocabulary must be like"):
        trainer.load_reference(str(tmp_path / "words"))


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_type", "grpo"),
        ("epsilon", 0.3),
        ("epsilon_high", 0.28),
        ("delta", 3.0),
        ("scale_rewards", "none"),
        ("importance_sampling_level", "sequence"),
        ("use_bias_correction_kl", False),
        ("top_entropy_quantile", 0.2),
        ("entropy_coef", 0.01),
        ("mask_truncated_completions", True),
        ("off_policy_mask_threshold", 0.5),
        ("multi_objective_aggregation", "normalize_then_sum"),
    ],
)
def test_what_the_objective_decides_is_refused_as_a_setting(tmp_path, field, value):
    with pytest.raises(ValueError, match=rf"^{field} = .*objective") as error:
        settings(tmp_path, **{field: value})
    assert repr(value) in str(error.value) and "\n" not in str(error.value)


def test_a_beta_that_is_not_the_objectives_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match=r"^beta = 0\.04.*0\.1"):
        train(tmp_path, base, playing(MIXED), config={"beta": 0.04})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_rows_per_forward": 0}, r"^max_rows_per_forward = 0: .*None.*1"),
        ({"max_context_tokens": 6}, r"^max_context_tokens = 6: .*max_completion_length = 6"),
        ({"use_vllm": True}, r"^vllm_importance_sampling_correction = True: .*must be False"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **changed)


# ---------------------------------------------------------------------------------------------------- resume, processes


def test_a_resumed_run_continues_as_if_it_had_not_been_interrupted(base, tmp_path):
    config = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 1.0}
    config |= {"lr_scheduler_type": "linear", "per_device_train_batch_size": 2 * G}
    names, seen, seen_again = ["a", "b"] * 4, [], []

    def noted(into: list) -> Callable:
        return lambda trajectories, _: into.append([[s.response_ids for s in t.steps] for t in trajectories])

    whole = train(
        tmp_path / "whole",
        base,
        playing(*[GOOD] * 4),
        model=str(base),
        names=names,
        config=config,
        on_trajectories=noted(seen),
    )
    rest = train(
        tmp_path / "rest",
        base,
        playing(GOOD, GOOD),
        model=str(base),
        names=names,
        config=config,
        resume=str(tmp_path / "whole" / "checkpoint-2"),
        on_trajectories=noted(seen_again),
    )
    assert len(seen_again) == 2 and seen_again == seen[2:] and seen[2] != seen[3]
    assert [m["loss"] for m in rest.micro_batches] == [m["loss"] for m in whole.micro_batches[2:]]
    for name in ("loss", "grad_norm", "learning_rate", "kl", "entropy", "success"):
        column = [[line[name] for line in trainer.state.log_history if "loss" in line] for trainer in (whole, rest)]
        assert len(column[0]) == 4 and column[0] == column[1], name
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(rest.model.state_dict()[name], tensor), name


@pytest.mark.slow
def test_two_processes_end_with_the_weights_that_one_has(base, tmp_path, played):
    """Twelve trajectories over two ranks, six each, so that the second group lies across both."""
    batch = [t for t in played if t.group != "lone"]
    (tmp_path / "played.pickle").write_bytes(pickle.dumps(batch))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", __file__, str(base), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    alone = train(
        tmp_path,
        base,
        replaying(batch, batch),
        names=["uneven", "flat", "shaped"] * 2,
        config=PLAIN_STEPS | {"per_device_train_batch_size": 12, "max_steps": 2},
    )
    for step, whole in enumerate(alone.micro_batches):
        assert (ranks[0]["losses"][step] + ranks[1]["losses"][step]) / 2 == pytest.approx(whole["loss"], rel=1e-5)
    norms = [float(parameter.detach().norm()) for parameter in alone.model.parameters()]
    assert ranks[0]["norms"] == pytest.approx(norms, rel=1e-6)
    for name in ("success", "return", "steps", "rows", "kl", "entropy", "policy_loss", "exit_status/env_error"):
        assert ranks[0]["log"][name] == pytest.approx(alone.state.log_history[0][name], rel=1e-5), name
    assert ranks[0]["all_reduced"] < 2 * 3  # chunks before the last one keep their gradients to themselves


def one_of_two_processes(base: Path, folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    batch = pickle.loads((folder / "played.pickle").read_bytes())
    mine = batch[6 * rank : 6 * rank + 6]
    reduced = 0

    def counting(state, bucket):
        nonlocal reduced
        reduced += 1
        work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    class Hooked(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 0:
                trainer.model_wrapped.register_comm_hook(None, counting)

    trainer = Watched(
        load(base, noise=0.05),
        objective=load_objective("webagent_r1", beta=0.1),
        play=replaying(mine, mine),
        args=settings(folder, per_device_train_batch_size=6, max_steps=2, max_rows_per_forward=3, **PLAIN_STEPS),
        train_dataset=tasks(["uneven", "flat", "shaped"] * 2),
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
        callbacks=[Hooked()],
    )
    trainer.train()
    digest = hashlib.md5()
    for parameter in trainer.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    result = {
        "weights": digest.hexdigest(),
        "norms": [float(parameter.detach().norm()) for parameter in trainer.model.parameters()],
        "losses": [m["loss"] for m in trainer.micro_batches],
        "log": trainer.state.log_history[0],
        "all_reduced": reduced,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    one_of_two_processes(Path(sys.argv[1]), Path(sys.argv[2]))
