"""verl on CPU: process group, engines, weight transfer, and the rollout server on a text and on a vision model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.workers.config import FSDPEngineConfig, HFModelConfig, RolloutConfig

from verl_webagent.cpu.checkpoint_engine import FileCheckpointEngine
from verl_webagent.cpu.decoding import Batch, Row, Sampling, load_weights
from verl_webagent.cpu.engines import CPUEngineWithLMHead
from verl_webagent.cpu.rollout_server import HFAdapter, HFServer
from webagent_core.policy.tiny import BASE

TOKENIZER = AutoTokenizer.from_pretrained(BASE)
END = TOKENIZER.eos_token_id
PROMPTS = [
    TOKENIZER.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
    for text in (
        "press ok",
        "press 7",
        "12 ok, 31 home: click home",
        "enter the word in the text field",
    )
]


def forward_log_probs(model, prompt: list[int], tokens: list[int], temperature: float = 1.0, **inputs) -> torch.Tensor:
    """Log-probabilities of `tokens` after `prompt` by one forward pass over the whole sequence."""
    ids = torch.tensor([prompt + tokens])
    if inputs:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits
    logits = logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).flatten()


# --------------------------------------------------------------------------------------------------- generation, text


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()


def generate_all(model, rows: list[Row], join: int = 0) -> list[Row]:
    """Run rows to their end; the i-th joins after i times `join` tokens of the others."""
    batch, step, todo = Batch(model, eos=[END]), 0, list(rows)
    while todo or batch.rows:
        count = len(todo) if not join else (1 if step % join == 0 else 0)
        arriving, todo = todo[:count], todo[count:]
        batch.advance(arriving)
        step += 1
    return rows


def test_greedy_rows_that_come_and_go_equal_generate_of_each_alone(model):
    rows = [Row(prompt, Sampling(max_tokens=6 + 5 * i, temperature=0)) for i, prompt in enumerate(PROMPTS)]
    generate_all(model, rows, join=3)
    for row in rows:
        alone = model.generate(
            torch.tensor([row.prompt]), attention_mask=torch.ones(1, len(row.prompt), dtype=torch.long),
            do_sample=False, max_new_tokens=row.sampling.max_tokens, eos_token_id=END,
        )  # fmt: skip
        assert row.tokens == alone[0, len(row.prompt) :].tolist()


def test_seeded_rows_do_not_depend_on_what_they_share_the_batch_with(model):
    def rows():
        return [Row(prompt, Sampling(max_tokens=12, seed=i, ignore_eos=True)) for i, prompt in enumerate(PROMPTS)]

    together, staggered = generate_all(model, rows()), generate_all(model, rows(), join=2)
    alone = [generate_all(model, [row])[0] for row in rows()]
    assert [row.tokens for row in together] == [row.tokens for row in staggered] == [row.tokens for row in alone]
    other = generate_all(model, [Row(PROMPTS[0], Sampling(max_tokens=12, seed=99, ignore_eos=True))])[0]
    assert other.tokens != together[0].tokens


def test_log_probs_are_those_of_a_forward_pass_at_the_sampling_temperature(model):
    rows = [
        Row(prompt, Sampling(max_tokens=10, seed=1, temperature=temperature, top_k=top_k))
        for prompt, temperature, top_k in zip(PROMPTS, (0, 0.7, 1.0, 1.3), (-1, 5, -1, 3), strict=True)
    ]
    for row in generate_all(model, rows, join=2):
        expected = forward_log_probs(model, row.prompt, row.tokens, row.sampling.temperature or 1.0)
        assert torch.allclose(torch.tensor(row.log_probs), expected, atol=1e-5, rtol=0)


def test_sampled_frequencies_are_the_probabilities_and_top_k_and_top_p_cut_them(model):
    def frequencies(count=1000, **sampling):
        rows = [Row(PROMPTS[0], Sampling(max_tokens=1, seed=seed, **sampling)) for seed in range(count)]
        generate_all(model, rows)
        return torch.bincount(torch.tensor([row.tokens[0] for row in rows]), minlength=model.config.vocab_size) / count

    with torch.no_grad():
        probabilities = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 2).softmax(-1)
    assert (frequencies(temperature=2) - probabilities).abs().max() < 0.06
    likeliest = probabilities.sort(descending=True)
    cut = frequencies(temperature=2, top_k=3)
    assert set(cut.nonzero().flatten().tolist()) == set(likeliest.indices[:3].tolist())
    top_p = float(likeliest.values[:2].sum()) - 1e-4  # the second is needed to reach it, the third is not
    assert set(frequencies(temperature=2, top_p=top_p).nonzero().flatten().tolist()) == set(
        likeliest.indices[:2].tolist()
    )


def test_ids_that_are_never_sampled_are_not_even_where_they_are_likeliest(model):
    free = generate_all(model, [Row(PROMPTS[1], Sampling(max_tokens=1, temperature=0))])[0]
    batch = Batch(model, eos=[END], never=free.tokens)
    for sampling in (Sampling(1, temperature=0), *(Sampling(1, seed=seed) for seed in range(50))):
        row = Row(PROMPTS[1], sampling)
        batch.advance([row])
        assert row.tokens != free.tokens


def test_a_prompt_that_cannot_be_read_fails_alone(model):
    good, bad = Row(PROMPTS[0], Sampling(4, temperature=0)), Row([10**6], Sampling(4))
    batch = Batch(model, eos=[])
    assert batch.advance([good, bad]) == [bad] and isinstance(bad.error, IndexError)
    while batch.rows:
        batch.advance([])
    assert len(good.tokens) == 4 and good.error is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": -1}, "temperature = -1, allowed: >= 0"),
        ({"top_p": 0}, "top_p = 0, allowed: 0 < top_p <= 1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty = 1.2, allowed: 1.0"),
        ({"min_p": 0.1}, "min_p = 0.1 is unknown"),
    ],
)
def test_sampling_parameters_that_cannot_be_followed_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Sampling.of_request(given, most=10, usual=5)


def test_the_limit_is_the_requests_within_the_room_that_is_left():
    assert Sampling.of_request({}, most=10, usual=5).max_tokens == 5
    assert Sampling.of_request({"max_new_tokens": 7}, most=10, usual=5).max_tokens == 7
    assert Sampling.of_request({"max_tokens": 70}, most=10, usual=5).max_tokens == 10
    assert Sampling.of_request({"max_tokens": 0}, most=10, usual=5).max_tokens == 1


# ------------------------------------------------------------------------------------------------------------- server


async def started(path: Path | str = BASE, **config) -> HFServer:
    sizes = {"prompt_length": 64, "response_length": 400} | config
    server = HFServer(RolloutConfig(name="hf", **sizes), HFModelConfig(path=str(path), use_remove_padding=False))
    await server.start()
    return server


def ask(server: HFServer, prompt: list[int], **sampling) -> asyncio.Task:
    return asyncio.create_task(server.generate(prompt_ids=prompt, sampling_params=sampling, request_id="one"))


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_concurrent_requests_share_a_batch_and_a_later_short_one_overtakes():
    server = await started()
    long = ask(server, PROMPTS[0], max_tokens=400, ignore_eos=True)
    await until(lambda: server.batch.rows and len(server.batch.rows[0].tokens) > 5)
    short = await ask(server, PROMPTS[1], max_tokens=3, ignore_eos=True)
    assert not long.done() and len(short.token_ids) == len(short.log_probs) == 3
    assert short.stop_reason == "completed"
    assert len((await long).token_ids) == 400


async def test_a_request_ends_with_the_end_of_turn_token_and_says_completed():
    server = await started()
    page = [{"role": "user", "content": 'Task: Press "home".\nhome 1 <button>\nok 2 <button>'}]  # what the base knows
    prompt = TOKENIZER.apply_chat_template(page, add_generation_prompt=True)["input_ids"]
    answer = await ask(server, prompt, seed=3)
    assert answer.stop_reason == "completed" and len(answer.token_ids) < 400
    assert answer.token_ids.index(END) == len(answer.token_ids) - 1


async def test_abort_hands_back_the_beginning_and_resuming_it_gives_the_uninterrupted_answer():
    server = await started()
    asked = {"max_tokens": 120, "seed": 7, "ignore_eos": True}
    whole = await ask(server, PROMPTS[2], **asked)
    request = ask(server, PROMPTS[2], **asked)
    await until(lambda: server.batch.rows and len(server.batch.rows[0].tokens) > 5)
    assert await server.abort_all_requests() == {"aborted_count": 1}
    part = await request
    assert part.stop_reason == "aborted" and 5 < len(part.token_ids) < 120
    assert len(part.log_probs) == len(part.token_ids)

    rest = ask(server, PROMPTS[2] + part.token_ids, **asked | {"max_tokens": 120 - len(part.token_ids)})
    await asyncio.sleep(0.1)
    assert not rest.done()  # the gate is closed
    await server.resume_generation()
    assert part.token_ids + (await rest).token_ids == whole.token_ids


async def test_a_rejecting_gate_hands_back_at_once_and_a_later_abort_parks_again():
    server = await started()
    await server.abort_all_requests(reject_request=True)
    refused = await ask(server, PROMPTS[0])
    assert (refused.token_ids, refused.stop_reason) == ([], "aborted")
    await server.abort_all_requests()
    parked = ask(server, PROMPTS[0], max_tokens=2, ignore_eos=True)
    await asyncio.sleep(0.05)
    assert not parked.done()
    await server.resume_generation()
    assert len((await parked).token_ids) == 2


async def test_new_weights_change_the_next_answer_and_their_step_is_told(model):
    server = await started()
    before = await ask(server, PROMPTS[3], max_tokens=20, temperature=0, ignore_eos=True)
    assert before.extra_fields == {"global_steps": None}
    other = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).eval()
    with torch.no_grad():
        other.model.layers[-1].mlp.down_proj.weight.mul_(-3)
    await server.load(dict(other.named_parameters()), 5)
    after = await ask(server, PROMPTS[3], max_tokens=20, temperature=0, ignore_eos=True)
    assert after.extra_fields == {"global_steps": 5} and after.token_ids != before.token_ids
    expected = forward_log_probs(other, PROMPTS[3], after.token_ids)
    assert torch.allclose(torch.tensor(after.log_probs), expected, atol=1e-5, rtol=0)


def test_weights_of_another_model_are_refused(model):
    state = dict(model.named_parameters())
    first = next(iter(state))
    with pytest.raises(ValueError, match=f"absent \\['{first}'\\]"):
        load_weights(model, {name: weight for name, weight in state.items() if name != first})
    with pytest.raises(ValueError, match="unknown \\['surplus'\\]"):
        load_weights(model, state | {"surplus": torch.zeros(1)})


async def test_requests_that_cannot_be_served_are_refused():
    server = await started()
    with pytest.raises(ValueError, match="a prompt of 464 tokens fills the context of 464"):
        await ask(server, [5] * 464)
    with pytest.raises(ValueError, match="1 videos"):
        await server.generate(prompt_ids=[5], sampling_params={}, request_id="one", video_data=["film"])


async def test_lora_weights_are_refused_with_the_setting_that_merges_them():
    adapter = HFAdapter(RolloutConfig(name="hf"), HFModelConfig(path=str(BASE)), None, replica_rank=0)
    with pytest.raises(ValueError, match="lora.merge=True"):
        await adapter.update_weights(iter([]), peft_config={"r": 8})


# ------------------------------------------------------------------------------------------------- generation, vision


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> Path:
    """A random Qwen3-VL of 0.2 million weights with its processor."""
    pytest.importorskip("torchvision")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    folder = tmp_path_factory.mktemp("vision")
    special = ["<pad>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        ["click"], trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|im_end|>")
    template = (
        "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    tokenizer.chat_template = template
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        },
    }  # fmt: skip
    sight = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256,
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=sight, tie_word_embeddings=False, pad_token_id=0,
        eos_token_id=ids["<|im_end|>"], image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.save_pretrained(folder)
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56 * 4, patch_size=16),
        tokenizer=tokenizer, video_processor=Qwen3VLVideoProcessor(), chat_template=template,
    )  # fmt: skip
    processor.save_pretrained(folder)
    return folder


async def test_images_and_text_share_a_batch_and_placeholders_are_never_sampled(vision):
    server = await started(vision, response_length=40)
    processor, model = server.batch.processor, server.batch.model
    pictures = [Image.new("RGB", (64 + 32 * i, 64), (40 * i, 200, 10)) for i in range(3)]
    text = "<|vision_start|><|image_pad|><|vision_end|>click"
    inputs = [processor(text=[text], images=[image], return_tensors="pt") for image in pictures[:2]]
    prompts = [one["input_ids"][0].tolist() for one in inputs] + [processor.tokenizer("click")["input_ids"]]
    assert prompts[0] != prompts[1]  # another size, other many patches
    answers = await asyncio.gather(
        *(
            server.generate(
                prompt_ids=prompt, sampling_params={"seed": i, "max_tokens": 10 + 5 * i, "ignore_eos": True},
                request_id=str(i), image_data=[pictures[i]] if i < 2 else None,
            )
            for i, prompt in enumerate(prompts)
        )
    )  # fmt: skip
    assert [len(answer.token_ids) for answer in answers] == [10, 15, 20]
    assert model.config.image_token_id in server.batch.never and model.config.video_token_id in server.batch.never
    for prompt, answer, one in zip(prompts, answers, [*inputs, {}], strict=True):
        assert not set(answer.token_ids) & set(server.batch.never)
        seen = {name: one[name] for name in ("pixel_values", "image_grid_thw") if name in one}
        expected = forward_log_probs(model, prompt, answer.token_ids, **seen)
        assert torch.allclose(torch.tensor(answer.log_probs), expected, atol=1e-5, rtol=0)

    greedy = await server.generate(
        prompt_ids=prompts[0], sampling_params={"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        request_id="greedy", image_data=pictures[:1],
    )  # fmt: skip
    other = await server.generate(
        prompt_ids=prompts[0], sampling_params={"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        request_id="other", image_data=[Image.effect_noise((64, 64), 99).convert("RGB")],
    )  # fmt: skip
    assert greedy.log_probs != other.log_probs  # the picture is seen


# ------------------------------------------------------------------------------------------- engines, weights, groups


def test_settings_that_need_an_accelerator_are_refused_by_name():
    model = HFModelConfig(path=str(BASE), use_remove_padding=False)
    with pytest.raises(ValueError, match="strategy = 'fsdp' does not run on CPU; allowed: 'fsdp2'"):
        CPUEngineWithLMHead(model, FSDPEngineConfig(strategy="fsdp"), None, None)
    with pytest.raises(ValueError, match="use_remove_padding = True"):
        CPUEngineWithLMHead(
            HFModelConfig(path=str(BASE), use_remove_padding=True), FSDPEngineConfig(strategy="fsdp2"), None, None
        )


async def test_weights_go_through_the_file_and_the_file_goes(tmp_path):
    engines = [FileCheckpointEngine(0, is_master=first, directory=str(tmp_path)) for first in (True, False, False)]
    actor, rollout = FileCheckpointEngine.build_topology(2, 1, [engine.prepare() for engine in engines])
    for engine, path in zip(engines, actor["path"] + rollout["path"], strict=True):
        engine.init_process_group(path)
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}

    async def receive():
        return {name: tensor async for name, tensor in engines[2].receive_weights()}

    receiving = asyncio.create_task(receive())
    await asyncio.sleep(0.05)
    assert not receiving.done()
    sent = [await engine.send_weights(iter(weights.items())) for engine in engines[:2]]
    assert [one["weight_sync/bytes"] for one in sent] == [28.0, 0.0]
    received = await receiving
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    for engine in engines:
        engine.finalize()
    assert list(tmp_path.iterdir()) == []


async def test_waiting_for_weights_that_nobody_sends_ends(tmp_path):
    engine = FileCheckpointEngine(0, directory=str(tmp_path), seconds=0.05)
    engine.init_process_group(**engine.prepare())
    with pytest.raises(TimeoutError):
        await anext(engine.receive_weights())


OPEN_BY_VERL = """
import verl
from verl.utils.distributed import initialize_global_process_group_ray
initialize_global_process_group_ray()
"""
OPEN_BY_TORCH = """
import os, torch.distributed
from verl_webagent.cpu.process_group import NAME
torch.distributed.init_process_group(
    NAME, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    init_method=os.environ["DIST_INIT_METHOD"],
)
"""
USE = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
rank, size = dist.get_rank(), dist.get_world_size()
numbers = torch.arange(3.0) + rank
dist.all_reduce(numbers)
assert numbers.tolist() == [size * n + sum(range(size)) for n in range(3)], numbers
everyone = [None] * size
dist.all_gather_object(everyone, rank)
assert everyone == list(range(size))
torch.manual_seed(0)
mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("fsdp",))
module, whole = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
whole.load_state_dict(module.state_dict())
fully_shard(module, mesh=mesh)
rows = torch.randn(size, 4)
module(rows[rank : rank + 1]).square().sum().backward()
(whole(rows).square().sum() / size).backward()  # FSDP takes the mean over ranks
assert torch.allclose(module.weight.grad.full_tensor(), whole.weight.grad, atol=1e-6)
print("done", rank)
"""


