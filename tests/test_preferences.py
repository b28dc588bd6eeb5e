"""Preference pairs on TRL's DPOTrainer: core's loss, on the tokens and reference log-probabilities that were stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig

from trl_webagent import PairDPOTrainer, pair_rows
from trl_webagent.preference_policy import LocalPolicy
from trl_webagent.preference_run import PreferenceRun, rounds_of
from trl_webagent.preference_trainer import in_training_order, micro_batch
from trl_webagent.warm_up import cpu_arguments
from webagent_core.episode.contexts import ContextOverflow
from webagent_core.episode.runner import Response
from webagent_core.objectives import evaluate
from webagent_core.policy.tiny import build_policy
from webagent_core.policy.tokenizer import build_tokenizer
from webagent_core.recipe import Rollout, load_recipe
from webagent_core.sampling.page_search import Question
from webagent_core.sampling.pairs import Answer, Pair, load_pairs

torch.set_num_threads(1)
BETA = 0.3
CHAT = [{"role": "user", "content": "Task: Press OK\nOK 3 <button>\nNo 4 <button>"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with random weights."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = build_tokenizer(["Press OK", "Press No", "Press it"])
    for part in (tokenizer, build_policy(tokenizer, hidden=16, layers=1, heads=2)):
        part.save_pretrained(folder)
    return folder


def policy_of(folder: Path, **rollout) -> LocalPolicy:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = {"max_response_tokens": 6, "max_context_tokens": 80} | rollout
    return LocalPolicy(
        AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), Rollout(**settings)
    )


def moved(policy: LocalPolicy) -> LocalPolicy:
    """Its weights a little elsewhere, so that it is not the reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return policy


