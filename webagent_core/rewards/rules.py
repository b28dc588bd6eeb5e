"""Rewards without a judge: what the environment says, WebArena's rules, HiconAgent's gold step."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from webagent_core.episode.actions import Action, FormatError, parse_action
from webagent_core.episode.trajectory import Trajectory
from webagent_core.rewards.evidence import final_page
from webagent_core.rewards.html_check import html_check
from webagent_core.rewards.judges import Facts, ReferenceJudge
from webagent_core.rewards.prompts import FUZZY, UNACHIEVABLE
from webagent_core.rewards.reward_manager import Reward, RewardManager, score_one, task_facts
from webagent_core.rewards.string_match import UNACHIEVABLE as NOT_AVAILABLE
from webagent_core.rewards.string_match import Preset, check_references, string_match
from webagent_core.rewards.url_match import url_match


class EnvironmentReward(RewardManager):
    """What the task's own program said when the episode ended: for MiniWoB++, 1 if its raw reward is 1, else 0."""

    def score(self, trajectory: Trajectory) -> Reward:
        if trajectory.reward is None:
            raise ValueError("its environment gave no reward")
        return Reward(trajectory.reward, reasons=(trajectory.detail,) if trajectory.detail else ())


class WebArenaReward(RewardManager):
    """WebArena's evaluators (also WebAgent-R1's reward): all that a task names must hold; 1 or 0.

    Written here because the package `webarena-verified` judges another thing: the network trace of a whole episode
    (HAR) against a form of the tasks of its own, where these judge the answer and the page at the end.

    Args:
        evaluations: for each task a mapping with any of `reference_answers` (see string_match), `reference_url` (see
            url_match) and `program_html` (a list, see html_check).
        judge: asked where only meaning decides (fuzzy_match), e.g. `fuzzy_judge(client)`. Without one, such an answer
            is invalid, unless another rule has failed already.
    """

    def __init__(
        self, evaluations: Facts, *, judge: Callable[[Any], RewardManager] | None = None, preset: Preset = "paper"
    ) -> None:
        self.evaluations, self.judge, self.preset = evaluations, judge, preset

    async def score(self, trajectory: Trajectory) -> Reward:
        evaluation = task_facts(self.evaluations, trajectory, "evaluation")
        allowed = {"reference_answers", "reference_url", "program_html"}
        if not isinstance(evaluation, dict) or not evaluation or set(evaluation) - allowed:
            raise ValueError(
                f"evaluation = {evaluation!r} is not allowed: a mapping from any of {', '.join(sorted(allowed))}"
            )
        page = final_page(trajectory)
        findings: list[dict[str, Any]] = []

        def note(rule: str, met: bool | None, found: str) -> None:
            findings.append({"kind": "rule", "rule": rule, "met": met, "found": found[:300]})

        if "reference_url" in evaluation:
            url = page.url if page else ""
            note("url_match", bool(url_match(evaluation["reference_url"], url, self.preset)), url)
        for check in evaluation.get("program_html", ()):
            if page is not None and not page.html:
                raise ValueError(
                    "program_html needs the document at the end (trajectory.final.html), which is not recorded"
                )
            met, found = html_check(check, page.html) if page else (False, "no page")
            note("program_html", met, found)
        references = evaluation.get("reference_answers")
        if references is not None:
            met = string_match(references, trajectory.answer, self.preset)
            undecided = met is None and trajectory.answer is not None
            note("string_match", None if undecided else bool(met), trajectory.answer or "")
            if undecided and all(each["met"] is not False for each in findings):
                return await self._by_meaning(check_references(references)["fuzzy_match"], trajectory, findings)
        return Reward(float(all(each["met"] for each in findings)), evidence=tuple(findings))

    async def _by_meaning(self, wanted: Any, trajectory: Trajectory, findings: list[dict[str, Any]]) -> Reward:
        if self.judge is None:
            return Reward(invalid="judge_error", reasons=("fuzzy_match needs a judge",), evidence=tuple(findings))
        verdict = await score_one(self.judge(wanted), trajectory)
        evidence = (*findings, *verdict.evidence)
        return Reward(verdict.value, verdict.invalid, verdict.reasons, evidence)


