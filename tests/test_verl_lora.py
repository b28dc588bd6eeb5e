"""LoRA on verl without a GPU: adapters alone are trained, and what plays is what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("verl")

from test_smollm2 import folder  # noqa: E402, F401
from test_step_grpo_trainer import load  # noqa: E402
from toy_policy import base  # noqa: E402, F401
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl_harness import VerlSession  # noqa: E402

from verl_webagent.cpu.engines import CPUEngineWithLMHead  # noqa: E402

COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_prob")


@pytest.mark.slow
@torch.no_grad()
def test_the_rollout_is_given_base_plus_adapters_in_full_precision_and_the_engine_keeps_them_apart(
    base,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        engine = CPUEngineWithLMHead(
            HFModelConfig(
                path=str(base),
                use_remove_padding=False,
                enable_gradient_checkpointing=False,
                lora_rank=4,
                lora_alpha=8,
                lora={"merge": True},
            ),
            FSDPEngineConfig(strategy="fsdp2"),
            FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
            CheckpointConfig(),
        )
        engine.initialize()
        for name, parameter in engine.module.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
        before = weights(engine.module)
        given, adapters = engine.get_per_tensor_param()
        given = dict(given)
        assert adapters is None
        plain = load(base).state_dict()
        assert given.keys() == plain.keys()
        for name, weight in plain.items():
            assert given[name].dtype == torch.float32
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{layer}.lora_A.default.weight" in before:
                b, a = (before[f"{layer}.lora_{each}.default.weight"] for each in "BA")
                weight = weight + 8 / 4 * b @ a
            torch.testing.assert_close(given[name], weight, atol=1e-6, rtol=0)
        after = weights(engine.module)
        assert all(torch.equal(before[name], after[name]) for name in before)
    finally:
        dist.destroy_process_group()


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.full_tensor().detach().clone() for name, each in module.named_parameters()}


@pytest.mark.slow
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