def some_pairs(count: int, logps: bool, seed: int = 0) -> list[Pair]:
    """Prompts and answers of all kinds of lengths."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int) -> list[int]:
        length = int(torch.randint(1, most, (), generator=generator))
        return torch.randint(4, 300, (length,), generator=generator).tolist()

    def answer() -> Answer:
        logp = -10 * float(torch.rand((), generator=generator, dtype=torch.float64)) if logps else None
        return Answer("", None, ids(9), logp)

    return [Pair("t#0", CHAT, answer(), answer(), "search", prompt_ids=ids(30)) for _ in range(count)]


def trainer_of(policy: LocalPolicy, pairs: list[Pair], out: Path, stored: bool, **changed) -> PairDPOTrainer:
    settings = {"per_device_train_batch_size": len(pairs), "max_steps": 1, "learning_rate": 1e-3} | changed
    arguments = DPOConfig(
        output_dir=str(out), beta=BETA, precompute_ref_log_probs=stored, max_length=None, report_to="none",
        train_sampling_strategy="sequential", disable_tqdm=True, logging_steps=1, save_strategy="no",
        lr_scheduler_type="constant", **cpu_arguments(), **settings,
    )  # fmt: skip
    dataset = Dataset.from_list(pair_rows(pairs, stored_reference=stored))
    return PairDPOTrainer(policy.model, args=arguments, train_dataset=dataset, processing_class=policy.tokenizer)


def token_logps(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def core_loss(name: str, model, reference, pairs: list[Pair]) -> torch.Tensor:
    def side(pair: Pair, answer: Answer) -> dict:
        if reference is None:
            ref = answer.logp
        else:
            with torch.no_grad():
                ref = token_logps(reference, pair.prompt_ids, answer.response_ids)
        return {"logp": token_logps(model, pair.prompt_ids, answer.response_ids), "ref_logp": ref}

    sides = [(side(pair, pair.chosen), side(pair, pair.rejected)) for pair in pairs]
    return evaluate(name, pairs=sides, beta=BETA).loss


def gradients(model) -> torch.Tensor:
    flat = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return flat


# --- The loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["uitars", "agentq"])
@pytest.mark.parametrize("count", [1, 7])
def test_loss_and_gradient_are_cores(method, count, folder, tmp_path):
    policy, reference = moved(policy_of(folder)), policy_of(folder).model
    stored = method == "agentq"
    pairs = some_pairs(count, logps=stored, seed=count)
    expected = core_loss(method, policy.model, None if stored else reference, pairs)
    expected.backward()
    expected_gradient = gradients(policy.model)

    trainer = trainer_of(policy, pairs, tmp_path, stored)
    assert (trainer.ref_model is None) == stored
    trainer.model.train()
    (batch,) = list(trainer.get_train_dataloader())
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.dist(gradients(trainer.model), expected_gradient) <= 1e-6 * expected_gradient.norm()


def test_an_update_in_several_passes_is_the_update_of_all_its_pairs(folder, tmp_path):
    pairs = some_pairs(12, logps=True)
    losses, weights = [], []
    for size in (12, 4):
        policy = policy_of(folder)
        trainer = trainer_of(
            policy, pairs, tmp_path / str(size), True,
            per_device_train_batch_size=size, gradient_accumulation_steps=12 // size, max_grad_norm=1e9,
        )  # fmt: skip
        trainer.train()
        losses.append(next(line["loss"] for line in trainer.state.log_history if "loss" in line))
        weights.append(torch.cat([weight.detach().flatten() for weight in policy.model.parameters()]))
    assert losses[0] == pytest.approx(core_loss("agentq", policy_of(folder).model, None, pairs).item(), rel=1e-6)
    assert losses[1:] == pytest.approx(losses[:1], rel=1e-6)
    for other in weights[1:]:
        assert torch.allclose(weights[0], other, atol=2e-5)  # Adam turns the last bits of a tiny gradient into a step


def test_the_trainer_gets_the_stored_tokens_and_log_probabilities(folder, tmp_path):
    pairs = some_pairs(3, logps=True)
    trainer = trainer_of(policy_of(folder), pairs, tmp_path, True)
    (batch,) = list(trainer.get_train_dataloader())
    for side, rows in (("chosen", slice(0, 3)), ("rejected", slice(3, 6))):
        answers = [getattr(pair, side) for pair in pairs]
        for pair, answer, ids, seen, mask in zip(
            pairs, answers, batch["input_ids"][rows], batch["attention_mask"][rows], batch["completion_mask"][rows],
            strict=True,
        ):  # fmt: skip
            assert ids[seen == 1].tolist() == pair.prompt_ids + answer.response_ids
            assert ids[mask == 1].tolist() == answer.response_ids
        assert batch[f"ref_{side}_logps"].tolist() == pytest.approx([answer.logp for answer in answers], rel=1e-6)


def test_a_pair_without_what_the_loss_needs_is_refused():
    with pytest.raises(ValueError, match=r"pair 0 \(t#0\): chosen.logp is missing"):
        pair_rows(some_pairs(1, logps=False), stored_reference=True)
    (pair,) = some_pairs(1, logps=True)
    with pytest.raises(ValueError, match="no token ids"):
        pair_rows([replace(pair, prompt_ids=[])], stored_reference=True)


# --- The policy ------------------------------------------------------------------------------------------------------


def test_sampled_answers_keep_their_tokens_and_get_the_log_probability_of_these(folder):
    policy = policy_of(folder)
    chats = [CHAT, [{"role": "user", "content": "Press it"}]]
    torch.manual_seed(0)
    asked = policy.answer([Question(chats[0], 3, scored=True), Question(chats[1], 1), Question(chats[1], 2, True)])
    assert [len(sampled.responses) for sampled in asked] == [3, 1, 2]
    assert asked[1].logps == [None]
    for sampled, chat in ((asked[0], chats[0]), (asked[2], chats[1])):
        for response, logp in zip(sampled.responses, sampled.logps, strict=True):
            assert response.prompt_ids == policy.prompt_ids(chat)
            assert 1 <= len(response.response_ids) <= 6
            ended = response.response_ids[-1] == policy.tokenizer.eos_token_id
            assert response.finish_reason == ("stop" if ended else "length")
            expected = token_logps(policy.model, response.prompt_ids, response.response_ids).sum().item()
            assert logp == pytest.approx(expected, rel=1e-5)
    assert len({tuple(response.response_ids) for response in asked[0].responses}) > 1


def test_what_an_answer_says_is_tokenised_as_it_would_have_been_sampled(folder):
    policy = policy_of(folder)
    ids = policy.response_ids("OK 3\nAction: click(3)")
    chat = [*CHAT, {"role": "assistant", "content": "OK 3\nAction: click(3)"}]
    whole = policy.tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    assert whole == policy.prompt_ids(CHAT) + ids
    assert policy.tokenizer.decode(ids, skip_special_tokens=True) == "OK 3\nAction: click(3)"


def test_a_chat_that_does_not_fit_costs_only_its_own_answer(folder):
    policy = policy_of(folder, max_context_tokens=40)
    long = [{"role": "user", "content": "Press OK " * 30}]
    given = policy.generate([long, [{"role": "user", "content": "Press it"}]])
    assert isinstance(given[0], ContextOverflow) and isinstance(given[1], Response)
    asked = policy.answer([Question(long, 2, scored=True), Question([{"role": "user", "content": "OK"}], 2, True)])
    assert isinstance(asked[0], ContextOverflow) and len(asked[1].logps) == 2


# --- Rounds ----------------------------------------------------------------------------------------------------------


def test_pairs_come_in_another_order_each_time_round_and_equally_often():
    pairs = some_pairs(5, logps=True)
    drawn = in_training_order(pairs, 15, 0)
    assert len(drawn) == 15
    passes = [[pairs.index(pair) for pair in drawn[start : start + 5]] for start in (0, 5, 10)]
    assert all(sorted(each) == [0, 1, 2, 3, 4] for each in passes) and len({tuple(each) for each in passes}) > 1
    assert in_training_order(pairs, 7, 0) == drawn[:7]
    assert in_training_order([], 7, 0) == []


def test_passes_divide_an_update_evenly():
    assert [micro_batch(32, rows) for rows in (64, 63, 16, 2, 1)] == [32, 16, 8, 1, 1]
    assert micro_batch(7, 12) == 1 and micro_batch(12, 13) == 6


def test_rounds_share_updates_and_tasks(tmp_path):
    recipe = load_recipe("agentq", overrides={"pairs.rounds": 3, "train.updates": 7, "rollout.groups_per_update": 2})
    rounds = rounds_of(recipe, tmp_path)
    assert [(each.first, each.updates, len(each.tasks)) for each in rounds] == [(0, 2, 4), (2, 2, 4), (4, 3, 6)]
    tasks = [task for each in rounds for task in each.tasks]
    assert len(set(tasks)) == 14
    assert rounds[-1].policy == tmp_path / "policy"
    few = load_recipe("agentq", overrides={"pairs.rounds": 3, "train.updates": 1})
    assert [each.updates for each in rounds_of(few, tmp_path)] == [1]


# --- A run without a browser: pairs from a file ----------------------------------------------------------------------


def run_of(folder: Path, out: Path, recipe: str, pairs: Path, resume: bool = False, **changed) -> PreferenceRun:
    settings = {
        "policy.model": str(folder),
        "policy.warm_up": None,
        "train.updates": 4,
        "train.save_every": 1,
        "train.warmup_updates": 0,
        "pairs.per_update": 3,
        "pairs.rounds": 1,
        "pairs.file": str(pairs),
        "rollout.max_response_tokens": 6,
    }
    if recipe == "uitars":
        settings["pairs.imitation_steps"] = None
    run = PreferenceRun(load_recipe(recipe, overrides=settings | changed), out, resume)
    run.evaluate = lambda phase: None  # there are no pages here
    return run


def train(run: PreferenceRun, folder: Path) -> PreferenceRun:
    run.trainer = run._trainer(str(folder))
    run._train(None)
    return run


def weights(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(folder / "model.safetensors").items())])


@pytest.fixture
def pairs_file(tmp_path) -> Path:
    lines = [
        {"task": f"t#{n}", "messages": CHAT, "chosen": {"text": f"Press OK {n}"}, "rejected": {"text": f"No {n}"}}
        for n in range(5)
    ]
    file = tmp_path / "given.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("method", ["uitars", "agentq"])
def test_pairs_of_a_file_are_trained_on_and_kept_with_what_they_lacked(method, folder, pairs_file, tmp_path):
    run = train(run_of(folder, tmp_path / "run", method, pairs_file), folder)
    policy = policy_of(folder)
    kept = load_pairs(run.rounds[0].pairs)
    assert [pair.chosen.text for pair in kept] == [f"Press OK {n}" for n in range(5)]
    for pair in kept:
        assert pair.prompt_ids == policy.prompt_ids(CHAT)
        for answer in (pair.chosen, pair.rejected):
            assert answer.response_ids == policy.response_ids(answer.text)
            expected = token_logps(policy.model, pair.prompt_ids, answer.response_ids).sum().item()
            assert answer.logp == (pytest.approx(expected, rel=1e-5) if method == "agentq" else None)
    metrics = run.directory.metrics()
    assert [(line["phase"], line["update"]) for line in metrics] == [("train", update) for update in (1, 2, 3, 4)]
    assert metrics[0]["loss"] == pytest.approx(0.6931472, abs=1e-5)  # the policy is the reference
    assert metrics[-1]["margin"] > metrics[0]["margin"] and metrics[-1]["accuracy"] == 1.0
    assert metrics[0]["pairs"] == 5 and "pairs" not in metrics[1]
    assert not torch.equal(weights(tmp_path / "run" / "policy"), weights(folder))


STOPPED = {
    "uitars": ("uitars", {"pairs.rounds": 1}),
    "uitars after imitation": ("uitars", {"pairs.rounds": 1, "pairs.imitation_steps": 3}),
    "agentq": ("agentq", {"pairs.rounds": 1}),
    "agentq in its second round": ("agentq", {"pairs.rounds": 2}),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_run_that_was_stopped_gathers_nothing_again_and_ends_as_one_that_was_not(case, folder, pairs_file, tmp_path):
    method, changed = STOPPED[case]
    whole = train(run_of(folder, tmp_path / "whole", method, pairs_file, **changed), folder)

    stopped = run_of(folder, tmp_path / "stopped", method, pairs_file, **changed)
    keep = stopped.keep_metrics

    def stop_at_the_third(logs):
        if stopped.update == 2:
            raise KeyboardInterrupt
        keep(logs)

    stopped.keep_metrics = stop_at_the_third
    with pytest.raises(KeyboardInterrupt):
        train(stopped, folder)
    pairs_file.write_text("".join(pairs_file.read_text().splitlines(True)[:1]))  # nothing may be read from it again
    resumed = train(run_of(folder, tmp_path / "stopped", method, pairs_file, True, **changed), folder)
    assert torch.equal(weights(tmp_path / "stopped" / "policy"), weights(tmp_path / "whole" / "policy"))
    for run in (whole, resumed):
        assert [line["update"] for line in run.directory.metrics()] == [1, 2, 3, 4]
    for one, other in zip(whole.directory.metrics(), resumed.directory.metrics(), strict=True):
        assert one | {"seconds": 0} == other | {"seconds": 0}


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_ui_tars_imitates_first_is_where_dpo_starts_and_its_reference(rounds, folder, pairs_file, tmp_path):
    imitation = {"pairs.imitation_steps": 20, "pairs.imitation_learning_rate": 1e-2, "pairs.rounds": rounds}
    run = train(run_of(folder, tmp_path / "run", "uitars", pairs_file, **imitation), folder)
    logps = [
        sum(token_logps(policy_of(of).model, pair.prompt_ids, pair.chosen.response_ids).sum().item() for pair in kept)
        for kept in [load_pairs(run.rounds[0].pairs)]
        for of in (folder, run.rounds[0].imitated)
    ]
    assert logps[1] > logps[0] + 20  # of five corrections
    first_of_round = [line for line in run.directory.metrics() if line["update"] in {1, run.rounds[-1].first + 1}]
    assert [line["loss"] for line in first_of_round] == pytest.approx([0.6931472] * rounds, abs=1e-5)


def test_without_imitation_a_later_round_keeps_the_warmed_up_policy_as_reference(folder, pairs_file, tmp_path):
    run = train(
        run_of(folder, tmp_path / "run", "uitars", pairs_file, **{"pairs.rounds": 2, "train.learning_rate": 1e-2}),
        folder,
    )
    third = run.directory.metrics()[2]
    assert third["margin"] > 0.01  # a reference of the round's own would give 0


def test_a_round_without_a_pair_leaves_the_policy_as_it_is(folder, tmp_path):
    empty = tmp_path / "none.jsonl"
    empty.write_text("")
    run = train(run_of(folder, tmp_path / "run", "agentq", empty), folder)
    assert torch.equal(weights(tmp_path / "run" / "policy"), weights(folder))
    assert run.trainer.no_signal.startswith("no pair in 1 round")  # `go` ends with it, after the report


def test_lora_trains_an_adapter_and_leaves_a_whole_policy(folder, pairs_file, tmp_path):
    lora = {"policy.lora.r": 2, "policy.lora.alpha": 4.0, "pairs.rounds": 2}
    for method in ("uitars", "agentq"):
        run = train(run_of(folder, tmp_path / method, method, pairs_file, **lora), folder)
        made = weights(tmp_path / method / "policy")
        assert made.shape == weights(folder).shape and not torch.equal(made, weights(folder))
        assert run.directory.metrics()[-1]["update"] == 4


# --- Bad input -------------------------------------------------------------------------------------------------------


def test_bad_input_names_what_is_wrong(folder, tmp_path):
    with pytest.raises(ValueError, match=r"train.num_iterations = 2 is not allowed: 1"):
        run_of(folder, tmp_path / "a", "uitars", tmp_path, **{"train.num_iterations": 2})
    with pytest.raises(ValueError, match="context.observation = 'screenshot' is not allowed"):
        run_of(folder, tmp_path / "a", "uitars", tmp_path, **{"context.observation": "screenshot"})
    with pytest.raises(FileNotFoundError, match=r"pairs.file = .*none.jsonl"):
        run_of(folder, tmp_path / "b", "uitars", tmp_path / "none.jsonl")
    bad = tmp_path / "bad.jsonl"
    for line, named in (
        ("{", "line 1: JSONDecodeError"),
        ('{"task": "t", "messages": [], "chosen": {"text": "a"}}', "line 1: KeyError: 'rejected'"),
        ('{"task": "t", "messages": [], "chosen": {}, "rejected": {"text": "b"}}', "line 1: TypeError"),
    ):
        bad.write_text(line + "\n")
        with pytest.raises(ValueError, match=named):
            load_pairs(bad)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
