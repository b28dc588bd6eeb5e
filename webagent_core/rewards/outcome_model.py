"""Outcome reward models: a local language model that says how likely a trajectory succeeded, P(yes).

WebRL (ICLR 2025): reads the task, all actions and the final page as text; reward 1 if P(YES) >= P(NO).
UI-TARS-2 (arXiv:2509.02544): reads the whole text history and the last five screenshots (a vision-language model).
`train_outcome_model` makes one from the trajectories of a run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from webagent_core.episode.trajectory import Trajectory
from webagent_core.rewards.evidence import describe, final_page
from webagent_core.rewards.reward_manager import Reward, RewardManager

Form = Literal["webrl", "uitars2"]
YES, NO = "YES", "NO"
QUESTION = f"Is it done? {YES} or {NO}"
# Folder of a small one that knows no task, only whether what was asked for was done; see pretrain_outcome_model.py.
OUTCOME_BASE = Path(__file__).parent / "outcome_base"
SETTINGS = "outcome_model.json"  # beside the model: how it was trained to be asked


def outcome_parts(trajectory: Trajectory, form: Form = "webrl") -> tuple[str, str, str]:
    """(what comes before the page, the page, what comes after it); only the page may be cut to fit."""
    page = final_page(trajectory)
    if form == "webrl":
        history = "\n".join(describe(step) for step in trajectory.steps)
    elif form == "uitars2":
        history = "\n".join(f"{step.response}\n-> {describe(step)}" for step in trajectory.steps)
    else:
        raise ValueError(f"form = {form!r} is not allowed: webrl or uitars2")
    answer = f"\nFinal answer: {trajectory.answer}" if trajectory.answer else ""
    shown = page.text if page is not None and form == "webrl" else ""
    # The goal once more at the end: a small model compares what stands close together.
    return f"Task: {trajectory.goal}\n", shown, f"\n{history}{answer}\nTask: {trajectory.goal}\n{QUESTION}"


class OutcomeModel:
    """A causal language model read at one place: the first token of its answer, YES against NO.

    Args:
        model: causal LM, or an image-text-to-text model with `processor`.
        tokenizer: with a chat template.
        max_tokens: of the prompt (WebRL's authors: 16384). What does not fit is taken out of the page's middle.
        processor: of a vision-language model; makes form "uitars2" show screenshots.
        screenshots: the last ones shown (UI-TARS-2: 5).

    Raises:
        ValueError: the tokenizer does not tell YES and NO apart by their first token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        form: Form = "webrl",
        max_tokens: int = 16384,
        processor: Any = None,
        screenshots: int = 5,
        batch_size: int = 16,
    ) -> None:
        self.model, self.tokenizer, self.processor = model, tokenizer, processor
        self.form, self.max_tokens, self.screenshots, self.batch_size = form, max_tokens, screenshots, batch_size
        first = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in (YES, NO)]
        if first[0] == first[1]:
            raise ValueError(f"tokenizer: {YES} and {NO} begin with the same token, {first[0]}")
        self.answer_ids = torch.tensor(first)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "cpu", dtype: Any = "auto", **settings: Any) -> OutcomeModel:
        """From a folder or hub name. A model with a vision tower is loaded with its processor.

        Args:
            settings: as above; those not given are what `save` wrote.
        """
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoProcessor,
            AutoTokenizer,
        )

        saved = Path(path) / SETTINGS
        settings = (json.loads(saved.read_text("utf-8")) if saved.is_file() else {}) | settings
        if getattr(AutoConfig.from_pretrained(path), "vision_config", None) is not None:
            processor = AutoProcessor.from_pretrained(path)
            model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).to(device)
            return cls(model.eval(), processor.tokenizer, processor=processor, **settings)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        return cls(model.eval(), AutoTokenizer.from_pretrained(path), **settings)

    def save(self, path: str | Path) -> None:
        self.model.save_pretrained(path)
        (self.processor or self.tokenizer).save_pretrained(path)
        settings = {"form": self.form, "max_tokens": self.max_tokens, "screenshots": self.screenshots}
        (Path(path) / SETTINGS).write_text(json.dumps(settings) + "\n", encoding="utf-8")

    @torch.no_grad()
    def probabilities(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """P(yes) of each, in order; the probabilities of YES and NO sum to 1."""
        self.model.eval()
        result: list[float] = []
        for start in range(0, len(trajectories), self.batch_size):
            logits = self.logits(trajectories[start : start + self.batch_size])
            result += logits.float().softmax(dim=-1)[:, 0].tolist()
        return result

    def logits(self, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        """(N, 2): of YES and of NO as the first token of the answer."""
        if self.processor is not None:
            rows = [self.model(**self._with_screenshots(each)).logits[:, -1] for each in trajectories]
            return torch.cat(rows)[:, self.answer_ids]
        prompts = [self.prompt_ids(each) for each in trajectories]
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        inputs = {name: tensor.to(self.model.device) for name, tensor in inputs.items()}
        return self.model(**inputs, logits_to_keep=1).logits[:, -1, self.answer_ids.to(self.model.device)]

    def prompt_ids(self, trajectory: Trajectory) -> list[int]:
        before, page, after = outcome_parts(trajectory, self.form)
        ids = self._chat_ids(before + page + after)
        if len(ids) <= self.max_tokens:
            return ids
        page_ids = self.tokenizer(page, add_special_tokens=False)["input_ids"]
        room = max(0, self.max_tokens - len(self._chat_ids(before + "\n...\n" + after)) - 8)
        head, tail = page_ids[: room // 2], page_ids[len(page_ids) - room // 2 :]
        cut = self.tokenizer.decode(head) + "\n...\n" + self.tokenizer.decode(tail)
        ids = self._chat_ids(before + cut + after)
        return ids if len(ids) <= self.max_tokens else ids[-self.max_tokens :]

    def _chat_ids(self, text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        tokens = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        return list(tokens["input_ids"])

    def _with_screenshots(self, trajectory: Trajectory) -> Any:
        from PIL import Image

        before, page, after = outcome_parts(trajectory, self.form)
        seen = [step.screenshot for step in trajectory.steps]
        seen += [trajectory.final.screenshot] if trajectory.final else []
        shown = [Image.open(io.BytesIO(each)).convert("RGB") for each in seen if each][-self.screenshots :]
        content = [{"type": "text", "text": before + page}, *({"type": "image", "image": each} for each in shown)]
        chat = [{"role": "user", "content": [*content, {"type": "text", "text": after}]}]
        inputs = self.processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return inputs.to(self.model.device)


class OutcomeModelReward(RewardManager):
    """1 if P(yes) reaches `threshold`, else 0; with `soft`, P(yes) itself."""

    def __init__(self, model: OutcomeModel, *, threshold: float = 0.5, soft: bool = False) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold = {threshold!r} is not allowed: between 0 and 1")
        self.model, self.threshold, self.soft = model, threshold, soft

    def score(self, trajectory: Trajectory) -> Reward:
        (yes,) = self.model.probabilities([trajectory])
        value = yes if self.soft else float(yes >= self.threshold)
        return Reward(value, reasons=(f"P(yes) = {yes:.3f}",), evidence=({"kind": "outcome_model", "p_yes": yes},))


def auc(probabilities: Sequence[float], succeeded: Sequence[bool]) -> float:
    """How often a success is above a failure (area under the ROC curve); ties count half.

    Raises:
        ValueError: only one kind is there.
    """
    positive = torch.tensor([p for p, s in zip(probabilities, succeeded, strict=True) if s], dtype=torch.float64)
    negative = torch.tensor([p for p, s in zip(probabilities, succeeded, strict=True) if not s], dtype=torch.float64)
    if not len(positive) or not len(negative):
        raise ValueError(f"{len(positive)} successes and {len(negative)} failures: AUC needs both")
    above = positive[:, None] - negative[None, :]
    return float(((above > 0).double() + 0.5 * (above == 0).double()).mean())
