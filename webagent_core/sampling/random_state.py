"""A random generator's state as plain data, for checkpoints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any


def rng_state(rng: random.Random) -> list[Any]:
    version, words, gauss = rng.getstate()
    return [version, list(words), gauss]


def load_rng(rng: random.Random, state: Sequence[Any]) -> None:
    version, words, gauss = state
    rng.setstate((version, tuple(words), gauss))
