"""The tiny policy that sees: a Qwen3-VL small enough for a CPU, from transformers' own classes.

Its start is a folder like any model's, but for the weights: those are random, drawn from a run's seed, and what seeing
there is to it is learned in warm-up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from webagent_core.policy.tokenizer import build_tokenizer

PICTURE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")  # as all of Qwen's models have them
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FRAME = ("system\n", "user\n", "assistant\n", "Task: ", "Thoughts so far:\n", "Feedback: ", "Action: click(", ", ")
_PATCH = 16  # MiniWoB++'s 160 x 210 pixels on a viewport of 160 x 224 are 10 x 14 patches, merged to 5 x 7 tokens


def build_vision_tokenizer(corpus: Iterable[str], vocabulary: int = 900) -> PreTrainedTokenizerBase:
    """As `build_tokenizer`, for short texts beside pictures: a coordinate in pixels is one token."""
    return build_tokenizer(corpus, vocabulary, frame=_FRAME, numbers=224, special=PICTURE, chat_template=CHAT_TEMPLATE)


def build_vision_config(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    vision_hidden: int = 64,
    vision_layers: int = 2,
) -> Qwen3VLConfig:
    """Configuration of 0.6 M parameters; a screenshot of 160 x 224 is 35 tokens of 32 x 32 pixels."""
    ids = dict(zip(PICTURE, tokenizer.convert_tokens_to_ids(list(PICTURE)), strict=True))
    side = hidden // heads // 6  # of a head's rotary pairs, for height and as many for width; time has the rest
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "max_position_embeddings": 4096,
            # The usual 0.02 suits widths of thousands, here and below.
            "initializer_range": hidden**-0.5,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [hidden // heads // 2 - 2 * side, side, side],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": vision_layers,
            "hidden_size": vision_hidden,
            "intermediate_size": 2 * vision_hidden,
            "num_heads": 4,
            "patch_size": _PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,  # pictures, no films
            "out_hidden_size": hidden,
            "num_position_embeddings": 16 * 16,
            "deepstack_visual_indexes": [],
            "initializer_range": vision_hidden**-0.5,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_vision_policy(config: Qwen3VLConfig, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """A model with random weights drawn from `seed`; global random state is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.generation_config.pad_token_id = config.text_config.pad_token_id
    return model


def write_start(folder: Path, corpus: Iterable[str], **sizes: int) -> None:
    """Make `folder` a start as `VISION_START` is; `corpus` is the texts that the policy will read beside pictures."""
    tokenizer = build_vision_tokenizer(corpus)
    tokenizer.save_pretrained(folder)
    build_vision_config(tokenizer, **sizes).save_pretrained(folder)
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": _PATCH,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": (2 * _PATCH) ** 2, "longest_edge": 1280 * 1280},  # areas
        # White is nothing. Most of a page is white, and to random weights what is large is all that there is to see.
        "image_mean": [1.0, 1.0, 1.0],
        "image_std": [0.25, 0.25, 0.25],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
