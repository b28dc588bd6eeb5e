"""What TRL's side trains on is what the policy was given and what it sampled, under every paper's context: tokens,
mask, positions, pictures and log-probabilities, for a policy that reads and for one that sees."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from test_image_rows import recorded, start, trainer_of  # noqa: F401

from webagent_core.episode.contexts import CONTEXTS, ScreenshotContext
from webagent_core.episode.trajectory import Step
from webagent_core.policy.tiny import BASE

TURNS = 7
# That a chat shows at most, where it does not show all.
PICTURES = {"asyncwebrl": 1, "openwebrl": 1, "uitars": 5, "uitars2": 6, "webgym": 1, "zerogui": 5}
GOALS = ["Click the red button.", 'Enter "ann" into the text field and press Submit.']  # one chat longer than the other


@cache
def screenshot(number: int) -> bytes:
    image = Image.new("RGB", (64, 96), "white")
    ImageDraw.Draw(image).rectangle((5, 8 * number, 35, 8 * number + 20), fill=(20 * number, 90, 200))
    image.save(data := BytesIO(), "JPEG")
    return data.getvalue()


def page(number: int) -> str:
    return "\n".join(f"Button {number + line} {line} <button>" for line in range(1 + number))


class Watched:
    """What goes through a model from now on, call by call: positions of tokens and grids of pictures."""

    def __init__(self, model: Any) -> None:
        self.positions: list[torch.Tensor] = []  # (axes, rows, tokens) each
        self.grids: list[torch.Tensor] = []  # (pictures, 3) each
        for name, module in model.named_modules():
            if name.endswith("rotary_emb") and "visual" not in name:
                module.register_forward_hook(self._positions, with_kwargs=True)
            elif name.endswith("visual"):
                module.register_forward_hook(self._grids, with_kwargs=True)

    def _positions(self, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        self.positions.append(ids if ids.ndim == 3 else ids[None])

    def _grids(self, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        self.grids.append(kwargs["grid_thw"])

    def take(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, over all calls since the last time, each of so many rows."""
        positions = torch.cat([ids.expand(-1, rows, -1) for ids in self.positions], dim=2)
        grids = torch.cat(self.grids) if self.grids else torch.zeros(0, 3, dtype=torch.long)
        self.positions, self.grids = [], []
        return positions, grids


def from_first(positions: torch.Tensor) -> list[list[int]]:
    """Positions counted from the row's first token: rotary embeddings tell no more than distances."""
    return (positions - positions[:, :1]).tolist()


@pytest.mark.parametrize("eyes", [False, True], ids=["reads", "sees"])
@pytest.mark.parametrize("name", sorted(CONTEXTS))
def test_rows_are_what_was_given_and_sampled_under_every_context(
    name: str,
    eyes: bool,
    start: Path,  # noqa: F811
    tmp_path: Path,
):
    shows = issubclass(CONTEXTS[name], ScreenshotContext)
    context = CONTEXTS[name](**({"observation": "screenshot" if eyes else "text"} if shows else {}))
    trainer = trainer_of(start if eyes else BASE, tmp_path, lambda rows, generate: [])
    watched, calls, given = Watched(trainer.model), recorded(trainer), []
    episodes: list[list[Step]] = [[] for _ in GOALS]
    steps, wanted = [], defaultdict(list)
    for turn in range(TURNS):
        chats = [
            context.messages(goal, steps_of, page(turn), screenshot(turn))
            for goal, steps_of in zip(GOALS, episodes, strict=True)
        ]
        answers = trainer.generate(chats)
        tokens, logps = calls[-1]
        positions, grids = watched.take(len(chats))
        longest = max(len(answer.prompt_ids) for answer in answers)
        pictures = iter(grids.tolist())
        for index, (chat, answer) in enumerate(zip(chats, answers, strict=True)):
            step = Step(
                "", page(turn), chat, answer.text, prompt_ids=answer.prompt_ids, response_ids=answer.response_ids,
                screenshot=screenshot(turn),
            )  # fmt: skip
            length = len(answer.response_ids)
            assert tokens[index, :length].tolist() == answer.response_ids
            at = positions[:, index, longest - len(answer.prompt_ids) : longest + length - 1]
            wanted["ids"].append(answer.prompt_ids + answer.response_ids)
            wanted["logps"].append(logps[index, :length])
            wanted["positions"].append(from_first(at))
            wanted["grids"].append([next(pictures) for _ in range(shown_in(chat))])
            episodes[index].append(step)
            steps.append(step)
        assert next(pictures, None) is None
        given += chats

    batch = trainer._tokens(steps)
    ((order, _),) = trainer._chunks(batch)
    with torch.no_grad():
        logps = trainer._logps(trainer.model, batch)
    positions, grids = watched.take(len(steps))
    pictures = iter(grids.tolist())
    for place, row in enumerate(order.tolist()):
        seen = torch.cat([batch["prompt_mask"][row], batch["completion_mask"][row]]).bool()
        ids = torch.cat([batch["prompt_ids"][row], batch["completion_ids"][row]])
        assert ids[seen].tolist() == wanted["ids"][row]
        assert int(batch["completion_mask"][row].sum()) == len(steps[row].response_ids)
        assert from_first(positions[:, place, seen][:, :-1]) == wanted["positions"][row]
        assert [next(pictures) for _ in range(shown_in(given[row]))] == wanted["grids"][row]
        mask = batch["completion_mask"][row].bool()
        torch.testing.assert_close(logps[row, mask], wanted["logps"][row], atol=1e-4, rtol=0)
    assert next(pictures, None) is None
    most = max(shown_in(chat) for chat in given)
    assert most == (PICTURES.get(name, TURNS) if eyes and shows else 0)


def shown_in(chat: list[dict]) -> int:
    """Pictures in a chat."""
    contents = [message["content"] for message in chat]
    return sum(part["type"] == "image" for content in contents if isinstance(content, list) for part in content)
