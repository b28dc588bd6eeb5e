"""The methods' formulas: tensors and facts in, advantages and losses out. Trainers and `evaluate` run the same code."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from webagent_core.objectives.arpo import ARPO
from webagent_core.objectives.asyncwebrl import AsyncWebRL
from webagent_core.objectives.base import (
    LossOutput,
    Metric,
    Objective,
    PairTensors,
    Plan,
    RowPlan,
    RowTensors,
    TrajectoryFacts,
    TrajectoryPlan,
    ValueTensors,
    average_metrics,
    spread,
)
from webagent_core.objectives.dpo import UITARS, AgentQ
from webagent_core.objectives.evaluation import Evaluation, evaluate_objective
from webagent_core.objectives.hiconagent import HiconAgent
from webagent_core.objectives.hyperparameters import one_line
from webagent_core.objectives.openwebrl import OpenWebRL
from webagent_core.objectives.uitars2 import UITARS2
from webagent_core.objectives.webagent_r1 import WebAgentR1
from webagent_core.objectives.webgym import WebGym
from webagent_core.objectives.webrl import WebRL
from webagent_core.objectives.zerogui import ZeroGUI

__all__ = [
    "OBJECTIVES",
    "Evaluation",
    "LossOutput",
    "Metric",
    "Objective",
    "PairTensors",
    "Plan",
    "RowPlan",
    "RowTensors",
    "TrajectoryFacts",
    "TrajectoryPlan",
    "ValueTensors",
    "average_metrics",
    "evaluate",
    "load_objective",
    "objective_class",
    "spread",
]

METHODS = (WebGym, AsyncWebRL, OpenWebRL, ZeroGUI, ARPO, UITARS, UITARS2, WebRL, WebAgentR1, AgentQ, HiconAgent)
OBJECTIVES: dict[str, type[Objective]] = {method.name: method for method in METHODS}
PRESETS = ("paper", "released")


def objective_class(recipe: str) -> type[Objective]:
    if recipe not in OBJECTIVES:
        raise ValueError(f"recipe = {recipe!r} is not known; there are {', '.join(sorted(OBJECTIVES))}")
    return OBJECTIVES[recipe]


def load_objective(recipe: str, preset: str = "paper", **hyperparameters: Any) -> Objective:
    """The objective of a paper, ready for a trainer.

    `preset` "paper" is the paper's formula, "released" what the authors' code computes where that is public;
    `hyperparameters` go on top. Raises ValueError, in one line, for an unknown recipe, preset or hyperparameter, for a
    value out of range, and for a "released" that does not exist.
    """
    cls = objective_class(recipe)
    if preset not in PRESETS:
        raise ValueError(f"preset = {preset!r} is not known; there are {', '.join(PRESETS)}")
    values: dict[str, Any] = {}
    if preset == "released":
        if cls.released is None:
            raise ValueError(f"preset = 'released' does not exist for {recipe}: its authors published no training code")
        values.update(cls.released)
    values.update(hyperparameters)
    try:
        return cls(**values)
    except ValidationError as error:
        raise ValueError(one_line(recipe, cls, error)) from None


def evaluate(
    recipe: str,
    *,
    trajectories: list | None = None,
    responses: list | None = None,
    pairs: list | None = None,
    preset: str = "paper",
    **hyperparameters: Any,
) -> Evaluation:
    """Loss and advantages of one batch, from plain mappings: what the trainers compute, for checking by hand.

    A trajectory is a mapping of `group` (str), `reward` (float or None), `valid` (bool, default True) and `steps`, each
    a mapping of 1-D tensors of one length: `logp`, and where used `old_logp` (left out: equal to `logp`),
    `prox_logp`, `behave_logp`, `ref_logp`, `mask` (left out: all ones), `values` (WebRL: one number, the state's);
    and `repeats_next` (bool). A trajectory's `advantages`, per step a float or a 1-D tensor, replace the estimator,
    and then its group needs no baseline. Where the reward is shaped, `outcome` is what filters and replay look at;
    `stored` marks an earlier success that ARPO may replay. A response is one answer to a single step: a trajectory of
    one step, or that step's fields beside `group` and `reward`; HiconAgent's may add `compressed_logp`,
    `compressed_old_logp` and `compressed_ref_logp`. A pair is (chosen, rejected), each a step with `ref_logp`, which
    may be one number: the stored sum. The dtype of `logp` is the dtype of the loss, which back-propagates to it.

    Raises ValueError naming the field for input that the recipe does not take, for a missing log-probability and for
    tensors of different lengths, and whatever `load_objective` raises.
    """
    objective = load_objective(recipe, preset, **hyperparameters)
    return evaluate_objective(objective, trajectories=trajectories, responses=responses, pairs=pairs)
