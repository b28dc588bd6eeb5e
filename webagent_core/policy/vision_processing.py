"""What stands between chats and a policy that may see: tokenizer or processor, and how many tokens a chat takes.

For any vision model of Qwen's, the tiny one and a real one alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    BatchFeature,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2VLImageProcessorPil,
)
from transformers.utils import is_torchvision_available

from webagent_core.episode.contexts import CountTokens, chat_counter
from webagent_core.policy.tiny import start_of
from webagent_core.recipe import Recipe


def sees(model: str) -> bool:
    """Whether the model in this folder or of this hub name takes pictures."""
    return hasattr(AutoConfig.from_pretrained(model), "vision_config")


def load_processing_class(model: str) -> PreTrainedTokenizerBase | ProcessorMixin:
    """Tokenizer of a model that reads, processor of one that sees; both pad and truncate on the left."""
    sides = {"padding_side": "left", "truncation_side": "left"}
    if not sees(model):
        return AutoTokenizer.from_pretrained(model, **sides)
    if is_torchvision_available():
        return AutoProcessor.from_pretrained(model, **sides)
    tokenizer = AutoTokenizer.from_pretrained(model, **sides)
    return PictureProcessor(Qwen2VLImageProcessorPil.from_pretrained(model), tokenizer, tokenizer.chat_template)


def counter_of(recipe: Recipe) -> CountTokens:
    """Counts the tokens of a chat as the recipe's policy gets it; a picture is one of the whole viewport."""
    model = start_of(recipe)
    processing_class = load_processing_class(model)
    if not sees(model):
        return chat_counter(processing_class)
    return chat_counter(processing_class.tokenizer, picture_tokens(processing_class, recipe))


def picture_tokens(processor: ProcessorMixin, recipe: Recipe) -> int:
    """Tokens of a screenshot of the recipe's viewport, with the mark of its start and that of its end."""
    most = recipe.context.max_pixels if recipe.context else None
    width, height = recipe.browser.viewport
    shrink = min(1.0, (most / (width * height)) ** 0.5) if most else 1.0
    blank = Image.new("RGB", (max(1, int(width * shrink)), max(1, int(height * shrink))))
    images = processor.image_processor(images=[blank], return_tensors="pt")
    return int(images["image_grid_thw"].prod()) // processor.image_processor.merge_size**2 + 2


class PictureProcessor(ProcessorMixin):
    """Qwen-VL's processor without films, which would need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(
        self, images: Any = None, text: Any = None, videos: Any = None, audio: Any = None, **kwargs: Any
    ) -> BatchFeature:
        """Token ids in which each picture's slot is as long as the picture takes, and the pictures' pixels.

        Raises:
            ValueError: pictures and slots are not equally many.
        """
        texts, seen = [text] if isinstance(text, str) else list(text), {}
        slot = re.compile(re.escape(self.image_token))
        nested = [each if isinstance(each, list | tuple) else [each] for each in images or ()]
        flat = [image for each in nested for image in each]
        slots = sum(len(slot.findall(each)) for each in texts)
        if slots != len(flat):
            raise ValueError(f"{len(flat)} images for {slots} slots in the texts: they must be equally many")
        if flat:
            seen = dict(self.image_processor(images=flat, return_tensors="pt"))
            lengths = iter((seen["image_grid_thw"].prod(dim=1) // self.image_processor.merge_size**2).tolist())
            texts = [slot.sub(lambda _: self.image_token * next(lengths), each) for each in texts]
        names = ("padding", "padding_side", "truncation", "max_length", "return_tensors", "add_special_tokens")
        encoded = self.tokenizer(texts, **{name: kwargs[name] for name in names if kwargs.get(name) is not None})
        ids = encoded["input_ids"]
        if isinstance(ids, torch.Tensor):
            types: Any = (ids == self.image_token_id).long()
        else:
            types = [[int(token == self.image_token_id) for token in row] for row in ids]
        return BatchFeature({**encoded, **seen, "mm_token_type_ids": types})

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the parts alone: Qwen's own processor reads them where torchvision is installed."""
        self.tokenizer.save_pretrained(save_directory)
        self.image_processor.save_pretrained(save_directory)
