"""HiconAgent's HCPO: each answer's tokens are scored after the whole history and after the compressed one.

A trajectory is one answer to one recorded step (webagent_core/sampling/step_answers.py). What the two branches cost is
`Objective.loss`; this trainer lays the second prompt of every row beside the first and runs the policy on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trl_webagent.image_rows import open_pictures
from trl_webagent.step_grpo_trainer import StepGRPOTrainer
from webagent_core.objectives import RowTensors, TrajectoryFacts
from webagent_core.sampling.step_answers import AnsweredStep

_PROMPT = ("prompt_ids", "prompt_mask", "pictures")
_SECOND = tuple(f"compressed_{name}" for name in _PROMPT)


class HCPOTrainer(StepGRPOTrainer):
    """StepGRPOTrainer for trajectories of one `AnsweredStep`, as `StepAnswers` plays them.

    Rows are made from the chat with the whole history, whatever part of it the answer was sampled after; with an
    objective whose `hcpo` is not False they have a second prompt, from the compressed history.
    """

    def _facts(self) -> list[TrajectoryFacts]:
        # Whether a step was done is for people; what a group compares, and what makes it flat, is the reward.
        return [replace(facts, outcome=None) for facts in super()._facts()]

    def _tokens(self, steps: Sequence[AnsweredStep], filler: int = 0) -> dict[str, Any]:
        batch = super()._tokens(self._after([step.full for step in steps], steps), filler)
        if getattr(self.objective, "hcpo", False) is not False:
            second = super()._tokens(self._after([step.compressed for step in steps], steps), filler)
            batch |= {f"compressed_{name}": second[name] for name in _PROMPT if name in second}
        return batch

    def _after(self, chats: list[list[dict]], steps: Sequence[AnsweredStep]) -> list[AnsweredStep]:
        """The same answers after other prompts."""
        opened = open_pictures(chats) if self._images else chats
        prompts = self._tokenize_prompts(opened)[0] if chats else []
        return [
            replace(step, messages=chat, prompt_ids=list(ids))
            for step, chat, ids in zip(steps, chats, prompts, strict=True)
        ]

    def _stored_logps(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        stored = super()._stored_logps(batch)
        if _SECOND[0] in batch:
            second = super()._stored_logps(_second_branch(batch))
            stored |= {f"compressed_{name}": logps for name, logps in second.items()}
        return stored

    def _chunks(self, batch: dict[str, Any]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        ids, mask, pictures = (batch.get(name) for name in _SECOND)
        chunks = super()._chunks({name: value for name, value in batch.items() if name not in _SECOND})
        if ids is not None:
            for rows, part in chunks:
                longest = int(mask[rows].sum(1).max())
                part |= dict(zip(_SECOND[:2], (ids[rows, -longest:], mask[rows, -longest:]), strict=True))
                if pictures is not None:
                    part[_SECOND[2]] = [pictures[row] for row in rows.tolist()]
        return chunks

    def _row_tensors(self, model: Any, inputs: dict[str, Any], logps: torch.Tensor) -> RowTensors:
        rows = super()._row_tensors(model, inputs, logps)
        if _SECOND[0] not in inputs:
            return rows
        second, _ = self._forward(model, _second_branch(inputs), entropy=False)
        return replace(
            rows,
            compressed_logp=second,
            compressed_old_logp=inputs.get("compressed_old_per_token_logps"),
            compressed_ref_logp=inputs.get("compressed_ref_per_token_logps"),
        )


def _second_branch(batch: dict[str, Any]) -> dict[str, Any]:
    """The rows with the compressed prompt in the place of the whole one."""
    rows = {name: value for name, value in batch.items() if not name.startswith("compressed_")}
    return rows | {name: batch[second] for name, second in zip(_PROMPT, _SECOND, strict=True) if second in batch}
