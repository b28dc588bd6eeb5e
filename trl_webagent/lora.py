"""A recipe's LoRA settings as PEFT takes them."""

from __future__ import annotations

from peft import LoraConfig

from webagent_core.recipe import Lora


def lora_config(lora: Lora) -> LoraConfig:
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
