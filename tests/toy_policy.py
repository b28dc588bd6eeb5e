"""A tiny policy with random weights, for tests that watch what a trainer does with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from webagent_core.policy.tiny import build_policy
from webagent_core.policy.tokenizer import build_tokenizer

PAGES = ["Press the button called OK", "OK 1 <button>", "Cancel 2 <button>", 'unnamed 3 <input text> = "red"']


def random_policy(folder: Path, texts: Sequence[str] = PAGES) -> Path:
    """Write a policy whose tokenizer knows the words of `texts`; returns the folder."""
    tokenizer = build_tokenizer(list(texts), seen_in=1)
    build_policy(tokenizer, hidden=32, layers=2, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# Fixtures of the modules that import them.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the policy: where trainers start, and their reference."""
    return random_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
