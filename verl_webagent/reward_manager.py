"""The reward manager `webagent`: a `webagent_core` reward manager behind verl's reward loop.

`reward.reward_manager.name=webagent webagent.reward_manager=package.module:Class`. The agent loop `webagent` leaves the
reward open then and hands its trajectory on; verl's reward workers score it, as many at a time as they are many.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from verl_webagent.agent_loop import TRAJECTORY
from verl_webagent.recipe import node_of
from webagent_core.episode.trajectory import Trajectory
from webagent_core.rewards.reward_manager import RewardManager, record, score_all


def load(name: str) -> RewardManager:
    """An instance of the class that "package.module:Class" names. Raises ValueError where there is none."""
    try:
        manager = pkgutil.resolve_name(name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"webagent.reward_manager = {name!r}: no package.module:Class to call ({error})") from None
    if not isinstance(manager, RewardManager):
        raise ValueError(f"webagent.reward_manager = {name!r}: allowed is a subclass of {RewardManager.__module__}")
    return manager


@register("webagent")
class WebAgentRewardManager(RewardManagerBase):
    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        name = node_of(config)["reward_manager"]
        if not name:
            raise ValueError(
                "webagent.reward_manager is missing: reward.reward_manager.name=webagent needs the class to score "
                "with, as package.module:Class"
            )
        self.manager = load(name)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Called once a session, with all of its rows in the order played."""
        extra = data.non_tensor_batch["tool_extra_fields"]
        trajectory = extra[0].get(TRAJECTORY)
        if not isinstance(trajectory, Trajectory):
            raise ValueError(
                f"reward manager 'webagent' scores trajectories of the agent loop 'webagent', and was given "
                f"{sorted(extra[0])}"
            )
        record([trajectory], await score_all(self.manager, [trajectory]))
        told = {"acc": float(trajectory.success), "valid": trajectory.valid, "exit_status": str(trajectory.exit_status)}
        return {"reward_score": trajectory.reward if trajectory.valid else 0.0, "reward_extra_info": told}
