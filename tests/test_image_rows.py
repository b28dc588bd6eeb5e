"""A policy that sees, trained on rows with pictures: each row is scored with its own, as it was when it was sampled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image, ImageDraw
from toy_policy import one_thread
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
    TrainerCallback,
)

from trl_webagent import StepGRPOConfig, StepGRPOTrainer
from trl_webagent.critic_config import CriticConfig
from trl_webagent.image_rows import ImageInputs
from trl_webagent.run import critic_settings, trainer_class
from webagent_core.episode.pictures import picture_part, picture_urls, pictures_of
from webagent_core.episode.runner import ContextOverflow
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.policy.tiny_vision import PICTURE, build_vision_policy, write_start
from webagent_core.policy.vision_processing import load_processing_class, sees
from webagent_core.recipe import load_recipe
from webagent_core.sampling.stored import store, trajectory_of

__all__ = ["one_thread"]  # a fixture of this module too

G = 4
PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
TEXTS = ["Task: Press the red button", "Feedback: the page did not change", "Task: Press the button on the left now"]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """Folder of a tiny policy that sees, with random weights."""
    folder = tmp_path_factory.mktemp("sees")
    write_start(folder, TEXTS * 3, hidden=48, layers=2, heads=2, vision_hidden=32, vision_layers=1)
    build_vision_policy(AutoConfig.from_pretrained(folder), seed=1).save_pretrained(folder)
    return folder


def picture(number: int, size: tuple[int, int] = (64, 96)) -> dict:
    """A page with one box, somewhere else and of another colour for every number."""
    image = Image.new("RGB", size, "white")
    left, upper = 5 * number % (size[0] - 30), 11 * number % (size[1] - 30)
    colour = (37 * number % 256, 91 * number % 256, 200)
    ImageDraw.Draw(image).rectangle((left, upper, left + 25, upper + 25), fill=colour)
    image.save(data := BytesIO(), "JPEG")
    return picture_part(data.getvalue())


def chat(number: int, pictures: int) -> list[dict]:
    """A chat that shows so many pictures of different sizes, over as many turns, and says more or less besides."""
    said = {"type": "text", "text": TEXTS[number % len(TEXTS)]}
    if pictures == 0:
        return [{"role": "user", "content": said["text"]}]
    turns = []
    for index in range(pictures):
        size = (64, 96) if (number + index) % 2 else (128, 64)
        turns.append({"role": "user", "content": [said] * (index == 0) + [picture(7 * number + index, size)]})
        turns.append({"role": "assistant", "content": "Action: click(7, 12)"})
    return turns[:-1]


PICTURES = (1, 3, 0, 2, 1, 1)  # in the chats of one batch


@pytest.fixture(scope="module")
def chats() -> list[list[dict]]:
    return [chat(number, pictures) for number, pictures in enumerate(PICTURES)]


def write_qwen(folder: Path, kind: str) -> Path:
    """`folder`, with a policy of the class and the picture format of a Qwen-VL that is in use; its weights are random
    and few."""
    write_start(folder, TEXTS * 3)
    tokenizer = load_processing_class(str(folder)).tokenizer
    names = {"image": PICTURE[1], "video": PICTURE[3], "vision_start": PICTURE[0], "vision_end": PICTURE[2]}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "initializer_range": 0.15,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    eyes = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]}
    if kind == "qwen2_5_vl":
        patch, text["rope_parameters"] = 14, rope
        eyes |= {"window_size": 56, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=eyes, tie_word_embeddings=True, **ids)
    else:
        patch, text["head_dim"], text["rope_parameters"] = 16, 24, rope | {"mrope_interleaved": True}
        eyes |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        config = Qwen3VLConfig(text_config=text, vision_config=eyes, tie_word_embeddings=True, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    images = json.loads((folder / "preprocessor_config.json").read_text())
    images |= {"patch_size": patch, "temporal_patch_size": 2, "processor_class": PROCESSORS[kind]}
    images["size"] = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 1280 * 1280}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


def load(start: Path) -> Any:
    kind = AutoModelForImageTextToText if sees(str(start)) else AutoModelForCausalLM
    return kind.from_pretrained(start, dtype=torch.float32)


def trainer_of(start: Path, out: Path, play: Callable, **changed: Any) -> StepGRPOTrainer:
    """The trainer of a recipe's method, OpenWebRL's if none is named, on the policy in `start`."""
    peft, callbacks = changed.pop("peft_config", None), changed.pop("callbacks", None)
    recipe = load_recipe(changed.pop("recipe", "openwebrl"), overrides=changed.pop("overrides", None))
    values = {
        "output_dir": str(out),
        "num_generations": G,
        "per_device_train_batch_size": 2 * G,
        "gradient_accumulation_steps": 1,
        "max_steps": 1,
        "max_completion_length": 5,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    names = ["one", "other"]
    objective, critic = recipe.load_objective(), critic_settings(recipe)
    return trainer_class(recipe)(
        str(start) if objective.uses_reference else load(start),
        objective=objective,
        play=play,
        args=(CriticConfig if critic else StepGRPOConfig)(**(values | critic | changed)),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": n}], "task": n} for n in names]),
        processing_class=load_processing_class(str(start)),
        peft_config=peft,
        callbacks=callbacks,
    )


def step(messages: list[dict], answer: Any) -> Step:
    return Step("", "", messages, answer.text, prompt_ids=answer.prompt_ids, response_ids=answer.response_ids)


def playing(rows: list[dict], generate: Callable) -> list[Trajectory]:
    """Attempts of one or two steps with 0 to 3 pictures; every other one succeeds."""
    trajectories = []
    for number, row in enumerate(rows):
        steps = []
        for turn in range(1 + number % 2):
            messages = chat(number + turn, PICTURES[(number + turn) % len(PICTURES)])
            steps.append(step(messages, generate([messages])[0]))
        reward = float(number % 2)
        trajectories.append(
            Trajectory(row["task"], number, row["task"], "", steps, ExitStatus.ANSWERED, reward=reward)
        )
    return trajectories


def recorded(trainer: StepGRPOTrainer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """From now on, (sampled tokens, their log-probabilities in that very call) of each `generate`, padded."""
    calls, generate = [], trainer.model.generate

    def recording(**inputs: Any) -> torch.Tensor:
        out = generate(**inputs, return_dict_in_generate=True, output_logits=True)
        tokens = out.sequences[:, inputs["input_ids"].size(1) :]
        logps = torch.stack(out.logits, dim=1).log_softmax(-1)
        calls.append((tokens, logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)))
        return out.sequences

    trainer.model.generate = recording
    return calls


@pytest.mark.parametrize("size", [1, 2, None])
def test_rows_get_the_log_probabilities_that_their_tokens_were_sampled_with(start, chats, tmp_path, size):
    trainer = trainer_of(start, tmp_path, playing, max_rows_per_forward=size)
    calls = recorded(trainer)
    steps = [step(messages, answer) for messages, answer in zip(chats, trainer.generate(chats), strict=True)]
    (_, sampled), batch = calls[0], trainer._tokens(steps)
    with torch.no_grad():
        logps = trainer._logps(trainer.model, batch)
    mask = batch["completion_mask"].bool()
    assert mask.sum() > len(chats)
    assert float((logps - sampled[:, : logps.size(1)])[mask].abs().max()) < 1e-4


@pytest.mark.parametrize("kind", sorted(PROCESSORS))
def test_qwens_own_classes_go_the_same_way(kind, chats, tmp_path):
    folder = write_qwen(tmp_path / kind, kind)
    trainer = trainer_of(folder, tmp_path / "out", playing, max_rows_per_forward=2)
    assert trainer.model.config.model_type == kind
    calls = recorded(trainer)
    answers = trainer.generate(chats)
    ids = trainer.processing_class.image_token_id
    assert [answer.prompt_ids.count(ids) > 0 for answer in answers] == [pictures > 0 for pictures in PICTURES]
    (_, sampled), batch = calls[0], trainer._tokens([step(*each) for each in zip(chats, answers, strict=True)])
    with torch.no_grad():
        logps = trainer._logps(trainer.model, batch)
    mask = batch["completion_mask"].bool()
    assert float((logps - sampled[:, : logps.size(1)])[mask].abs().max()) < 1e-4
    before = trainer.model.model.visual.patch_embed.proj.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, trainer.model.model.visual.patch_embed.proj.weight)


def test_image_tokens_of_a_prompt_are_as_many_as_its_pictures_fill(start, chats, tmp_path):
    trainer = trainer_of(start, tmp_path, playing)
    processor, token = trainer.processing_class, trainer.processing_class.image_token_id
    for messages, answer in zip(chats, trainer.generate(chats), strict=True):
        shown = pictures_of(messages)
        grids = processor.image_processor(images=shown, return_tensors="pt")["image_grid_thw"] if shown else None
        filled = int(grids.prod(1).sum()) // 4 if shown else 0
        assert answer.prompt_ids.count(token) == filled
        assert token not in answer.response_ids


def test_a_row_is_scored_with_its_own_pictures(start, chats, tmp_path):
    trainer = trainer_of(start, tmp_path, playing, max_rows_per_forward=2)
    steps = [step(messages, answer) for messages, answer in zip(chats, trainer.generate(chats), strict=True)]
    batch = trainer._tokens(steps)
    with torch.no_grad():
        before = trainer._logps(trainer.model, batch)
        sizes = [shown.size for shown in pictures_of(steps[3].messages)]
        batch["pictures"][3] = picture_urls([{"content": [picture(50 + i, size) for i, size in enumerate(sizes)]}])
        after = trainer._logps(trainer.model, batch)
    changed = ((before - after).abs() > 1e-6).any(1).tolist()
    assert changed == [False, False, False, True, False, False]


def test_a_row_whose_pictures_are_missing_is_refused(start, chats):
    processor = load_processing_class(str(start))
    ids = torch.tensor([[processor.image_token_id, 95, 96], [95, 96, 97]])
    with pytest.raises(ValueError, match="row 0 has 1 image tokens and 0 pictures that fill 0"):
        ImageInputs(processor)(ids, [[], []])
    with pytest.raises(ValueError, match="row 1 has 0 image tokens and 1 pictures that fill 6"):
        ImageInputs(processor)(ids[1:].repeat(2, 1), [[], picture_urls([{"content": [picture(1)]}])])


def test_a_stored_trajectory_keeps_the_pictures_of_its_rows(start, chats, tmp_path):
    trainer = trainer_of(start, tmp_path, playing, max_rows_per_forward=2)
    steps = [step(messages, answer) for messages, answer in zip(chats, trainer.generate(chats), strict=True)]
    played = Trajectory("task", 0, "task", "", steps, ExitStatus.ANSWERED, reward=1.0)
    kept = trajectory_of(store(played, 0, 0, pictures=True).data)
    with torch.no_grad():
        before = trainer._logps(trainer.model, trainer._tokens(steps))
        after = trainer._logps(trainer.model, trainer._tokens(kept.steps))
    assert torch.equal(before, after)


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.last: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.last = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_reach_the_vision_tower_and_do_not_depend_on_how_rows_are_split(start, tmp_path):
    seen = []
    for size in (None, 1):
        trainer = trainer_of(start, tmp_path, playing, max_rows_per_forward=size, callbacks=[g := Gradients()])
        trainer.train()
        seen.append(g.last)
    whole, single = seen
    assert float(whole["model.visual.patch_embed.proj.weight"].abs().max()) > 1e-4
    largest = max(float(gradient.abs().max()) for gradient in whole.values())
    for name, gradient in whole.items():
        assert float((gradient - single[name]).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("name", ["arpo", "asyncwebrl", "uitars2", "webgym", "zerogui"])
def test_other_papers_that_look_train_what_they_look_with(name, start, tmp_path):
    overrides = {"objective.pretrain_updates": 0} if name == "uitars2" else {}
    trainer = trainer_of(start, tmp_path, playing, recipe=name, overrides=overrides, max_rows_per_forward=3)
    before = trainer.model.model.visual.patch_embed.proj.weight.detach().clone()
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])
    assert float((trainer.model.model.visual.patch_embed.proj.weight - before).abs().max()) > 1e-3


def test_pictures_follow_their_rows_through_shuffling_and_splitting(start, tmp_path):
    """Log-probabilities are stored before TRL shuffles and splits the batch: the ratio is 1 only if they do."""
    trainer = trainer_of(
        start, tmp_path, playing, gradient_accumulation_steps=2, per_device_train_batch_size=G, num_iterations=2,
        max_steps=2, learning_rate=1e-9,
    )  # fmt: skip
    trainer.train()
    ratios = [line["ratio"] for line in trainer.state.log_history if "ratio" in line]
    assert len(ratios) == 2
    assert ratios == pytest.approx([1.0, 1.0], abs=1e-5)


def test_lora_trains_a_policy_that_sees(start, tmp_path):
    peft = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trainer_of(start, tmp_path, playing, peft_config=peft)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(before[name], p)]
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)
    assert all("lora_" in name for name in moved)


def test_a_chat_with_too_many_pictures_ends_its_episode_alone(start, chats, tmp_path):
    trainer = trainer_of(start, tmp_path, playing, max_context_tokens=50)
    answers = trainer.generate(chats)
    assert [isinstance(answer, ContextOverflow) for answer in answers] == [False, True, False, False, False, False]
