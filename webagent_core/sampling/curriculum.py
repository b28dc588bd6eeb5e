"""How many steps an episode may take: by the task's difficulty (WebGym), and more of them later on (OpenWebRL)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from webagent_core.recipe import Recipe
from webagent_core.tasks.lookup import levels_of

# Of the default MiniWoB++ tasks, by how many actions they take: one; two; more.
MINIWOB_DIFFICULTY: Mapping[str, int] = {
    "miniwob/click-button": 0,
    "miniwob/click-link": 0,
    "miniwob/click-tab": 0,
    "miniwob/click-dialog-2": 0,
    "miniwob/click-test-2": 0,
    "miniwob/click-collapsible": 1,
    "miniwob/click-option": 1,
    "miniwob/choose-list": 1,
    "miniwob/enter-text": 1,
    "miniwob/click-checkboxes": 2,
    "miniwob/click-checkboxes-transfer": 2,
    "miniwob/login-user": 2,
}


@dataclass(frozen=True)
class StepLimits:
    """`limits(task, update)`: the step limit of an episode, of a task by its name or group.

    `max_steps` is the ceiling, `later_max_steps` the one from update `later_from_update` on (counted from 0). Below
    it `by_difficulty` gives each level, 0 the easiest, its own limit (WebGym: 10, 20, 30). `difficulty` holds tasks'
    levels, by group or by name; a task that it does not name counts as one of the hardest. `own` holds the limits that
    tasks state themselves, by group.
    """

    max_steps: int
    by_difficulty: tuple[int, ...] = ()
    later_max_steps: int | None = None
    later_from_update: int | None = None
    difficulty: Mapping[str, int] = field(default_factory=lambda: MINIWOB_DIFFICULTY)
    own: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.later_max_steps is None) != (self.later_from_update is None):
            raise ValueError(
                f"later_max_steps = {self.later_max_steps}, later_from_update = {self.later_from_update} is not"
                " allowed: both or neither"
            )

    @classmethod
    def of(cls, recipe: Recipe, difficulty: Mapping[str, int] = MINIWOB_DIFFICULTY) -> StepLimits:
        sampling = recipe.sampling
        stated, own = levels_of(recipe.tasks)
        difficulty = {**difficulty, **stated}
        if sampling is None:
            return cls(recipe.rollout.max_steps, difficulty=difficulty, own=own)
        return cls(
            recipe.rollout.max_steps,
            tuple(sampling.max_steps_by_difficulty or ()),
            sampling.later_max_steps,
            sampling.later_from_update,
            difficulty,
            own,
        )

    def __call__(self, task: str, update: int) -> int:
        """The limit for a task in the batch that has `update` batches before it."""
        later = self.later_from_update is not None and update >= self.later_from_update
        ceiling = self.later_max_steps if later else self.max_steps
        ceiling = min(ceiling, self.own.get(task, ceiling))
        if not self.by_difficulty:
            return ceiling
        hardest = len(self.by_difficulty) - 1
        level = self.difficulty.get(task, self.difficulty.get(task.partition("#")[0], hardest))
        if not 0 <= level <= hardest:
            raise ValueError(f"difficulty of {task} = {level!r} is not allowed: 0 to {hardest}")
        return min(ceiling, self.by_difficulty[level])

    def describe(self) -> str:
        text = f"step limit: {self.max_steps}"
        if self.later_from_update is not None:
            text += f", {self.later_max_steps} from update {self.later_from_update + 1} on"
        if self.by_difficulty:
            text += f"; by difficulty at most {', '.join(map(str, self.by_difficulty))}"
        return text
