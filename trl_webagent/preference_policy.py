"""A policy in the trainer's process that answers chats, keeping the token ids that it read and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from webagent_core.episode.contexts import ContextOverflow
from webagent_core.episode.runner import Response
from webagent_core.recipe import Rollout
from webagent_core.sampling.page_search import Question, Sampled


class LocalPolicy:
    """`generate` is what a rollout calls, `answer` what a search calls.

    Args:
        rollout: temperature, top_p, top_k and the lengths of prompts and answers.
        max_rows: rows in one forward pass of `log_probabilities`.
    """

    no_signal: str | None = None  # as a run asks of its trainer: why nothing is left to train on

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rollout: Rollout, max_rows: int = 64
    ) -> None:
        self.model, self.tokenizer, self.rollout, self.max_rows = model, tokenizer, rollout, max_rows
        ends = model.generation_config.eos_token_id
        self.ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends] if ends is not None else [])}
        self._sampling = GenerationConfig(
            do_sample=True,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k or 0,
            max_new_tokens=rollout.max_response_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=sorted(self.ends),
        )

    def generate(self, chats: Sequence[list[dict]]) -> list[Response | ContextOverflow]:
        """One sampled answer a chat; a chat that does not fit gives a ContextOverflow."""
        prompts = [self.prompt_ids(chat) for chat in chats]
        room, limit = self.rollout.max_response_tokens, self.rollout.max_context_tokens
        answers: list[Response | ContextOverflow] = [
            ContextOverflow(f"a prompt of {len(ids)} tokens leaves no room for {room} in {limit}") for ids in prompts
        ]
        fitting = [index for index, ids in enumerate(prompts) if len(ids) + room <= limit]
        if fitting:
            sampled = self._sample([prompts[index] for index in fitting])
            for index, ids in zip(fitting, sampled, strict=True):
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                cut = not ids or ids[-1] not in self.ends
                answers[index] = Response(text, prompts[index], ids, "length" if cut else "stop")
        return answers

    def answer(self, questions: Sequence[Question]) -> list[Sampled | ContextOverflow]:
        """The answers to each question, all of them sampled as one batch."""
        given = self.generate([question.messages for question in questions for _ in range(question.count)])
        scored = [
            response
            for response, question in zip(given, (q for q in questions for _ in range(q.count)), strict=True)
            if question.scored and isinstance(response, Response)
        ]
        logps = iter(self.log_probabilities([r.prompt_ids for r in scored], [r.response_ids for r in scored]))
        results: list[Sampled | ContextOverflow] = []
        for question in questions:
            responses, given = given[: question.count], given[question.count :]
            if isinstance(responses[0], ContextOverflow):
                results.append(responses[0])
            else:
                results.append(Sampled(responses, [next(logps) if question.scored else None for _ in responses]))
        return results

    def prompt_ids(self, chat: list[dict]) -> list[int]:
        encoded = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(encoded["input_ids"])

    def response_ids(self, text: str) -> list[int]:
        """The tokens with which the policy would say `text` and end its turn."""
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]

    @torch.no_grad()
    def _sample(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        self.model.eval()
        longest = max(len(ids) for ids in prompts)
        batch = self._padded([(longest - len(ids), ids, 0) for ids in prompts])
        made = self.model.generate(**batch, generation_config=self._sampling)[:, longest:].tolist()
        return [self._to_the_end(ids) for ids in made]

    def _to_the_end(self, ids: list[int]) -> list[int]:
        """Without the padding behind the token that ends the turn."""
        return ids[: next((place for place, token in enumerate(ids) if token in self.ends), len(ids)) + 1]

    @torch.no_grad()
    def log_probabilities(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float]:
        """log pi(response | prompt) of each: the sum over its tokens, at temperature 1, which is what DPO is about."""
        self.model.eval()
        sums = [0.0] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]) + len(responses[index]))
        for start in range(0, len(order), self.max_rows):
            rows = order[start : start + self.max_rows]
            front, behind = max(len(prompts[row]) for row in rows), max(len(responses[row]) for row in rows)
            batch = self._padded(
                [
                    (front - len(prompts[row]), prompts[row] + responses[row], behind - len(responses[row]))
                    for row in rows
                ]
            )
            positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
            logits = self.model(**batch, position_ids=positions, logits_to_keep=behind + 1).logits[:, :-1].float()
            tokens = batch["input_ids"][:, front:]
            logps = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            for row, values in zip(rows, logps, strict=True):
                sums[row] = float(values[: len(responses[row])].sum())
        return sums

    def _padded(self, rows: Sequence[tuple[int, list[int], int]]) -> dict[str, Any]:
        """Rows of (padding in front, ids, padding behind) as tensors on the model's device."""
        pad = self.tokenizer.pad_token_id
        ids = [[pad] * before + row + [pad] * after for before, row, after in rows]
        mask = [[0] * before + [1] * len(row) + [0] * after for before, row, after in rows]
        device = self.model.device
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": torch.tensor(mask, device=device),
        }
