"""For tests of the verl side, where workers can import it: an agent loop with two to four steps of one sampled answer
each and every way to fail, and a reward that tells any two attempts apart."""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from webagent_core.episode.trajectory import Trajectory
from webagent_core.rewards import RewardManager


class EvenTokens(RewardManager):
    """The share of even ones among a trajectory's sampled token ids."""

    def score(self, trajectory: Trajectory) -> float:
        tokens = [token for step in trajectory.steps for token in step.response_ids]
        return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


class ToyLoop(AgentLoopBase):
    """Session s of task t plays 2 + s % 3 steps; its reward is the share of even token ids, so groups are not flat.

    $TOY_LOOP is JSON: {"<group>/<session>": what it does instead}, with "*" for any session: empty, none, raise, hang,
    flat (reward 0), win (reward 1), "turns N".
    """

    async def run(self, sampling_params: dict[str, Any], **sample: Any) -> Any:
        index, session = int(sample["index"]), int(sample["session_id"])
        plans = json.loads(os.environ.get("TOY_LOOP", "{}"))
        plan = plans.get(f"{index}/{session}") or plans.get(f"{index}/*")
        match plan:
            case "empty":
                return []
            case "none":
                return None
            case "raise":
                raise RuntimeError(f"the environment of group {index}, session {session} died")
            case "hang":
                await asyncio.sleep(3600)
        rows, even, tokens = [], 0, 0
        turns = int(plan.split()[1]) if plan and plan.startswith("turns") else 2 + session % 3
        for turn in range(turns):
            ids = await self.ct_build_initial_tokens([{"role": "user", "content": f"press {index} {turn}"}])
            seed = zlib.crc32(f"{sample['global_steps']}/{index}/{session}/{turn}".encode())
            answer = await self.server_manager.generate(
                request_id=f"{sample['uid']}_{session}",
                prompt_ids=ids,
                sampling_params={**sampling_params, "max_tokens": int(os.environ.get("TOY_TOKENS", "6")), "seed": seed},
            )
            even += sum(token % 2 == 0 for token in answer.token_ids)
            tokens += len(answer.token_ids)
            rows.append(
                AgentLoopOutput(
                    prompt_ids=ids,
                    response_ids=answer.token_ids,
                    response_mask=[1] * len(answer.token_ids),
                    response_logprobs=answer.log_probs,
                    num_turns=turn + 1,
                    metrics=AgentLoopMetrics(),
                    extra_fields={**answer.extra_fields, "exit_status": "answered"},
                )
            )
        reward = {"flat": 0.0, "win": 1.0}.get(plan, even / tokens)
        for row in rows:
            row.reward_score = reward
            row.extra_fields["reward_extra_info"] = {"acc": reward}
            row.extra_fields["group"] = f"{sample['task']}#{sample['seed']}"
        return rows
