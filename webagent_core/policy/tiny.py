"""The tiny policy itself: a Qwen3 of three layers. Its base is shipped; trl_webagent/pretrain.py is what made it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from webagent_core.policy.smollm2 import unpacked
from webagent_core.recipe import Recipe

# Folder of the shipped base and its tokenizer: it can look up a name and copy the id after it, and knows no task.
BASE = Path(__file__).parent / "base"
# Folder of the start of the tiny policy that sees (see tiny_vision.py): tokenizer, image processor, configuration. Its
# weights are random, drawn from a run's seed.
VISION_START = Path(__file__).parent / "vision_start"


def build_policy(
    tokenizer: PreTrainedTokenizerBase, *, hidden: int = 128, layers: int = 3, heads: int = 4, seed: int = 0
) -> Qwen3ForCausalLM:
    """A causal LM with random weights drawn from `seed`; global random state is left as it was."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        # The usual 0.02 suits widths of thousands; at this one it delays learning to copy by hundreds of steps.
        initializer_range=hidden**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def start_of(recipe: Recipe) -> str:
    """Folder or hub name of the model before any training."""
    return named_model(recipe.policy.model)


def named_model(name: str) -> str:
    """Folder of "tiny", "tiny_vision" and "smollm2", which is unpacked once; any other name is one already."""
    if name == "smollm2":
        return str(unpacked())
    return {"tiny": str(BASE), "tiny_vision": str(VISION_START)}.get(name, name)
