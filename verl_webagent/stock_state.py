"""Whether the sampler has prepared the batch that an estimator is about to see. Both run in the trainer's process."""

from __future__ import annotations

_prepared: list[str] = []  # the recipe whose statistics the newest sampled batch holds


def prepared(recipe: str) -> None:
    _prepared[:] = [recipe]


def take(recipe: str) -> bool:
    """Whether the newest batch was prepared for `recipe`; a batch serves once."""
    ready = _prepared == [recipe]
    _prepared.clear()
    return ready
