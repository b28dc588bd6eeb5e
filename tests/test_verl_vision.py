"""A policy that sees, through verl's whole trainer: pictures in prompts, in log-probabilities and in updates."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

import torch
from verl_harness import VerlSession, untrained_eyes

pytestmark = pytest.mark.slow

# An untrained policy hits nothing, and groups of failures teach nothing: so it is paid for even tokens.
SETTINGS = [
    "reward.manager=toy_loops:EvenTokens",
    "reward.layers=false",
    "rollout.groups_per_update=3",
    "rollout.group_size=4",
    "train.learning_rate=0.003",
]
COLUMNS = ("old_log_probs", "rollout_log_probs", "multi_modal_inputs", "loss_coefficient")


def test_three_updates_are_played_and_trained_on_pictures(tmp_path):
    pytest.importorskip("torchvision")
    overrides = [
        f"actor_rollout_ref.model.path={untrained_eyes(tmp_path)}",
        "webagent.profile=embedded_vision",
        f"webagent.set={SETTINGS}",
    ]
    log_probs = []
    with VerlSession(overrides, recipe="openwebrl") as session:
        session.start_rollout()
        for _ in range(3):
            metrics = session.step(*COLUMNS)
            assert metrics["webagent/invalid"] == 0 and metrics["webagent/trajectories"] >= 12
            seen = session.columns["multi_modal_inputs"]
            assert all(len(row["pixel_values"]) == 140 * len(row["image_grid_thw"]) for row in seen.values())
            in_loss = [key for key, coefficient in session.columns["loss_coefficient"].items() if coefficient]
            assert len(in_loss) >= metrics["webagent/rows_in_loss"] > 0
            # The server that played and the engine that trains say the same of what they saw, after updates too.
            for key, played in session.columns["rollout_log_probs"].items():
                torch.testing.assert_close(session.columns["old_log_probs"][key], played, atol=1e-4, rtol=0)
            log_probs.append(torch.cat(list(session.columns["rollout_log_probs"].values())))
            # What the pictures went through learns.
            eyes = {name: gradient for name, gradient in session.gradient().items() if ".visual." in name}
            assert any(name.endswith("patch_embed.proj.weight") for name in eyes)
            assert all(gradient.abs().max() > 0 for name, gradient in eyes.items() if name.endswith("proj.weight"))
    means = [float(each.mean()) for each in log_probs]
    assert means[0] != pytest.approx(means[2], rel=1e-3)  # the policy that played last is another one
