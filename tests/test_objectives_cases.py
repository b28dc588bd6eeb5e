"""The case files on training maths, each for its whole kind. Where a case is debatable, the preferred outcome."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from webagent_core.objectives import RowTensors, TrajectoryFacts, evaluate, load_objective
from webagent_core.objectives.advantages import (
    discounted_returns,
    gae,
    group_zscore,
    length_adaptive_lambda,
    td_mc_blend,
    terminal_reward,
    why_no_signal,
)
from webagent_core.objectives.masks import response_mask

torch.set_num_threads(1)


def cases(name: str) -> list:
    found = json.loads((Path(__file__).parent / "cases" / f"{name}.json").read_text())
    assert found
    return [pytest.param(case["input"], case["expected"], id=f"{case['id']}-{case['kind']}") for case in found]


@pytest.mark.parametrize(("given", "expected"), cases("advantage"))
def test_advantages(given, expected):
    if "rows" in given:  # several rows of a session: one trajectory of as many steps, whatever order the rows come in
        sessions: dict[tuple[str, str], list[int]] = {}
        for i, row in enumerate(given["rows"]):
            sessions.setdefault((row["task"], row["session"]), []).append(i)
        facts = [
            TrajectoryFacts(task, given["rows"][rows[0]]["reward"], True, [1] * len(rows))
            for (task, _), rows in sessions.items()
        ]
        plan = load_objective("webagent_r1", ddof=given["ddof"], adv_eps=given["eps"]).plan(facts)
        by_row = {
            i: row.advantage
            for rows, planned in zip(sessions.values(), plan.trajectories, strict=True)
            for i, row in zip(rows, planned.rows, strict=True)
        }
        got = [by_row[i] for i in range(len(given["rows"]))]
        assert got == pytest.approx(expected["row_advantages"], abs=expected["tol"])
        return

    if given.get("divide_by_std") is False:
        got = [group_zscore(group["rewards"], divide_by_std=False) for group in given["groups"]]
    else:
        groups = enumerate(given["groups"])
        facts = [TrajectoryFacts(str(g), reward, True, [1]) for g, group in groups for reward in group["rewards"]]
        plan = load_objective("webagent_r1", ddof=given["ddof"], adv_eps=given["eps"]).plan(facts)
        flat = iter([planned.advantage for planned in plan.trajectories])
        got = [[next(flat) for _ in group["rewards"]] for group in given["groups"]]
    for one, wanted in zip(got, expected["advantages"], strict=True):
        assert one == pytest.approx(wanted, abs=expected["tol"])
        assert [a for a, w in zip(one, wanted, strict=True) if w == 0] == [0.0] * wanted.count(0.0)  # exactly


@pytest.mark.parametrize(("given", "expected"), cases("group_filter"))
def test_groups_with_signal_are_kept(given, expected):
    outcomes = given.get("outcomes", given["groups"])
    assert [why_no_signal(group) is None for group in outcomes] == expected["keep"]

    trajectories = [
        {"group": str(g), "reward": r, "outcome": o, "steps": [{"logp": torch.tensor([-1.0], requires_grad=True)}]}
        for g, group in enumerate(given["groups"])
        for r, o in zip(group, outcomes[g], strict=True)
    ]
    result = evaluate("openwebrl", trajectories=trajectories)
    kept = [one.kept for one in result.plan.trajectories if one.dropped != "invalid"]
    wanted = [expected["keep"][int(t["group"])] for t in trajectories if t["reward"] is not None]
    assert kept == wanted
    assert math.isfinite(result.loss.item())  # also when nothing is left
    result.loss.backward()


@pytest.mark.parametrize(("given", "expected"), cases("mask_layout"))
def test_only_what_the_model_generated_is_trained_on(given, expected):
    segments = [(segment["role"], segment["tokens"]) for segment in given["segments"]]
    assert response_mask(segments, given.get("max_len")) == expected["response_mask"]


@pytest.mark.parametrize(("given", "expected"), cases("returns"))
def test_returns_and_token_advantages(given, expected):
    kind = given["kind_of"]
    if kind == "lambda":
        assert length_adaptive_lambda(given["length"], given["alpha"]) == pytest.approx(expected["lam"], abs=1e-9)
        return
    if kind == "webrl":
        got = td_mc_blend(given["values"], given["outcome"], given["lam"])
        assert got == pytest.approx(expected["values_at_policy_tokens"], abs=expected["tol"])
        return
    mask = torch.tensor(given["mask"])
    if kind == "terminal_reward":
        wanted = torch.zeros(len(mask), dtype=torch.float64)
        wanted[expected["reward_position"]] = given["reward"]
        assert torch.equal(terminal_reward(given["reward"], mask), wanted)
        return
    rewards = torch.tensor(given["rewards"], dtype=torch.float64)
    if kind == "returns":
        got = discounted_returns(rewards, mask, given["gamma"])
    else:
        assert kind == "gae"
        values = torch.tensor(given["values"], dtype=torch.float64)
        got = gae(rewards, values, mask, given["gamma"], given["lam"])
    assert got.tolist() == pytest.approx(expected["values_at_policy_tokens"], abs=expected["tol"])


def aggregate(objective, given: dict, one_row_each: bool, sign: float) -> float:
    """The objective's normaliser alone: token losses go in as advantages, which at ratio 1 they are up to a sign."""
    losses = torch.tensor([[float(x) for x in row] for row in given["token_losses"]], dtype=torch.float64)
    mask = torch.tensor(given["mask"])
    names = [str(i) for i in range(len(losses))] if one_row_each else given["trajectory_of_row"]
    facts = []
    for name in dict.fromkeys(names):
        rows = [i for i, owner in enumerate(names) if owner == name]
        own = [sign * losses[i][mask[i].bool()] for i in rows]
        facts.append(TrajectoryFacts("g", None, True, [len(a) for a in own], advantages=own))
    coefficient = torch.tensor([row.coefficient for row in objective.plan(facts).rows], dtype=torch.float64)
    logp = torch.where(mask.bool(), -1.0, losses)  # garbage under the mask here too
    rows = RowTensors(logp, mask, sign * losses, coefficient, behave_logp=logp)

    def loss(of: list[int]) -> float:
        return objective.loss(RowTensors(**{k: v[of] for k, v in vars(rows).items() if v is not None})).loss.item()

    whole = loss(list(range(len(losses))))
    for micro_batches in (given.get("micro_batches"), [[i] for i in range(len(losses))]):
        if micro_batches:
            assert sum(loss(rows) for rows in micro_batches) == pytest.approx(whole, abs=1e-12)
    return whole


@pytest.mark.parametrize(("given", "expected"), cases("loss_agg"))
def test_loss_normalisations(given, expected):
    modes = {
        "token_mean": (load_objective("uitars2"), True, -1.0),
        "row_mean_token_mean": (load_objective("openwebrl", "released"), True, -1.0),
        "row_mean_token_sum": (load_objective("webgym"), True, 1.0),  # -A log p, and log p is -1
        "openwebrl_sum_over_turns": (load_objective("openwebrl"), False, -1.0),
        "webagent_r1_mean_over_turns": (load_objective("webagent_r1", beta=0.0), False, -1.0),
        "asyncwebrl_const_k": (load_objective("asyncwebrl", k=given.get("k", 10), dual_clip=None), False, -1.0),
    }
    for name, value in expected.items():
        if name != "tol":
            objective, one_row_each, sign = modes[name]
            assert aggregate(objective, given, one_row_each, sign) == pytest.approx(value, abs=expected["tol"]), name
