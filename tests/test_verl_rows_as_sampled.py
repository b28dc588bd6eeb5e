"""What verl's side trains on is what the policy was given and what it sampled, under every paper's context: the server
that plays and the engine that trains give the same log-probabilities for the rows that the agent loop made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from test_rows_as_sampled import GOALS, TURNS, page, screenshot, shown_in
from test_verl_cpu import started
from transfer_queue import KVBatchMeta
from transformers import AutoConfig, AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tokenizer import hf_processor
from verl_harness import VerlSession, rows_of, untrained_eyes

from verl_webagent.agent_loop import WebAgentLoop
from verl_webagent.agent_loop_manager import WebAgentLoopWorker
from verl_webagent.dataset import TaskDataset
from webagent_core.episode.contexts import CONTEXTS, ScreenshotContext
from webagent_core.episode.pictures import pictures_of
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.policy.tiny import BASE

pytestmark = pytest.mark.slow


async def played(loop: WebAgentLoop, name: str, eyes: bool) -> tuple[Trajectory, list[AgentLoopOutput]]:
    """An episode under this context, of pages that nobody acts on, and the rows that the agent loop makes of it."""
    shows = issubclass(CONTEXTS[name], ScreenshotContext)
    context = CONTEXTS[name](**({"observation": "screenshot" if eyes else "text"} if shows else {}))
    steps: list[Step] = []
    calls: list[Any] = []
    for turn in range(TURNS):
        chat = context.messages(GOALS[0], steps, page(turn), screenshot(turn))
        images = pictures_of(chat)
        assert bool(images) == (eyes and shows)
        prompt = await loop._prompt_ids(chat, images)
        call = await loop.server_manager.generate(
            request_id=f"{name}/{turn}",
            prompt_ids=prompt,
            sampling_params={"temperature": 1.0, "logprobs": True, "max_tokens": 5, "seed": turn},
            image_data=images or None,
        )
        calls.append(call)
        text, ids = loop.tokenizer.decode(call.token_ids, skip_special_tokens=True), list(call.token_ids)
        steps.append(Step("", page(turn), chat, text, screenshot=screenshot(turn), prompt_ids=prompt, response_ids=ids))
    trajectory = Trajectory(name, 0, GOALS[0], "", steps, ExitStatus.ANSWERED, reward=1.0)
    return trajectory, loop._rows(trajectory, calls, {"global_steps": 1})


@pytest.mark.parametrize("eyes", [False, True], ids=["reads", "sees"])
async def test_the_trainer_gives_every_row_the_log_probabilities_it_was_sampled_with(eyes: bool, tmp_path: Path):
    if eyes:
        pytest.importorskip("torchvision")
    model = untrained_eyes(tmp_path) if eyes else BASE
    recipe, overrides = ("openwebrl", ["webagent.profile=embedded_vision"]) if eyes else ("webagent_r1", [])
    with VerlSession([f"actor_rollout_ref.model.path={model}", *overrides], recipe=recipe) as session:
        loop = WebAgentLoop(
            trainer_config=DictConfigWrap(session.config),
            server_manager=await started(model, prompt_length=1024, response_length=5),
            tokenizer=AutoTokenizer.from_pretrained(model),
            processor=hf_processor(str(model)),
            dataset_cls=TaskDataset,
            data_config=DictConfigWrap(session.config.data),
            hf_model_type=AutoConfig.from_pretrained(model).model_type,
        )
        worker = WebAgentLoopWorker.__new__(WebAgentLoopWorker)  # for what it makes of a row, without its services
        worker.processor, worker.tokenizer, worker.mm_processor_kwargs = loop.processor, loop.tokenizer, {}
        trajectories, outputs = [], []
        for name in sorted(CONTEXTS):
            trajectory, rows = await played(loop, name, eyes)
            trajectories.append(trajectory)
            outputs += rows
        keys, fields, tags = rows_of(trajectories)
        for row, field, step in zip(outputs, fields, [s for t in trajectories for s in t.steps], strict=True):
            ids = torch.tensor([row.prompt_ids + row.response_ids])
            assert ids[0].tolist() == step.prompt_ids + step.response_ids == field["input_ids"].tolist()
            assert row.response_mask == [1] * len(step.response_ids)
            seen = worker._compute_multi_modal_inputs(row, ids[0])
            field["position_ids"] = worker._compute_position_ids(ids, torch.ones_like(ids), seen)[0]
            field["multi_modal_inputs"] = seen
            assert len(seen.get("image_grid_thw", ())) == shown_in(step.messages)
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
        batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={"temperature": 1.0})
        batch = session.trainer._balance_batch(batch, metrics={})
        batch = session.trainer._compute_old_log_prob(batch, metrics={})
        recomputed = session.column(batch, "old_log_probs")
        session.clear(batch)
    sampled = {tuple(key.rsplit("_", 2)): row.response_logprobs for key, row in zip(keys, outputs, strict=True)}
    assert len(sampled) == len(CONTEXTS) * TURNS == len(recomputed)
    for (group, number, turn), logps in recomputed.items():
        wanted = torch.tensor(sampled[group, str(number), str(turn)])
        torch.testing.assert_close(logps[: len(wanted)], wanted, atol=1e-4, rtol=0, msg=f"{group}, step {turn}")
