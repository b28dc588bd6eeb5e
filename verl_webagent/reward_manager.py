"""The reward manager `webagent`: the one that the recipe names (`reward.manager`), behind verl's reward loop.

Our YAML chooses it where the task's own program does not say all: `reward.reward_manager.name=webagent`. The agent loop
`webagent` leaves the reward open then and hands its trajectory on; verl's reward workers, processes beside those with
the browsers, score it, as many at a time as they are given.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_webagent.agent_loop import TRAJECTORY
from verl_webagent.recipe import recipe_of
from verl_webagent.sessions import KEPT_IN, SCORED
from webagent_core.episode.trajectory import Trajectory
from webagent_core.rewards.for_recipe import rewards_for
from webagent_core.rewards.reward_manager import record, score_one


@register("webagent")
class WebAgentRewardManager(RewardManagerBase):
    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        self.manager = rewards_for(recipe_of(config))

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Called once a session, with all of its rows in the order played."""
        extra = data.non_tensor_batch["tool_extra_fields"]
        trajectory = extra[0].get(TRAJECTORY)
        if not isinstance(trajectory, Trajectory):
            raise ValueError(
                f"reward manager 'webagent' scores trajectories of the agent loop 'webagent', and was given "
                f"{sorted(extra[0])}"
            )
        record([trajectory], [await score_one(self.manager, trajectory)])
        told: dict[str, Any] = {
            "acc": float(trajectory.success),
            "valid": trajectory.valid,
            "exit_status": str(trajectory.exit_status),
            "outcome": trajectory.score if trajectory.valid else 0.0,
        }
        if KEPT_IN in extra[0]:  # somebody takes it out again
            told[SCORED] = {name: getattr(trajectory, name) for name in ("outcome", "evidence", "detail")}
        return {"reward_score": trajectory.reward if trajectory.valid else 0.0, "reward_extra_info": told}
