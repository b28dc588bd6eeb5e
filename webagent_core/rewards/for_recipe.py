"""The reward manager that a recipe's section `reward` asks for, the same for both trainers: `rewards_for(recipe)`.

`reward.manager` names it. Around whichever it is stand what a recipe adds: OpenWebRL's layers (`reward.layers`), ARPO's
format reward (`reward.format_weight`), a length penalty (`reward.length_penalty`). With preset `released`, WebArena's
rules and ZeroGUI's votes count as in the authors' code, loopholes included.

What a manager has to know of a task stands in the JSON file `reward.facts`, an object by task name
("miniwob/click-button") or by group ("miniwob/click-button#7", the page of one seed, looked at first). Without that
file, it is what the tasks say themselves (`tasks.file`).
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from webagent_core.rewards.judge_client import JudgeClient, JudgeSettings, check_packages
from webagent_core.rewards.judges import (
    AgentQJudge,
    Facts,
    OpenWebRLJudge,
    ReferenceJudge,
    RubricJudge,
    VoteJudge,
    format_layers,
)
from webagent_core.rewards.layers import Layered, LengthPenalty, Mixed, WithFormat
from webagent_core.rewards.reward_manager import RewardManager
from webagent_core.rewards.rules import EnvironmentReward, GoldStepReward, WebArenaReward, fuzzy_judge

if TYPE_CHECKING:
    from webagent_core.recipe import Recipe, Reward


@dataclass(frozen=True)
class Parts:
    """What a recipe says, as managers take it."""

    section: Reward
    released: bool  # whether rules and votes are counted as the authors' code counts them
    gold: Facts | None
    facts: dict[str, Any]

    @cached_property
    def judge(self) -> JudgeClient:
        return JudgeClient(self.section.judge or JudgeSettings())

    @property
    def outcome_model(self) -> RewardManager:
        from webagent_core.rewards.outcome_model import OutcomeModel, OutcomeModelReward

        return OutcomeModelReward(OutcomeModel.load(self.section.outcome_model))

    @property
    def last_pages(self) -> int | None:
        return self.section.judge_screenshots


class Manager(NamedTuple):
    """What a name of `reward.manager` makes, and the settings without which it cannot."""

    make: Callable[[Parts], RewardManager]
    needs: tuple[str, ...] = ()


def _rules(parts: Parts) -> RewardManager:
    judge = fuzzy_judge(parts.judge) if _any_fuzzy(parts.facts) else None
    return WebArenaReward(parts.facts, judge=judge, preset="released" if parts.released else "paper")


def _judge(parts: Parts) -> RewardManager:
    section = parts.section
    return OpenWebRLJudge(
        parts.judge, screenshots=parts.last_pages, layers=bool(section.layers), vision=section.judge_vision
    )


def _rubric(parts: Parts) -> RewardManager:
    return RubricJudge(parts.judge, parts.facts, vision=parts.section.judge_vision, most_pages=parts.last_pages)


def _votes(parts: Parts) -> RewardManager:
    section = parts.section
    given = {"votes": section.votes, "temperature": section.vote_temperature}
    given = {name: value for name, value in given.items() if value is not None}
    rule = "released" if parts.released else "unanimous"
    return VoteJudge(parts.judge, rule=rule, vision=section.judge_vision, **given)


def _mixed(parts: Parts) -> RewardManager:
    return Mixed(
        parts.facts,
        program=EnvironmentReward(),
        reference=ReferenceJudge(parts.judge, parts.facts) if _any_text(parts.facts) else None,
        outcome_model=parts.outcome_model if _any_null(parts.facts) else None,
    )


def _gold_step(parts: Parts) -> RewardManager:
    section = parts.section
    weights = tuple(
        1.0 if weight is None else weight
        for weight in (section.format_weight, section.type_weight, section.value_weight)
    )
    more = {} if section.text_f1 is None else {"text_f1": section.text_f1}
    return GoldStepReward(parts.gold, weights=weights, **more)


MANAGERS: dict[str, Manager] = {
    "page": Manager(lambda parts: EnvironmentReward()),  # the task's own program, such as MiniWoB++'s raw reward
    "rules": Manager(_rules, ("facts",)),  # WebArena's evaluators (WebAgent-R1)
    "judge": Manager(_judge, ("judge",)),  # one question, the last pages (OpenWebRL)
    "rubric": Manager(_rubric, ("judge", "facts")),  # the task's own checklist (WebGym, AsyncWebRL)
    "criteria": Manager(  # a few criteria for any task (Agent Q)
        lambda parts: AgentQJudge(parts.judge, vision=parts.section.judge_vision), ("judge",)
    ),
    "votes": Manager(_votes, ("judge",)),  # asked several times, all must agree (ZeroGUI)
    "reference": Manager(lambda parts: ReferenceJudge(parts.judge, parts.facts), ("judge", "facts")),
    "outcome_model": Manager(lambda parts: parts.outcome_model, ("outcome_model",)),  # a trained model (WebRL)
    "mixed": Manager(_mixed),  # program, reference or outcome model, as the task has it (UI-TARS-2)
    "gold_step": Manager(_gold_step),  # against the recorded action (HiconAgent)
}


def rewards_for(recipe: Recipe, *, gold: Facts | None = None) -> RewardManager:
    """The reward manager of `recipe`, built.

    Args:
        gold: for `gold_step`: the right `Action` by group.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: see `check_rewards`.
    """
    check_rewards(recipe)
    section = recipe.reward
    if section.manager == "gold_step" and gold is None:
        raise ValueError("gold is missing: the reward manager gold_step compares with the recorded actions")
    known = MANAGERS.get(section.manager)
    parts = Parts(section, recipe.preset == "released", gold, facts_of(recipe))
    manager = known.make(parts) if known else load(section.manager)
    if section.layers and section.manager != "judge":
        manager = Layered(format_layers, last=manager)
    if section.format_weight and section.manager != "gold_step":
        manager = WithFormat(manager, weight=section.format_weight)
    if section.length_penalty:
        limit = section.length_limit or recipe.rollout.max_steps
        manager = LengthPenalty(manager, free=section.length_free or 0, limit=limit, most=section.length_penalty)
    return manager


def plays_for_the_page(recipe: Recipe) -> bool:
    """Whether the task's own program says all that there is to the reward, so that nobody has to be asked."""
    section = recipe.reward
    added = section.layers or section.format_weight or section.length_penalty
    return section.manager == "page" and not added


