"""Where a resumed run goes on: after the last update of its checkpoint, whatever else was being counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` finished updates of `total`. `per_epoch` where the tasks come in epochs of so many updates."""

    done: int
    total: int
    per_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.done < 0 or self.total < 0 or (self.per_epoch is not None and self.per_epoch < 1):
            raise ValueError(
                f"done = {self.done}, total = {self.total}, per_epoch = {self.per_epoch} is not allowed: done and total"
                " >= 0, per_epoch >= 1"
            )

    @property
    def remaining(self) -> int:
        """How many updates, counted from here: never an absolute index that a resumed run may have passed."""
        return max(0, self.total - self.done)

    @property
    def next(self) -> int | None:
        """Number of the next update, counted from 1; None: there is none."""
        return self.done + 1 if self.remaining else None

    @property
    def skip_in_epoch(self) -> int:
        """Batches of the current epoch that are done; 0 at its very end, where the next one begins."""
        return self.done % self.per_epoch if self.per_epoch else 0

    def describe(self) -> str:
        if not self.remaining:
            return f"resumed from update {self.done} of {self.total}: nothing is left to train"
        return f"resumed from update {self.done} of {self.total}: going on with update {self.next}"


def check_checkpoint(folder_update: int, stored_update: int) -> int:
    """The update of a checkpoint. Raises ValueError where the folder's name and the state in it disagree."""
    if folder_update != stored_update:
        raise ValueError(
            f"the checkpoint's folder is of update {folder_update}, and the state in it of update {stored_update}: one"
            " of them is from another save"
        )
    return stored_update
