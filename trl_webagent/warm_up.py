"""Warm-up by imitation: demonstrations from the real browser, then TRL's SFTTrainer. Kept, so that a second run
starts at once.

A TRL run does this itself. For a run on another trainer, `python -m trl_webagent.warm_up RECIPE_FOLDER --link PATH`
warms the recipe's policy up, or finds the kept one, and makes PATH a link to its folder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import webagent_core
from trl_webagent.console import Console, StepBar, be_quiet, quiet
from trl_webagent.image_rows import PictureCollator, imitation_rows
from trl_webagent.lora import lora_config
from webagent_core.cache import cache_folder
from webagent_core.command_line import overrides_of, parser
from webagent_core.episode.actions import Action
from webagent_core.episode.browser_rollout import BrowserRollout, settings_of
from webagent_core.episode.trajectory import Step, Trajectory
from webagent_core.policy.demonstrations import gather, retold
from webagent_core.policy.made_up_pages import MadeUpPages, words_of
from webagent_core.policy.tiny import start_of
from webagent_core.policy.tiny_vision import build_vision_policy
from webagent_core.policy.vision_demonstrations import gather as show_in_pictures
from webagent_core.policy.vision_processing import counter_of, load_processing_class, sees
from webagent_core.recipe import Recipe, load_recipe
from webagent_core.tasks.task import Task

_KEPT = ("url", "observation", "messages", "response", "error")  # of a demonstrated step


def warm_up(recipe: Recipe, rollout: BrowserRollout, console: Console) -> Path:
    """Folder of the policy that `recipe` starts from (model and tokenizer), warmed up: the kept one, or made now.

    With `policy.lora` the warm-up trains adapters too; they are merged into the model, so that the method's own start
    at nothing and its reference is the warmed-up policy. The folder's name is a hash of everything that the result
    depends on.
    """
    settings, lora, seed = recipe.policy.warm_up, recipe.policy.lora, recipe.train.seed
    rows = _demonstrations(recipe, rollout, console)
    libraries = [(name, version(name)) for name in ("torch", "transformers", "trl", "tokenizers")]
    key = _hash(
        ["policy"],
        rows,
        settings.model_dump(),
        lora and lora.model_dump(),
        recipe.policy.model,
        _files_of(start_of(recipe)),
        seed,
        libraries,
        Path(__file__).read_text(),
    )
    folder = cache_folder() / f"warm-up-{key}"
    if folder.is_dir():
        console.say(f"warm-up: kept from an earlier run ({folder})")
        return folder
    learner, special = (_seeing if sees(start_of(recipe)) else _reading)(recipe, rows)
    making = folder.with_name(f"{folder.name}.{os.getpid()}")
    arguments = SFTConfig(
        output_dir=str(making / "trainer"),
        per_device_train_batch_size=settings.batch_size,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(20, settings.steps // 10),
        weight_decay=0.01,
        adam_beta2=0.98,
        max_length=recipe.rollout.max_context_tokens,
        seed=seed,
        save_strategy="no",
        report_to="none",
        logging_steps=max(1, settings.steps // 20),
        disable_tqdm=True,
        **special,
        **cpu_arguments(),
    )
    if lora:
        learner["peft_config"] = lora_config(lora)
    with console.progress("warm-up: imitation", settings.steps) as bar:
        trainer = SFTTrainer(args=arguments, callbacks=[StepBar(bar)], **learner)
        quiet(trainer)
        trainer.train()
    loss = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    console.say(
        f"warm-up: {settings.steps} steps on {len(rows)} demonstrated steps, loss {loss[0]:.2f} -> {loss[-1]:.2f}"
    )
    (trainer.model.merge_and_unload() if lora else learner["model"]).save_pretrained(making)
    learner["processing_class"].save_pretrained(making)
    shutil.rmtree(making / "trainer", ignore_errors=True)
    try:
        making.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(making)  # another run of the same settings was first, and made the same policy
    return folder


def _reading(recipe: Recipe, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of SFTTrainer and of SFTConfig to learn from text."""
    base, settings, seed = start_of(recipe), recipe.policy.warm_up, recipe.train.seed
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    count = round(len(rows) * settings.rehearsal / (1 - settings.rehearsal))
    made_up = _made_up(tokenizer, count, seed) if count else []
    learner = {"model": model, "processing_class": tokenizer, "train_dataset": Dataset.from_list(rows + made_up)}
    return learner, {"completion_only_loss": True, "train_sampling_strategy": "group_by_length"}