def fuzzy_judge(client: Any) -> Callable[[Any], RewardManager]:
    """The judge of WebArena's fuzzy_match, for `WebArenaReward(judge=...)`."""

    def judge(wanted: Any) -> RewardManager:
        phrases = [wanted] if isinstance(wanted, str) else list(wanted)
        question = UNACHIEVABLE if phrases == [NOT_AVAILABLE] else FUZZY
        return ReferenceJudge(client, lambda _: "\n".join(phrases), question=question)

    return judge


# ------------------------------------------------------------------------------------------------ gold steps


# The value from which a step of the right type counts as done. Of a text or an element it is 0 or 1; a point loses its
# distance, and within 14% of the screen is where AndroidInTheWild (arXiv:2307.10088) draws the line.
DONE_FROM = 0.86


class GoldStepReward(RewardManager):
    """HiconAgent (arXiv:2512.01763, Eq. 7): r = r^f + r^t + r^v of one answer to one step, against the gold action.

    The trajectory has that one step. See `step_score`. Its outcome is 1 where the step is done, which is a matter of
    type and value alone whatever the weights are; else 0.

    Args:
        gold: the right `Action` for each step, by group or task.
        parse: reads a response; the default is the DOM grammar.
        weights: of format, type and value (the authors' code: 0.5 each).
        text_f1: above this token F1 a text is right.
        point_scale: what a side of the picture measures in the coordinates of both actions.
    """

    def __init__(
        self,
        gold: Facts,
        *,
        parse: Callable[[str], Action | FormatError] = parse_action,
        weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
        text_f1: float = 0.5,
        point_scale: float = 1000.0,
    ) -> None:
        self.gold, self.parse, self.weights, self.text_f1 = gold, parse, weights, text_f1
        self.point_scale = point_scale

    def score(self, trajectory: Trajectory) -> Reward:
        if len(trajectory.steps) != 1:
            raise ValueError(f"{len(trajectory.steps)} steps, allowed is 1: an answer to one step")
        predicted = self.parse(trajectory.steps[0].response)
        gold = task_facts(self.gold, trajectory, "gold action")
        predicted_action = None if isinstance(predicted, FormatError) else predicted
        parts = step_score(predicted_action, gold, text_f1=self.text_f1, point_scale=self.point_scale)
        value = sum(weight * part for weight, part in zip(self.weights, parts, strict=True))
        found = dict(zip(("format", "type", "value"), parts, strict=True))
        evidence = ({"kind": "gold_step", "predicted": str(predicted), "gold": str(gold), **found},)
        return Reward(value, evidence=evidence, outcome=float(parts[:2] == (1, 1) and parts[2] >= DONE_FROM))


def step_score(
    predicted: Action | None, gold: Action, *, text_f1: float = 0.5, point_scale: float = 1000.0
) -> tuple[float, float, float]:
    """(r^f, r^t, r^v) of a predicted action against the gold one.

    r^f: the answer holds an action. r^t: it is of the gold type. r^v, only with the right type: for a text, 1 if the
    F1 of the token multisets is above `text_f1`; for a point, 1 - d with d the Euclidean distance in units of
    `point_scale` (not below 0); for an element, a direction and the like, equal or not; an action with several of
    these has their product (ours), one with none has nothing to get wrong: 1 (ours).
    """
    if predicted is None:
        return 0.0, 0.0, 0.0
    if predicted.name != gold.name:
        return 1.0, 0.0, 0.0
    value = 1.0
    for name in ("text", "answer", "option", "url"):
        wanted, given = getattr(gold, name), getattr(predicted, name)
        if wanted is not None:
            value *= float(token_f1(given or "", wanted) > text_f1)
    for x, y in (("x", "y"), ("x2", "y2")):
        wanted, given = (getattr(gold, x), getattr(gold, y)), (getattr(predicted, x), getattr(predicted, y))
        if wanted != (None, None):
            value *= 0.0 if None in given else max(0.0, 1.0 - math.dist(given, wanted) / point_scale)
    for name in ("element", "direction", "keys"):
        wanted = getattr(gold, name)
        if wanted is not None:
            value *= float(getattr(predicted, name) == wanted)
    return 1.0, 1.0, value


def token_f1(one: str, other: str) -> float:
    """F1 of the two texts' multisets of words, in lower case; two texts without any word are equal."""
    first, second = (Counter(re.findall(r"[^\W_]+", text.casefold())) for text in (one, other))
    if not first and not second:
        return 1.0
    shared = (first & second).total()
    return 2 * shared / (first.total() + second.total())
