"""LoRA on verl without a GPU: adapters alone are trained, and what plays is what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")

from test_smollm2 import folder  # noqa: E402, F401
from toy_policy import base  # noqa: E402, F401
from verl_harness import VerlSession  # noqa: E402

pytestmark = pytest.mark.slow

COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_prob")


@pytest.mark.parametrize("policy", ["base", "folder"], ids=["tiny", "smollm2"])
def test_merged_adapters_play_as_they_are_trained_beside_their_base(policy, request, monkeypatch):
    monkeypatch.setenv("TOY_TOKENS", "4")
    overrides = [
        f"actor_rollout_ref.model.path={request.getfixturevalue(policy)}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={Path(__file__).parent / 'toy_loops.yaml'}",
        'webagent.set=["policy.lora.r=4", "policy.lora.alpha=8.0", "objective.beta=0.1"]',
        "actor_rollout_ref.actor.optim.lr=0.003",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.ppo_epochs=1",
        "data.train_batch_size=2",
    ]
    with VerlSession(overrides) as session:
        session.start_rollout()
        for update in (1, 2):
            metrics = session.step(*COLUMNS)
            assert metrics["webagent/invalid"] == 0
            played, trained, reference = (
                torch.cat([session.columns[name][key] for key in session.columns[COLUMNS[0]]]) for name in COLUMNS
            )
            torch.testing.assert_close(trained, played, atol=1e-4, rtol=0)
            # The reference is the model without its adapters, and those start at nothing.
            moved = (trained - reference).abs().max()
            assert moved < 1e-4 if update == 1 else moved > 1e-3
            gradient = session.gradient()
            assert gradient and all("lora_" in name for name in gradient)
            assert any(each.abs().max() > 0 for each in gradient.values())
