"""The agent loop `webagent`: verl's session, played by the same `EpisodeRunner` that TRL uses.

One row a step. The browser is opened once in each agent-loop worker and serves all of its sessions, a bounded number at
a time; the others wait for a page.
"""

from __future__ import annotations

import asyncio
import copy
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from omegaconf import DictConfig
from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from verl_webagent.recipe import recipe_of
from webagent_core.episode.browser_rollout import open_runner, sees_pictures, settings_of
from webagent_core.episode.contexts import CountTokens, chat_counter, context_for
from webagent_core.episode.pictures import pictures_of
from webagent_core.episode.runner import ContextOverflow, EpisodeRunner, Response
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.policy.vision_processing import picture_tokens
from webagent_core.sampling.curriculum import StepLimits
from webagent_core.sampling.stored import repeats_next
from webagent_core.tasks.task import Task

TRAJECTORY = "trajectory"  # where in a session's first row its `Trajectory` travels


class Browser:
    """This process's browser, opened by the first session that needs it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._runner: EpisodeRunner | None = None

    async def runner(self, config: DictConfig, counter: Callable[[], CountTokens]) -> EpisodeRunner:
        async with self._lock:
            if self._runner is None:
                settings = settings_of(recipe_of(config), counter())
                self._runner = await self._stack.enter_async_context(open_runner(**settings))
            return self._runner


_browser = Browser()


@register("webagent")
class WebAgentLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> list[AgentLoopOutput]:
        """Play the sample's task once. A row a step; one row without tokens of its own where no step was played."""
        recipe = recipe_of(self.config)
        task = Task(str(sample["task"]), int(sample["seed"]))
        session = f"{recipe.train.seed}/{sample['global_steps']}/{task.group}/{sample['session_id']}"
        calls: list[Any] = []  # one a step: a step is what follows an answer

        async def generate(messages: list[dict]) -> Response:
            images = pictures_of(messages)
            prompt_ids = await self._prompt_ids(messages, images)
            limit = recipe.rollout.max_context_tokens
            room = recipe.rollout.max_response_tokens
            if limit and len(prompt_ids) + room > limit:
                raise ContextOverflow(f"a prompt of {len(prompt_ids)} tokens leaves no room for {room} in {limit}")
            output = await self.server_manager.generate(
                request_id=f"{sample['uid']}_{sample['session_id']}",
                prompt_ids=prompt_ids,
                sampling_params={
                    **sampling_params,
                    "max_tokens": room,
                    "seed": zlib.crc32(f"{session}/{len(calls)}".encode()),
                },
                image_data=images or None,
            )
            calls.append(output)
            ids = list(output.token_ids)
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            return Response(text, prompt_ids, ids, "stop" if len(ids) < room else self._reason(ids))

        runner = await _browser.runner(self.config, self._counter)
        limits, update = StepLimits.of(recipe), max(0, int(sample["global_steps"]) - 1)
        runner.max_steps_of = lambda name: limits(name, update)  # sessions in flight are of neighbouring updates
        trajectory = await runner.run(task, generate)
        return self._rows(trajectory, calls, sample)

    async def _prompt_ids(self, messages: list[dict], images: list[Image.Image]) -> list[int]:
        """The chat as tokens, whole: verl's own helper cuts a long one from the left without a word.

        Raises:
            ValueError: there are images, and the model is none that sees.
        """
        self._assert_mm_supported(bool(images))
        build = self.continuous_token_builder.build_initial_tokens
        return await self.loop.run_in_executor(None, lambda: list(build(messages, images=images or None)))

    def _counter(self) -> CountTokens:
        """Counts what `_prompt_ids` makes of a chat; with a copy, as that one tokenises in other threads."""
        recipe = recipe_of(self.config)
        if self.processor is not None and sees_pictures(context_for(recipe)):
            return chat_counter(copy.deepcopy(self.tokenizer), picture_tokens(self.processor, recipe))
        builder = copy.deepcopy(self.continuous_token_builder)
        return lambda messages: len(builder.build_initial_tokens(messages))

    def _reason(self, ids: list[int]) -> str:
        return "stop" if ids and ids[-1] == self.tokenizer.eos_token_id else "length"

    def _rows(self, trajectory: Trajectory, calls: list[Any], sample: dict[str, Any]) -> list[AgentLoopOutput]:
        about = {
            "valid": trajectory.valid,
            "exit_status": str(trajectory.exit_status),
            "group": trajectory.group,
            "detail": trajectory.detail,
        }
        reward = trajectory.reward if trajectory.valid else 0.0
        if self.config.reward.reward_manager.name == "webagent":
            reward = None  # so that verl asks that manager
        told = {"acc": float(trajectory.success), "valid": trajectory.valid, "exit_status": about["exit_status"]}
        repeats = repeats_next(trajectory)
        rows = [
            AgentLoopOutput(
                prompt_ids=step.prompt_ids,
                response_ids=step.response_ids,
                response_mask=[1] * len(step.response_ids),
                response_logprobs=call.log_probs,
                reward_score=reward,
                num_turns=number,
                multi_modal_data={"images": images} if (images := pictures_of(step.messages)) else None,
                metrics=AgentLoopMetrics(),
                extra_fields={
                    **call.extra_fields,
                    **about,
                    "step": number,
                    "repeats_next": repeats[number - 1],
                    "reward_extra_info": told,
                },
            )
            for number, (step, call) in enumerate(zip(trajectory.steps, calls, strict=False), start=1)
            if step.response_ids
        ]
        if not rows:
            rows = [empty_row(self.tokenizer, self.config, int(sample["global_steps"]), about, reward, told)]
        rows[0].extra_fields[TRAJECTORY] = trajectory  # the worker takes it out again, after the reward manager
        return rows


def empty_row(
    tokenizer: Any,
    config: DictConfig,
    global_steps: int,
    about: dict[str, Any],
    reward: float | None = 0.0,
    told: dict[str, Any] | None = None,
) -> AgentLoopOutput:
    """A row that stands for a session without one: in verl, a session that leaves none is not even counted."""
    token = tokenizer.eos_token_id
    return AgentLoopOutput(
        prompt_ids=[token],
        response_ids=[token],
        response_mask=[0],
        response_logprobs=[0.0] if config.actor_rollout_ref.rollout.calculate_log_probs else None,
        reward_score=reward,
        num_turns=0,
        metrics=AgentLoopMetrics(),
        extra_fields={
            **about,
            "step": 0,
            "min_global_steps": global_steps,
            "max_global_steps": global_steps,
            "reward_extra_info": told or {"acc": 0.0, "valid": False, "exit_status": about["exit_status"]},
        },
    )


def broken(error: str) -> dict[str, Any]:
    """What is told of a session that no policy can have ended."""
    return {"valid": False, "exit_status": str(ExitStatus.ENV_ERROR), "group": None, "detail": error}
