"""UI-TARS-2's value pre-training: the policy stands still until its critic has converged."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ValuePretraining:
    """When the pre-training of a critic is over: when its explained variance no longer rises.

    `add` one number a batch, measured on trajectories that the critic was not trained on yet; the policy that played
    them is always the same. It is over after `patience` batches in a row none of which is better by `min_gain` than
    the best before it, which must be above 0. The objective's own number of batches bounds it in any case, and with
    `min_gain` None is its length.
    """

    min_gain: float | None = None
    patience: int = 2
    explained: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.min_gain is not None and not 0 <= self.min_gain <= 1:
            raise ValueError(f"min_gain = {self.min_gain!r} is not allowed: None, or a number from 0 to 1")
        if self.patience < 1:
            raise ValueError(f"patience = {self.patience!r} is not allowed: a whole number from 1")

    def add(self, explained_variance: float | None) -> None:
        """None (a batch of equal outcomes) says nothing."""
        if explained_variance is not None:
            self.explained.append(explained_variance)

    @property
    def over(self) -> bool:
        if self.min_gain is None or len(self.explained) <= self.patience:
            return False
        best = max(self.explained[: -self.patience])
        # A critic that explains nothing has not converged, it has not begun.
        return best > 0 and max(self.explained[-self.patience :]) < best + self.min_gain

    def state_dict(self) -> dict[str, list[float]]:
        return {"explained": list(self.explained)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.explained = list(state["explained"])