def _seeing(recipe: Recipe, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of SFTTrainer and of SFTConfig to learn from pictures. A start without weights gets random ones."""
    base, settings, seed = start_of(recipe), recipe.policy.warm_up, recipe.train.seed
    if settings.rehearsal:
        raise ValueError(
            f"policy.warm_up.rehearsal = {settings.rehearsal} is not allowed: 0, made-up pages are text and "
            "this policy sees"
        )
    if recipe.policy.model == "tiny_vision":
        model = build_vision_policy(AutoConfig.from_pretrained(base), seed)
    else:
        model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    processor = load_processing_class(base)
    imitated = imitation_rows(
        processor, [row["prompt"] for row in rows], [row["completion"][0]["content"] for row in rows]
    )
    learner = {
        "model": model,
        "processing_class": processor,
        "train_dataset": Dataset.from_list(imitated),
        "data_collator": PictureCollator(processor),
    }
    return learner, {"remove_unused_columns": False}


def _made_up(tokenizer: Any, count: int, seed: int) -> list[dict[str, Any]]:
    pages = MadeUpPages(words_of(tokenizer), seed)
    samples = [pages.sample() for _ in range(count)]
    return [{"prompt": chat, "completion": [{"role": "assistant", "content": response}]} for chat, response in samples]


def _files_of(model: str) -> list[tuple[str, int, int]]:
    """Name, size and time of a model's files, so that another model in the same folder is another model."""
    files = sorted(file for file in Path(model).glob("*") if file.is_file())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def _demonstrations(recipe: Recipe, rollout: BrowserRollout, console: Console) -> list[dict[str, Any]]:
    """Prompt and completion of each demonstrated step.

    Text is played once for all recipes with the same tasks and limits, and retold in the recipe's own context. Who sees
    is shown pictures of the recipe's own size, and points in its coordinates.
    """
    settings, seed = recipe.policy.warm_up, recipe.train.seed
    points = rollout.runner.coordinates is not None
    pages = [version("miniwob"), rollout.pool.browser_version, recipe.browser.viewport, recipe.rollout.max_steps]
    own = [
        recipe.type,
        recipe.context and recipe.context.model_dump(),
        recipe.policy.system_prompt,
        recipe.policy.coordinates,
        recipe.rollout.model_dump(include={"max_context_tokens", "max_response_tokens"}),
        _files_of(start_of(recipe)),  # whose tokens are counted
    ]
    key = _hash(
        ["browser", "episode", "policy", "tasks"],
        recipe.tasks.model_dump(),
        settings.demonstrations,
        settings.mistakes,
        seed,
        pages,
        own if points else None,
    )
    file = cache_folder() / f"demonstrations-{key}.json"
    if file.is_file():
        console.say(f"demonstrations: kept from an earlier run ({file})")
        episodes = json.loads(file.read_text())
    else:
        episodes = _play(recipe, rollout, console, show_in_pictures if points else gather)
        file.parent.mkdir(parents=True, exist_ok=True)
        making = file.with_suffix(f".{os.getpid()}")
        making.write_text(json.dumps(episodes))
        making.replace(file)
    trajectories = [_trajectory(episode) for episode in episodes]
    if not points:
        trajectories = [retold(rollout.runner, trajectory) for trajectory in trajectories]
    return [
        {"prompt": step.messages, "completion": [{"role": "assistant", "content": step.response}]}
        for trajectory in trajectories
        for step in trajectory.steps
    ]


def _play(recipe: Recipe, rollout: BrowserRollout, console: Console, show: Callable) -> list[dict[str, Any]]:
    """The episodes that no page broke."""
    settings, seed = recipe.policy.warm_up, recipe.train.seed
    names, rng = recipe.tasks.names, random.Random(f"demonstrations/{seed}")
    tasks = [
        Task(names[i % len(names)], rng.randrange(*recipe.tasks.train_seeds)) for i in range(settings.demonstrations)
    ]
    with console.progress("warm-up: demonstrations", len(tasks)) as bar:
        trajectories = show(rollout, tasks, mistakes=settings.mistakes, seed=seed, progress=lambda _: bar.advance(0))
    good = [trajectory for trajectory in trajectories if trajectory.valid]
    succeeded = sum(trajectory.success for trajectory in good) / len(good)
    console.say(f"demonstrations: {len(good)} episodes of a demonstrator that succeeds in {succeeded:.0%}")
    return [_plain(trajectory) for trajectory in good]


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    """What is kept of a demonstrated episode."""
    steps = [
        {name: getattr(step, name) for name in _KEPT} | {"action": step.action and asdict(step.action)}
        for step in trajectory.steps
    ]
    return {"task": trajectory.task, "seed": trajectory.seed, "goal": trajectory.goal, "steps": steps}


def _trajectory(episode: dict[str, Any]) -> Trajectory:
    task = Task(episode["task"], episode["seed"])
    steps = [Step(**step | {"action": step["action"] and Action(**step["action"])}) for step in episode["steps"]]
    return Trajectory(task.name, task.seed, task.group, episode["goal"], steps)


def _hash(rooms: Sequence[str], *inputs: Any) -> str:
    """Hash of the files in these rooms of webagent_core and of the inputs."""
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode())
    for room in rooms:
        files = (Path(webagent_core.__file__).parent / room).rglob("*")
        for file in sorted(file for file in files if file.is_file() and file.suffix != ".pyc"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    known = parser("RECIPE_FOLDER", "TRL")
    known.add_argument("recipe_folder", type=Path)
    known.add_argument("--link", type=Path, required=True, help="is made a link to the policy's folder")
    arguments = known.parse_args()
    recipe = load_recipe(arguments.recipe_folder, arguments.preset, arguments.profile, overrides_of(arguments))
    arguments.link.parent.mkdir(parents=True, exist_ok=True)
    arguments.link.unlink(missing_ok=True)
    with BrowserRollout(**settings_of(recipe, counter_of(recipe))) as rollout:
        arguments.link.symlink_to(warm_up(recipe, rollout, Console()).resolve())


def cpu_arguments() -> dict[str, Any]:
    """Trainer arguments that a machine without an accelerator needs; empty on one that has one."""
    if torch.accelerator.is_available():
        return {}
    return {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}


if __name__ == "__main__":
    be_quiet()
    main()
