"""A reference that is not the policy training starts from: it has to be of the policy's own shape and vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from webagent_core.policy.vision_processing import load_processing_class, sees


def check_alike(policy: str, reference: str) -> None:
    """Compare two models, folders or hub names, without loading weights.

    Raises:
        ValueError: their parameters differ in name or shape, or they have other vocabularies.
    """
    models = []
    for name in (policy, reference):
        kind = AutoModelForImageTextToText if sees(name) else AutoModelForCausalLM
        with torch.device("meta"):
            models.append(kind.from_config(AutoConfig.from_pretrained(name)))
    refuse_unlike(reference, *models, *map(load_processing_class, (policy, reference)))


def refuse_unlike(
    reference: str, mine: torch.nn.Module, other: torch.nn.Module, processing_class: Any, its: Any
) -> None:
    """Raise ValueError where the loaded model `other`, of the name `reference`, is not like `mine`."""
    shapes, others = ({k: tuple(v.shape) for k, v in each.state_dict().items()} for each in (mine, other))
    # The vocabulary of a policy that sees is its processor's tokenizer's.
    words, its_words = (getattr(each, "tokenizer", each).get_vocab() for each in (processing_class, its))
    for what, same in (("parameters", shapes == others), ("vocabulary", words == its_words)):
        if not same:
            raise ValueError(f"reference = {reference!r} is not allowed: its {what} must be like the policy's")
