"""verl's session on real pages, without a trainer: a recipe's chats as token ids and images, and the rows they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from test_verl_cpu import started
from transformers import AutoConfig, AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.utils.tokenizer import hf_processor
from verl_harness import composed, untrained_eyes

from verl_webagent import agent_loop
from verl_webagent.agent_loop import TRAJECTORY, Browser, WebAgentLoop
from verl_webagent.dataset import TaskDataset
from webagent_core.episode.pictures import pictures_of
from webagent_core.episode.trajectory import Trajectory
from webagent_core.policy.tiny import BASE

pytestmark = pytest.mark.slow


async def session(monkeypatch: pytest.MonkeyPatch, model: Path, recipe: str, *overrides: str) -> list[AgentLoopOutput]:
    """The rows of one session of the recipe, with this model behind verl's CPU rollout server."""
    config = composed([f"actor_rollout_ref.model.path={model}", *overrides], recipe)
    monkeypatch.setattr(agent_loop, "_browser", browser := Browser())
    loop = WebAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=await started(model, prompt_length=1024, response_length=32),
        tokenizer=AutoTokenizer.from_pretrained(model),
        processor=hf_processor(str(model)),
        dataset_cls=TaskDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type=AutoConfig.from_pretrained(model).model_type,
    )
    try:
        sample: dict[str, Any] = {"uid": "1", "session_id": 0, "global_steps": 1}
        sample |= {"task": "miniwob/click-test", "seed": 1}
        return await loop.run({"temperature": 1.0, "logprobs": True}, **sample)
    finally:
        await browser._stack.aclose()


def played(rows: list[AgentLoopOutput]) -> Trajectory:
    return rows[0].extra_fields[TRAJECTORY]


@pytest.mark.parametrize("recipe", ["webagent_r1", "uitars2", "arpo"])
async def test_a_row_is_the_chat_of_its_step_and_what_was_sampled(monkeypatch, recipe):
    short = "webagent.set=['rollout.max_steps=2','rollout.max_format_errors=4']"
    rows = await session(monkeypatch, BASE, recipe, short)
    tokenizer, trajectory = AutoTokenizer.from_pretrained(BASE), played(rows)
    assert trajectory.valid and len(rows) == len(trajectory.steps) >= 1
    for row, step in zip(rows, trajectory.steps, strict=True):
        encoded = tokenizer.apply_chat_template(step.messages, add_generation_prompt=True, return_dict=True)
        assert row.prompt_ids == step.prompt_ids == encoded["input_ids"]
        assert row.response_ids == step.response_ids and step.response_ids
        assert step.response == tokenizer.decode(row.response_ids, skip_special_tokens=True)
        assert row.response_mask == [1] * len(row.response_ids) and len(row.response_logprobs) == len(row.response_ids)
        assert row.multi_modal_data is None


async def test_a_prompt_of_a_recipe_is_cut_to_what_verl_may_be_given(monkeypatch):
    small = "webagent.set=['rollout.max_steps=3','rollout.max_context_tokens=46','rollout.max_format_errors=4']"
    trajectory = played(await session(monkeypatch, BASE, "uitars2", small))
    assert all(len(step.prompt_ids) + 32 <= 46 for step in trajectory.steps)
    assert str(trajectory.exit_status) == "context_overflow" or any(step.cut for step in trajectory.steps)


async def test_a_policy_that_sees_is_given_its_pictures_and_trained_on_them(monkeypatch, tmp_path):
    pytest.importorskip("torchvision")
    rows = await session(monkeypatch, untrained_eyes(tmp_path), "openwebrl", "webagent.profile=embedded_vision")
    tokenizer, trajectory = AutoTokenizer.from_pretrained(tmp_path), played(rows)
    picture = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert len(rows) == len(trajectory.steps) >= 1
    for row, step in zip(rows, trajectory.steps, strict=True):
        images = row.multi_modal_data["images"]
        assert [image.tobytes() for image in images] == [image.tobytes() for image in pictures_of(step.messages)]
        assert images[0].size == (160, 224) and row.prompt_ids.count(picture) == 35 * len(images)
        assert picture not in row.response_ids and row.response_ids == step.response_ids


async def test_pictures_for_a_policy_that_does_not_see_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="processor=None"):
        await session(monkeypatch, BASE, "openwebrl", "webagent.profile=null", "webagent.set=['policy.model=tiny']")
