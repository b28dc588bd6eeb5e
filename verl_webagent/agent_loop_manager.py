"""What happens when an agent loop, ours or a user's, does not come back with rows.

Stock verl drops a session that returns nothing or raises, loses a whole group that returned nothing without a count,
and waits forever for one that hangs. Here each of them becomes one row that is not valid: it is in no statistic and no
loss, and it is counted. Named in the configuration as
`+actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_webagent.agent_loop_manager.WebAgentLoopManager`.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from typing import Any

import ray
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_webagent.agent_loop import TRAJECTORY, broken, empty_row
from verl_webagent.recipe import node_of
from verl_webagent.run_log import keep, partition
from verl_webagent.sessions import KEPT_IN, SCORED
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.rewards.reward_manager import RewardError

logger = logging.getLogger(__name__)

_scoring: ContextVar[bool] = ContextVar("scoring", default=False)


class WebAgentLoopWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's worker; `webagent.session_seconds` bounds a session of any loop."""

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **sample: Any
    ) -> None:
        fatal = ""
        seconds = node_of(self.config)["session_seconds"]
        where = f"session {sample['session_id']} of {sample['uid']}"
        try:
            async with asyncio.timeout(seconds) as limit:
                return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, **sample)
        except TimeoutError as error:
            told = f"no end after {seconds:g} s" if limit.expired() else f"TimeoutError: {error}"
            logger.warning("agent loop %r, %s: %s", agent_name, where, told)
        except RewardError as error:  # a mistake in somebody's class, which would spoil every trajectory: the run ends
            told, fatal = str(getattr(error, "cause", error)), str(error)  # Ray's holds the traceback of its worker
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            logger.error("agent loop %r raised in %s", agent_name, where, exc_info=error)
        await super()._agent_loop_postprocess([self._empty(sample, told, fatal)], trajectory["validate"], **sample)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **sample: Any) -> None:
        rows = output if isinstance(output, list) else [output]
        if not rows or not all(isinstance(row, AgentLoopOutput) for row in rows):
            what = "an empty list" if not rows else f"{output!r:.80}, allowed are AgentLoopOutput and lists of them"
            logger.warning("an agent loop returned %s", what)
            rows = [self._empty(sample, f"the agent loop returned {what}")]
        played = rows[0].extra_fields.get(TRAJECTORY)
        if isinstance(played, Trajectory):
            rows[0].extra_fields[KEPT_IN] = partition(validate)
            if validate:  # held-out tasks are measured by their own program, whatever the policy is trained for
                for row in rows:
                    row.reward_score = played.reward if played.valid else 0.0
        await super()._agent_loop_postprocess(rows, validate, **sample)

    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict) -> None:
        """verl's call of the reward manager; then the trajectory stays behind, and rows travel light."""
        scoring = _scoring.set(True)
        try:
            await super()._compute_score(outputs, kwargs)
        finally:
            _scoring.reset(scoring)
        extra = outputs[0].extra_fields
        played, where = extra.pop(TRAJECTORY, None), extra.pop(KEPT_IN, None)
        told = outputs[-1].extra_fields.get("reward_extra_info") or {}
        scored = told.pop(SCORED, {})
        if played is None or not node_of(self.config)["out"]:
            return
        if told.get("exit_status"):  # a judge may have failed, or found another reward: its process had a copy
            played.exit_status = ExitStatus(told["exit_status"])
            played.reward = outputs[-1].reward_score if told["valid"] else None
            for name, value in scored.items():
                setattr(played, name, value)
        await keep(f"{kwargs['uid']}_{kwargs['session_id']}", where, played)

    def _compute_position_ids(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # verl 0.9.1 pads a session's rows to one length for the reward manager, and fails where a row's positions have
        # the four axes of a vision model. No reward depends on positions.
        if _scoring.get():
            return torch.arange(input_ids.size(1)).unsqueeze(0)
        return super()._compute_position_ids(input_ids, *args, **kwargs)

    def _empty(self, sample: dict[str, Any], told: str, fatal: str = "") -> AgentLoopOutput:
        return empty_row(self.tokenizer, self.config, int(sample["global_steps"]), broken(told) | {"fatal": fatal})


class WebAgentLoopManager(AgentLoopManagerTQ):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(WebAgentLoopWorker)