# verl takes five seconds to import in each rank, so the second case opens the group by the same name without it.
@pytest.mark.parametrize(("size", "start"), [(1, OPEN_BY_VERL), pytest.param(2, OPEN_BY_TORCH, marks=pytest.mark.slow)])
def test_the_process_group_that_verl_asks_for_on_cpu_reduces_gathers_and_shards(size, start, tmp_path):
    environment = os.environ | {
        "VERL_PLATFORM": "cpu", "WORLD_SIZE": str(size), "DIST_INIT_METHOD": f"file://{tmp_path}/store",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", start + USE],
            env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.strip().endswith(f"done {rank}"), err


# ----------------------------------------------------------------------------------------------- verl's own trainers

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(letter in "aeiou" for letter in solution_str) / max(1, len(solution_str))
"""
LOOK = """
from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

class Look(AgentLoopBase):
    async def run(self, sampling_params, **row):
        # Other sizes, other lengths: verl 0.9.1 cannot split a batch whose image rows all have one length.
        image = Image.new("RGB", (64 + 32 * row["extra_info"]["index"], 64), (10, 200, 10))
        content = [{"type": "image"}, {"type": "text", "text": "click"}]
        prompt = await self.ct_build_initial_tokens([{"role": "user", "content": content}], images=[image])
        answer = await self.server_manager.generate(
            request_id=row["uid"], prompt_ids=prompt, image_data=[image], sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=answer.token_ids, response_mask=[1] * len(answer.token_ids),
            response_logprobs=answer.log_probs, multi_modal_data={"images": [image]}, num_turns=2,
            metrics=AgentLoopMetrics(), extra_fields=answer.extra_fields,
        )
"""


def train(folder: Path, model: Path, *overrides: str) -> list[dict[str, float]]:
    """Two steps of `python -m verl.trainer.main_ppo` without a line of ours in the command; metrics by step."""
    from datasets import Dataset

    rows = [
        {
            "data_source": "toy", "prompt": [{"role": "user", "content": f"press {i}"}],
            "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"index": i},
        }
        for i in range(4)
    ]  # fmt: skip
    Dataset.from_list(rows * 2).to_parquet(folder / "rows.parquet")
    (folder / "reward.py").write_text(REWARD)
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
        "+ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=8",
        "+ray_kwargs.ray_init.include_dashboard=False", "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/rows.parquet", f"data.val_files={folder}/rows.parquet", "data.train_batch_size=4",
        "data.max_prompt_length=64", "data.max_response_length=8", "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1", f"reward.custom_reward_function.path={folder}/reward.py",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1", 'trainer.logger=["file"]',
        "trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.save_freq=-1",
        "trainer.test_freq=-1", "trainer.resume_mode=disable", *overrides,
    ]  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "RAY_"))}
    added = {"VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl", "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=clean | added, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-9000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["data"] for line in lines if "actor/grad_norm" in line["data"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "vision"])
def test_verls_stock_trainer_runs_on_cpu_with_a_critic_and_a_reference(kind, vision, tmp_path):
    overrides = [
        "algorithm.adv_estimator=gae", "critic.strategy=fsdp2", "critic.model.use_remove_padding=False",
        "critic.use_dynamic_bsz=True", "critic.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_type=k2",
    ]  # fmt: skip
    if kind == "vision":
        (tmp_path / "look.py").write_text(LOOK)
        (tmp_path / "loops.yaml").write_text("- name: look\n  _target_: look.Look\n")
        overrides += [
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/loops.yaml",
            "actor_rollout_ref.rollout.agent.default_agent_loop=look",
        ]
    model = vision if kind == "vision" else BASE
    first, second = train(tmp_path, model, f"critic.model.path={model}", *overrides)
    for step in (first, second):
        assert step["training/rollout_probs_diff_max"] < 1e-4  # server and trainer agree, also after an update
        assert step["actor/grad_norm"] > 0 and step["critic/grad_norm"] > 0
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-8) and second["actor/kl_loss"] > 1e-6


@pytest.mark.slow
def test_verls_separate_trainer_runs_on_cpu_with_the_file_engine(tmp_path):
    first, second = train(
        tmp_path, BASE, "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    )  # fmt: skip
    size = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(BASE).parameters())
    assert first["weight_sync/bytes"] >= 4 * size
    assert first["training/rollout_probs_diff_max"] < 1e-4
    assert second["training/off_policy/trajectory_staleness/max"] == 1
