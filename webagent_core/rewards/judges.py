"""The papers' judges. Each is a question (prompts.py), what it is shown (evidence.py) and how its reply is read.

All want a `JudgeClient`, whatever model answers behind it: a hosted one, a local vLLM, `local_judge`. `vision=False`
shows a judge without eyes the text of pages in place of their screenshots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from webagent_core.episode.trajectory import ExitStatus, Trajectory
from webagent_core.rewards import prompts
from webagent_core.rewards.evidence import actions, answer, pages
from webagent_core.rewards.json_verdict import criteria_met
from webagent_core.rewards.judge_client import JudgeClient, Reply
from webagent_core.rewards.reward_manager import JudgeError, Reward, RewardManager, task_facts
from webagent_core.rewards.verdict import Verdict, parse_verdict

Facts = Mapping[str, Any] | Callable[[Trajectory], Any]  # by group, or by task name; see `task_facts`


class Judge(RewardManager):
    """One question about a trajectory, answered SUCCESS or NOT SUCCESS. Override `chat`; `read` for other forms."""

    def __init__(self, client: JudgeClient, *, vision: bool = True) -> None:
        self.client = client
        self.vision = vision

    def chat(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} does not say what to ask: override chat(self, trajectory)")

    def read(self, reply: Reply) -> bool | None:
        """Whether the reply says success; None where it cannot be read."""
        return as_bool(parse_verdict(reply.text, "label", finish_reason=reply.finish_reason))

    async def score(self, trajectory: Trajectory) -> Reward:
        success, evidence = await self.client.ask(self.chat(trajectory), self.read)
        return Reward(float(success), reasons=(evidence[-1]["text"],), evidence=tuple(evidence))


class _CriteriaJudge(Judge):
    """A judge that answers for each of several criteria; success is all of them."""

    def __init__(self, client: JudgeClient, *, vision: bool = True, most_pages: int | None = None) -> None:
        super().__init__(client, vision=vision)
        self.most_pages = most_pages

    question = prompts.RUBRIC

    def criteria(self, trajectory: Trajectory) -> Sequence[str]:
        raise NotImplementedError

    def chat(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        listed = "\n".join(f"{number}. {item}" for number, item in enumerate(self.criteria(trajectory), start=1))
        parts = [f"Task: {trajectory.goal}\nCriteria:\n{listed}"]
        parts += [*pages(trajectory, self.most_pages, vision=self.vision), actions(trajectory), answer(trajectory)]
        return prompts.chat(self.question, parts, prompts.CRITERIA_FORMAT)

    async def score(self, trajectory: Trajectory) -> Reward:
        wanted = len(self.criteria(trajectory))

        def read(reply: Reply) -> tuple[bool, list[bool | None]] | None:
            # One entry for each criterion, and an overall word that agrees with them: a judge that left out the
            # criterion that does not hold has not answered.
            met = criteria_met(reply.text)
            verdict = as_bool(parse_verdict(reply.text, "json", keys=("success",), finish_reason=reply.finish_reason))
            return None if verdict is None or len(met) != wanted or None in met else (verdict, met)

        (success, met), evidence = await self.client.ask(self.chat(trajectory), read)
        missed = tuple(f"not met: {c}" for c, m in zip(self.criteria(trajectory), met, strict=True) if not m)
        return Reward(float(success), reasons=missed, evidence=tuple(evidence))


class RubricJudge(_CriteriaJudge):
    """WebGym: 1 if every item of the task's own rubric is met, else 0.

    Args:
        rubrics: a list of items for each task.
        most_pages: the last ones shown; None: all of the trajectory.
    """

    def __init__(self, client: JudgeClient, rubrics: Facts, *, vision: bool = True, most_pages: int | None = None):
        super().__init__(client, vision=vision, most_pages=most_pages)
        self.rubrics = rubrics

    def criteria(self, trajectory: Trajectory) -> Sequence[str]:
        rubric = task_facts(self.rubrics, trajectory, "rubric")
        if isinstance(rubric, str) or not rubric or not all(isinstance(item, str) and item.strip() for item in rubric):
            raise ValueError(f"rubric of {trajectory.task} = {rubric!r} is not allowed: a list of texts, none empty")
        return rubric


class AgentQJudge(_CriteriaJudge):
    """Agent Q: the final state and the actions against a few criteria, all of which must hold."""

    question = prompts.AGENTQ

    def __init__(
        self, client: JudgeClient, *, criteria: Sequence[str] = prompts.AGENTQ_CRITERIA, vision: bool = True
    ) -> None:
        super().__init__(client, vision=vision, most_pages=1)
        self._criteria = tuple(criteria)

    def criteria(self, trajectory: Trajectory) -> Sequence[str]:
        return self._criteria


def format_layers(trajectory: Trajectory) -> Reward | None:
    """OpenWebRL's two layers before the judge (appendix A.4): -1, 0, or None, which passes the trajectory on.

    -1: format errors in a row ended the episode. 0: the format check fails, which is that the last response holds no
    action, or (as in the authors' code) that the episode ended without a final answer.
    """
    if trajectory.exit_status is ExitStatus.FORMAT_ERROR:
        return Reward(-1.0, reasons=("ended by format errors in a row",))
    if trajectory.exit_status is not ExitStatus.ANSWERED:
        return Reward(0.0, reasons=(f"no final answer: {trajectory.exit_status}",))
    if not trajectory.steps or trajectory.steps[-1].action is None:
        return Reward(0.0, reasons=("the last response holds no action",))
    return None


class OpenWebRLJudge(Judge):
    """OpenWebRL's three layers (appendix A.4): -1 or 0 by `format_layers`, else what the judge says (J in {0, 1}).

    Args:
        screenshots: how many of the last pages the judge sees.
        layers: False: the judge alone, of every trajectory.
    """

    def __init__(
        self, client: JudgeClient, *, screenshots: int | None = 3, layers: bool = True, vision: bool = True
    ) -> None:
        super().__init__(client, vision=vision)
        self.screenshots, self.layers = screenshots, layers

    def chat(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        shown = pages(trajectory, self.screenshots, vision=self.vision)
        parts = [f"Task: {trajectory.goal}", *shown, actions(trajectory), answer(trajectory)]
        return prompts.chat(prompts.OPENWEBRL, parts, prompts.LABEL_FORMAT)

    async def score(self, trajectory: Trajectory) -> Reward:
        decided = format_layers(trajectory) if self.layers else None
        return decided or await super().score(trajectory)


class ReferenceJudge(Judge):
    """UI-TARS-2: the agent's answer against the task's reference answer. No answer is a plain failure.

    Args:
        references: a text for each task.
    """

    def __init__(self, client: JudgeClient, references: Facts, *, question: str = prompts.REFERENCE) -> None:
        super().__init__(client)
        self.references = references
        self.question = question

    def chat(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        reference = task_facts(self.references, trajectory, "reference answer")
        parts = [f"Task: {trajectory.goal}\nReference answer: {reference}", answer(trajectory)]
        return prompts.chat(self.question, parts, prompts.LABEL_FORMAT)

    async def score(self, trajectory: Trajectory) -> Reward:
        if not (trajectory.answer or "").strip():
            return Reward(0.0, reasons=("no answer",))
        return await super().score(trajectory)


VoteRule = Literal["unanimous", "paper", "released"]


class VoteJudge(Judge):
    """ZeroGUI: asked `votes` times at a temperature; success only if all say so. Shown pages and nothing else.

    The agent's own words, answer and actions are withheld: a judge that reads "done" believes it too easily.

    Args:
        rule: see `tally`.
    """

    def __init__(
        self,
        client: JudgeClient,
        *,
        votes: int = 4,
        temperature: float = 1.0,
        rule: VoteRule = "unanimous",
        vision: bool = True,
    ) -> None:
        super().__init__(client, vision=vision)
        if votes < 1:
            raise ValueError(f"votes = {votes!r} is not allowed: at least 1")
        self.votes, self.temperature, self.rule = votes, temperature, rule

    def chat(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        parts = [f"Task: {trajectory.goal}", *pages(trajectory, vision=self.vision)]
        return prompts.chat(prompts.ZEROGUI, parts, prompts.LABEL_FORMAT)

    async def score(self, trajectory: Trajectory) -> Reward:
        chat = self.chat(trajectory)

        async def vote(number: int) -> tuple[Verdict, list[dict[str, Any]]]:
            try:
                success, said = await self.client.ask(chat, self.read, temperature=self.temperature, sample=number)
            except JudgeError as error:
                return Verdict.UNPARSEABLE, list(error.evidence)
            return Verdict.SUCCESS if success else Verdict.FAILURE, said

        cast = await asyncio.gather(*(vote(number) for number in range(self.votes)))
        evidence = tuple({"vote": number, **each} for number, (_, said) in enumerate(cast) for each in said)
        verdicts = [verdict for verdict, _ in cast]
        value = tally(verdicts, self.rule)
        counted = f"votes: {', '.join(verdicts)}"
        if value is None:
            raise JudgeError(f"{counted}: undecided", evidence)
        return Reward(value, reasons=(counted,), evidence=evidence)


def tally(votes: Sequence[str], rule: VoteRule = "unanimous") -> float | None:
    """1.0 for success, 0.0 for failure, None where the votes decide nothing.

    Args:
        votes: `Verdict`s.
        rule: `unanimous`: one failure is a failure, all successes are a success, and where neither is so a vote that
            could not be read might have been either: undecided. `paper`: n of n, so that a vote that cannot be read
            fails the trajectory. `released`: votes that cannot be read are left out.

    Raises:
        ValueError: no votes, one that is no verdict, or an unknown rule.
    """
    if rule not in ("unanimous", "paper", "released"):
        raise ValueError(f"rule = {rule!r} is not allowed: unanimous, paper or released")
    verdicts = [Verdict(vote) for vote in votes]
    if not verdicts:
        raise ValueError("votes = [] is not allowed: at least one")
    if rule == "released":
        verdicts = [vote for vote in verdicts if vote is not Verdict.UNPARSEABLE]
        return float(set(verdicts) == {Verdict.SUCCESS}) if verdicts else None
    if all(vote is Verdict.SUCCESS for vote in verdicts):
        return 1.0
    return 0.0 if rule == "paper" or Verdict.FAILURE in verdicts else None


def as_bool(verdict: Verdict) -> bool | None:
    return None if verdict is Verdict.UNPARSEABLE else verdict is Verdict.SUCCESS