def check_rewards(recipe: Recipe) -> None:
    """Raise, in one line that names setting, value and what is allowed, for a reward that cannot be had; cheap.

    Raises:
        ValueError: no such class; no judge's address, model or key; facts that are missing for a task.
        FileNotFoundError: a file or folder that the section names is not there.
        ModuleNotFoundError: a judge's packages are not installed.
    """
    section = recipe.reward
    who = f"reward.manager = {section.manager!r}"
    if section.length_penalty:
        free, limit = section.length_free or 0, section.length_limit or recipe.rollout.max_steps
        if free >= limit:
            raise ValueError(f"reward.length_free = {free} is not allowed: below the limit, {limit} steps")
    if section.manager not in MANAGERS:
        load(section.manager)
        return
    needs = set(MANAGERS[section.manager].needs)
    if section.manager == "gold_step" and "responses" not in recipe.load_objective().inputs:
        raise ValueError(f"{who}: allowed only where recorded steps are answered; the recipe hiconagent does that")
    facts = facts_of(recipe)
    from webagent_core.tasks.lookup import tell_success  # brings the browser's library, which recipes do without

    if section.manager == "page" and not tell_success(recipe.tasks):
        raise ValueError(f"{who} is not allowed with these tasks: nothing on their pages says how they went")
    if "facts" in needs and not facts:
        raise ValueError(f"{who} needs reward.facts: a JSON file that says for each task what to look for")
    if "facts" in needs and section.facts:
        _check_covered(facts, recipe, section.facts)
    if section.manager == "rules" and _any_fuzzy(facts) or section.manager == "mixed" and _any_text(facts):
        needs.add("judge")
    if section.manager == "mixed" and _any_null(facts):
        needs.add("outcome_model")
    if "judge" in needs:
        check_packages()
        try:
            (section.judge or JudgeSettings()).complete()
        except ValueError as error:
            raise ValueError(f"{who} asks a judge: {error}") from None
    if "outcome_model" in needs:
        folder = section.outcome_model
        if not folder or not (Path(folder) / "config.json").is_file():
            raise FileNotFoundError(
                f"{who} needs reward.outcome_model, which is {folder!r}: allowed is the folder of a model, see "
                "python -m webagent_core.rewards.train_outcome_model"
            )


def check_name(name: str) -> None:
    """Raises ValueError unless `name` is one of `MANAGERS` or of the form package.module:Class."""
    if name not in MANAGERS and not re.fullmatch(r"[\w.]+:\w+", name):
        allowed = ", ".join(MANAGERS)
        raise ValueError(f"reward.manager = {name!r} is not known; there are {allowed}, or package.module:Class")


def load(name: str) -> RewardManager:
    """An instance of the class that "package.module:Class" names.

    Raises:
        ValueError: there is none, it takes arguments, or it is no reward manager.
    """
    try:
        manager = pkgutil.resolve_name(name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"reward.manager = {name!r}: no package.module:Class to call ({error})") from None
    if not isinstance(manager, RewardManager):
        raise ValueError(f"reward.manager = {name!r}: allowed is a subclass of webagent_core.rewards.RewardManager")
    return manager


def facts_of(recipe: Recipe) -> dict[str, Any]:
    """What the recipe's manager has to know of each task: the file's, else what the tasks say themselves."""
    if recipe.reward.facts:
        return read_facts(recipe.reward.facts)
    from webagent_core.tasks.lookup import facts_for  # as in check_rewards

    return facts_for(recipe)


def read_facts(path: str) -> dict[str, Any]:
    """The JSON object in the file. Raises FileNotFoundError, or ValueError where it holds none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"reward.facts = {path!r}: no such file; allowed is a JSON object by task or group")
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"reward.facts = {path!r} is no JSON: {error}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"reward.facts = {path!r} is not allowed: a JSON object by task name or group")
    return facts


def _check_covered(facts: dict[str, Any], recipe: Recipe, path: str | None) -> None:
    named = {key.partition("#")[0] for key in facts}
    for task in recipe.tasks.names:
        if task not in named:
            raise ValueError(f"reward.facts = {path!r} says nothing of task {task!r}; every task needs an entry")


def _any_text(facts: dict[str, Any]) -> bool:
    return any(isinstance(value, str) for value in facts.values())


def _any_null(facts: dict[str, Any]) -> bool:
    return None in facts.values()


def _any_fuzzy(facts: dict[str, Any]) -> bool:
    answers = [value.get("reference_answers") for value in facts.values() if isinstance(value, dict)]
    return any(isinstance(each, dict) and "fuzzy_match" in each for each in answers)
