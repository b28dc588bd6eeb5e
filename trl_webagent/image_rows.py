"""Rows that show pictures: a chat's screenshots as a vision-language model takes them, for generation and for the loss.

A row keeps its pictures as the chat had them, compressed. They become pixels where a forward pass needs them, a bounded
number of rows at a time: the pixels of a whole batch of long episodes would take more memory than the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import ProcessorMixin
from trl.trainer.utils import pad

from webagent_core.episode.pictures import picture_urls, pictures_of


def open_pictures(chats: Sequence[list[dict]]) -> list[list[dict]]:
    """The chats with their pictures decoded, as chat templates and inference engines take them."""
    return [[_open(message) for message in chat] for chat in chats]


def _open(message: dict) -> dict:
    if isinstance(message["content"], str):
        return message
    pictures = iter(pictures_of([message]))
    parts = [{**part, "image": next(pictures)} if part["type"] == "image" else part for part in message["content"]]
    return {**message, "content": parts}


class ImageInputs:
    """From token ids and pictures of rows to what a Qwen-VL model takes besides the ids.

    Args:
        processor: the policy's; its image processor makes the pixels, as it did when the prompts were tokenised.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self.image_processor = processor.image_processor
        self.image_token = processor.image_token_id

    def __call__(self, ids: torch.Tensor, pictures: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Arguments of `GRPOTrainer._get_per_token_logps_and_entropies`, or of the model but for `num_images`.

        Args:
            ids: (rows, tokens), prompt and response.
            pictures: those of each row, in the order of their slots in its ids; see `picture_urls`.

        Raises:
            ValueError: the slots in a row's ids are not as many as its pictures fill.
        """
        slots = ids == self.image_token
        inputs: dict[str, Any] = {"mm_token_type_ids": slots.long()}
        counts = [len(row) for row in pictures]
        filled = torch.zeros(len(counts), dtype=torch.long)
        if any(counts):
            parts = [{"type": "image", "image": url} for row in pictures for url in row]
            images = self.image_processor(images=pictures_of([{"content": parts}]), return_tensors="pt")
            grids = images["image_grid_thw"]
            filled.index_add_(0, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), self._tokens(grids))
            inputs |= {
                "pixel_values": images["pixel_values"].to(ids.device),
                "image_grid_thw": grids.to(ids.device),
                "num_images": counts,
            }
        wrong = (filled != slots.sum(1).cpu()).nonzero().flatten().tolist()
        if wrong:
            row = wrong[0]
            raise ValueError(
                f"row {row} has {int(slots[row].sum())} image tokens and {counts[row]} pictures that fill "
                f"{int(filled[row])}: its ids were made by another processor"
            )
        return inputs

    def _tokens(self, grids: torch.Tensor) -> torch.Tensor:
        return grids.prod(dim=1).cpu() // self.image_processor.merge_size**2


class PictureCollator:
    """Batches for SFTTrainer of rows {input_ids, labels, pictures}, padded on the right."""

    def __init__(self, processor: ProcessorMixin) -> None:
        self.inputs = ImageInputs(processor)
        self.pad_token = processor.tokenizer.pad_token_id

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = pad([torch.tensor(row["input_ids"]) for row in rows], self.pad_token)
        seen = self.inputs(ids, [row["pictures"] for row in rows])
        seen.pop("num_images", None)
        return {
            "input_ids": ids,
            "attention_mask": pad([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], 0),
            "labels": pad([torch.tensor(row["labels"]) for row in rows], -100),
            **seen,
        }


def imitation_rows(
    processor: ProcessorMixin, chats: Sequence[list[dict]], responses: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows for `PictureCollator`: after each chat its response is learned, to the end of the turn, and nothing else."""
    rows = []
    for start in range(0, len(chats), 64):  # the pixels of these are made along the way
        part = list(chats[start : start + 64])
        prompts = processor.apply_chat_template(
            open_pictures(part), add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        for chat, prompt, response in zip(part, prompts, responses[start : start + 64], strict=True):
            answer = processor.tokenizer(response + processor.tokenizer.eos_token)["input_ids"]
            labels = [-100] * len(prompt) + answer
            rows.append({"input_ids": list(prompt) + answer, "labels": labels, "pictures": picture_urls(chat)})
    return rows
