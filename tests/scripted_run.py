"""A recipe's run on a browser that tests share, with answers of a script: it is known which attempts succeed.

Pages, rewards, contexts, sampling, trainer and rows are those of a run. Only what the policy says is not its own: it is
what a scripted demonstrator does on the page, or giving up.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from trl_webagent.run import Run
from webagent_core.browser.page import PageLimits
from webagent_core.episode.browser_rollout import BrowserRollout, settings_of
from webagent_core.episode.contexts import goal_of
from webagent_core.episode.runner import EpisodeRunner, Response
from webagent_core.episode.trajectory import Trajectory
from webagent_core.policy.tiny import BASE
from webagent_core.policy.vision_processing import counter_of
from webagent_core.recipe import load_recipe
from webagent_core.tasks.demonstrations import demonstrate
from webagent_core.tasks.task import Task

G = 4
# Of a task, the number of its attempt and of the play (-1: before training): whether the demonstrator plays it.
Succeeds = Callable[[Task, int, int], bool]
SMALL = {
    "policy.warm_up": None,
    "train.updates": 1,
    "rollout.group_size": G,
    "rollout.groups_per_update": 2,
    "rollout.top_k": None,
    "train.num_iterations": 1,
    "train.warmup_updates": 0,
    "train.learning_rate": 1e-3,
    "tasks.names": ["miniwob/click-link", "miniwob/click-option"],  # of one step and of two
}


@pytest.fixture(scope="module")
def rollout() -> Iterator[BrowserRollout]:
    patient = PageLimits(load_seconds=60, call_seconds=60, action_seconds=20, settle_seconds=20)  # with a busy machine
    with BrowserRollout(pages=4, page_limits=patient) as rollout:
        yield rollout


@dataclass
class ScriptedRunner(EpisodeRunner):
    """Never asks the policy, and makes the tokens of what it says with the policy's tokenizer."""

    succeeds: Succeeds = lambda task, attempt, play: True
    give_up: str = 'Action: stop("")'
    number: int = -1  # of the play
    attempts: Counter[Task] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokenizer = AutoTokenizer.from_pretrained(BASE)

    def begin(self) -> None:
        self.number += 1
        self.attempts.clear()

    async def run(self, task: Task, generate: Any, watch: Any = None) -> Trajectory:
        succeeds = self.succeeds(task, self.attempts[task], self.number)
        self.attempts[task] += 1
        page = ""

        def see(seen: Any) -> None:
            nonlocal page
            page = seen.text

        async def answer(messages: list[dict]) -> Response:
            if not succeeds:
                return self.response(messages, self.give_up)
            return self.response(messages, demonstrate(task.name, goal_of(messages), page, 0.0, random.Random(0)))

        return await super().run(task, answer, see)

    def response(self, messages: list[dict], text: str) -> Response:
        chat = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        said = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Response(text, list(chat["input_ids"]), [*said, self.tokenizer.eos_token_id], "stop")


def on(run: Run, rollout: BrowserRollout, succeeds: Succeeds, **changed: Any) -> None:
    """Let a run play on the shared browser, as its recipe says and by a script."""
    asked = settings_of(run.recipe, counter_of(run.recipe))
    own = {name: asked[name] for name in ("context", "budget", "limits")}
    run.rollout, shared = copy.copy(rollout), rollout.runner
    run.rollout.runner = ScriptedRunner(
        shared.pool, run.sampling.task_set(shared.task_set), screenshots=False, succeeds=succeeds, **own | changed
    )
    run.evaluate = lambda phase: None  # what is learned is not looked at


class ScriptedRun(Run):
    """The run, and what passed through it: what each play played, each update's rows and the weights it began with.

    Settings as for `load_recipe`, with two underscores for the dot.
    """

    def __init__(self, name: str, out: Path, rollout: BrowserRollout, succeeds: Succeeds, **settings: Any) -> None:
        self.plays: list[list[Trajectory]] = []
        self.batches: list[dict[str, Any]] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        give_up = {"give_up": settings.pop("give_up")} if "give_up" in settings else {}
        given = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
        super().__init__(load_recipe(name, overrides=given), out, resume=False)
        on(self, rollout, succeeds, **give_up)
        self.trainer = self._trainer(str(BASE))
        stock = self.trainer._generate_and_score_completions

        def watched(inputs: Any) -> dict[str, Any]:
            batch = stock(inputs)
            self.batches.append(batch)
            self.weights.append({name: each.clone() for name, each in self.trainer.model.state_dict().items()})
            return batch

        self.trainer._generate_and_score_completions = watched

    def go(self) -> ScriptedRun:
        self._train(None)
        return self

    def _play(self, rows: list[dict[str, Any]], generate: Any) -> list[Trajectory]:
        if generate != self.trainer.generate:  # a look at first pages alone
            return super()._play(rows, generate)
        self.rollout.runner.begin()
        self.plays.append(super()._play(rows, generate))
        return self.plays[-1]
