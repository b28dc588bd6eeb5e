"""Rewards on verl without a run: a class that is wrong is named, and what a judge did counts as how a session ended."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")

from reward_runs import WRONG, check_named
from verl_harness import composed

from verl_webagent.agent_loop import TRAJECTORY
from verl_webagent.reward_manager import WebAgentRewardManager
from verl_webagent.sessions import status_of
from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.policy.tiny import BASE
from webagent_core.rewards import RewardError


@pytest.mark.parametrize(("name", "said"), WRONG)
async def test_a_class_that_is_wrong_is_named_with_the_trajectory(name, said):
    chosen = [f"actor_rollout_ref.model.path={BASE}", f'webagent.set=["reward.manager=reward_runs:{name}"]']
    manager = WebAgentRewardManager(composed(chosen), None, None)
    played = Trajectory("miniwob/click-tab", 7, "miniwob/click-tab#7", exit_status=ExitStatus.ANSWERED, reward=1.0)
    fields = np.array([{TRAJECTORY: played}], dtype=object)
    with pytest.raises(RewardError) as error:
        await manager.run_single(SimpleNamespace(non_tensor_batch={"tool_extra_fields": fields}))
    check_named(str(error.value), name, said)


def test_a_session_ended_as_the_reward_manager_says_where_it_says_so():
    played = {"exit_status": "format_error", "valid": True}
    assert status_of(played) == status_of(played | {"reward_extra_info": {}}) == "format_error"
    assert status_of(played | {"reward_extra_info": {"exit_status": "judge_error", "valid": False}}) == "judge_error"
    assert status_of({}) == "answered"
