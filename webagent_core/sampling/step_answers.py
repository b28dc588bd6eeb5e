"""HiconAgent's rollout: answers to single recorded steps. No page is opened.

The history that an answer is sampled after may be shorter than the whole one (`draw_history`); the loss looks at the
answer after the whole history and after the compressed one, as the method's two branches have it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from webagent_core.episode.actions import Action, FormatError
from webagent_core.episode.contexts import Budget, ContextOverflow, HiconAgentContext
from webagent_core.episode.rollout import GenerateBatch
from webagent_core.episode.runner import Response
from webagent_core.episode.trajectory import ExitStatus, Step, Trajectory
from webagent_core.tasks.recorded_steps import RecordedStep, action_at_point, action_on_element


@dataclass
class AnsweredStep(Step):
    """A step whose `messages` and `prompt_ids`, what the policy was given, may hold less of the history than `full`."""

    history: int = 0  # steps of the past in `messages`
    full: list[dict] = field(default_factory=list)  # the chat with the whole history
    compressed: list[dict] = field(default_factory=list)  # and with the compressed one
    gold: Action | None = None  # what is right to do


def gold_of(trajectory: Trajectory) -> Action:
    """The right action of an answered step, for `GoldStepReward`."""
    return trajectory.steps[0].gold


class StepAnswers:
    """Asks a policy for one answer to each of some recorded steps.

    Args:
        context: with the whole history; the second branch's is the same with the compressed one.
        budget: cuts chats to what fits.
        at_points: the policy acts at points of the screenshot, in the space of recorded ones; otherwise on elements.
    """

    def __init__(self, context: HiconAgentContext, budget: Budget, *, at_points: bool = False) -> None:
        self.full, self.compressed, self.budget = context, copy(context), budget
        self.compressed.history = "compressed"
        self.parse: Callable[[str], Action | FormatError] = action_at_point if at_points else action_on_element

    def __call__(
        self,
        rows: Sequence[Mapping[str, Any]],
        generate: GenerateBatch,
        history: Callable[[int], int] | None = None,
    ) -> list[Trajectory]:
        """One trajectory of one `AnsweredStep`, not scored yet, for each row of a data set of recorded steps.

        Answers to the same step are a group; the trajectory's `seed` is the step's number.

        Args:
            history: how many steps of the past an answer is to see, of so many; None: all of them.

        Raises:
            ContextOverflow: a step does not fit, however much of it is cut (see `fits`).
        """
        recorded = [RecordedStep.of(row) for row in rows]
        steps = [self._ask(each, history) for each in recorded]
        answers = generate([step.messages for step in steps])
        return [self._answered(*each) for each in zip(recorded, steps, answers, strict=True)]

    def fits(self, recorded: RecordedStep) -> bool:
        """Whether the least that a prompt for this step can be fits."""
        try:
            self._ask(recorded, None)
        except ContextOverflow:
            return False
        return True

    def _ask(self, recorded: RecordedStep, history: Callable[[int], int] | None) -> AnsweredStep:
        screenshots = [picture(file) if file else None for file in recorded.screenshots]
        *past, (page, screenshot) = zip(recorded.pages, screenshots, strict=True)
        steps = [
            Step(url="", observation=text, messages=[], action=self._recorded(line), screenshot=seen)
            for (text, seen), line in zip(past, recorded.actions, strict=True)
        ]
        whole = len(steps)
        kept = whole if history is None else history(whole)
        full, asked, compressed = (
            self.budget.fit(context, recorded.goal, shown, page, screenshot)
            for context, shown in ((self.full, steps), (self.full, steps[whole - kept :]), (self.compressed, steps))
        )
        return AnsweredStep(
            url="",
            observation=page,
            messages=asked.messages,
            screenshot=screenshot,
            cut=asked.cut,
            shown=asked.page,
            history=kept,
            full=full.messages,
            compressed=compressed.messages,
            gold=self._recorded(recorded.gold),
        )

    def _answered(self, recorded: RecordedStep, step: AnsweredStep, answer: Response | ContextOverflow) -> Trajectory:
        if isinstance(answer, ContextOverflow):
            raise answer
        step.response, step.prompt_ids, step.response_ids = answer.text, answer.prompt_ids, answer.response_ids
        action = self.parse(answer.text)
        if isinstance(action, FormatError):
            step.error, status = action.message, ExitStatus.FORMAT_ERROR
        else:
            step.action, status = action, ExitStatus.ANSWERED
        number = len(recorded.actions)
        return Trajectory(recorded.task, number, recorded.name, recorded.goal, [step], exit_status=status)

    def _recorded(self, line: str) -> Action | None:
        action = self.parse(line) if line else None
        if isinstance(action, FormatError):
            raise ValueError(f"recorded action = {line!r} is not allowed: {action.message}")
        return action


@lru_cache(maxsize=256)  # the G answers to a step, and later steps of its episode, want the same ones
def picture(file: str) -> bytes:
    return Path(file).read_bytes()


# ------------------------------------------------------------------------------------- what is asked, and after what


def step_schedule(steps: int, groups_per_update: int, updates: int, seed: int) -> list[int]:
    """Which step each group answers, in the order of training: all steps once, shuffled, then all once more.

    An update never sees a step twice: what is left of a round and is not enough for one more update is left out.

    Raises:
        ValueError: there are fewer steps than an update has groups.
    """
    if steps < groups_per_update:
        raise ValueError(
            f"rollout.groups_per_update = {groups_per_update} is not allowed: there are {steps} recorded steps"
        )
    rng = random.Random(f"steps/{seed}")
    whole = steps // groups_per_update * groups_per_update
    order: list[int] = []
    while len(order) < updates * groups_per_update:
        order += rng.sample(range(steps), whole)
    return order[: updates * groups_per_update]


def history_bias(update: int, updates: int, steepness: float, ramp: float) -> float:
    """k of `draw_history` at an update (0 the first): 0 at first, `steepness` from 1/`ramp` of all updates on.

    (HiconAgent's dynamic context sampling, as in the authors' code.)
    """
    return steepness * min(1.0, ramp * update / max(updates - 1, 1))


def draw_history(available: int, bias: float, rng: random.Random) -> int:
    """How many of the last `available` steps a prompt shows: n from 0 on, with chances in proportion to exp(bias n)."""
    lengths = range(available + 1)
    return rng.choices(lengths, [math.exp(bias * (length - available)) for length in lengths])[0]
