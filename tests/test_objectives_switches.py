"""Every published idea has a switch, and turning it changes what is computed; everything else is refused."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
import torch

from webagent_core.objectives import OBJECTIVES, TrajectoryFacts, evaluate, load_objective

torch.set_num_threads(1)


def batch(recipe: str) -> list[dict]:
    """Two mixed groups, a flat one and one in which all failed, far enough from the old policy for every clip."""
    rng = random.Random(3)
    trajectories = []
    for g, rewards in enumerate([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0], [0.0, 0.0, 0.0]]):
        for reward in rewards:
            steps = []
            for _ in range(1 if recipe == "hiconagent" else rng.randint(1, 4)):
                length = rng.randint(1, 4)
                logp = torch.tensor([-rng.uniform(0.1, 2) for _ in range(length)], dtype=torch.float64)
                shifts = torch.tensor([rng.choice([-1.5, -0.22, 0.1, 1.5]) for _ in range(length)], dtype=torch.float64)
                steps.append(
                    {
                        "logp": logp.clone().requires_grad_(),
                        "old_logp": logp + shifts,
                        "prox_logp": logp + shifts,
                        "behave_logp": logp + shifts - rng.choice([0.3, 2.0]),
                        "ref_logp": logp - shifts,
                        "values": torch.rand(length, generator=torch.Generator().manual_seed(length)).double(),
                        "repeats_next": rng.random() < 0.4,
                    }
                )
                if recipe == "hiconagent":
                    steps[-1]["compressed_logp"] = (logp + 0.4).requires_grad_()
                    steps[-1]["compressed_ref_logp"] = logp
            trajectories.append({"group": str(g), "reward": reward, "steps": steps})
    if recipe == "arpo":
        trajectories.append({**trajectories[0], "group": "3", "stored": True})
    return trajectories


GROUPED = ("webagent_r1", "asyncwebrl", "openwebrl", "zerogui", "arpo", "hiconagent")
SWITCHES = [
    ("webagent_r1", "step_norm", ["length", "k", "none"]),
    ("asyncwebrl", "step_norm", ["k", "length", "none"]),
    ("openwebrl", "step_norm", ["none", "length", "k"]),
    ("asyncwebrl", "k", [10.0, 5.0]),
    ("zerogui", "kl", ["k2", "k3", "k1", "none"]),
    ("webagent_r1", "kl", ["k3", "k2", "none"]),
    ("webagent_r1", "beta", [0.001, 0.1]),
    ("hiconagent", "kl", ["k3", "k2", "none"]),
    ("asyncwebrl", "dual_clip", [3.0, 2.0, None]),
    ("arpo", "dual_clip", [None, 3.0]),
    ("openwebrl", "eps_high", [0.28, 0.2]),
    ("arpo", "eps_high", [0.3, 0.2]),
    ("uitars2", "eps_high", [0.28, 0.2]),
    ("openwebrl", "eps_low", [0.2, 0.1]),
    ("asyncwebrl", "decoupled", [True, False]),
    ("asyncwebrl", "behave_cap", [None, 5.0]),
    ("arpo", "replay", [True, False]),
    ("webgym", "drop_repeats", [True, False]),
    ("webgym", "min_steps", [0, 3]),
    ("uitars2", "lam", [None, 1.0]),
    ("uitars2", "alpha", [0.05, 1.0]),
    ("uitars2", "gamma", [1.0, 0.9]),
    ("hiconagent", "hcpo", [True, False]),
    ("hiconagent", "consistency", [0.1, 0.0]),
    ("hiconagent", "full_ratio", ["clipped", "one"]),
    ("webagent_r1", "drop_flat_groups", [False, True]),
    ("openwebrl", "drop_flat_groups", [True, False]),
    ("webrl", "lam", [0.5, 1.0, 0.0]),
    ("webrl", "gamma", [1.0, 0.9]),
    ("webrl", "beta", [1.0, 0.5]),
    ("webrl", "form", ["regression", "positives"]),
    *[(recipe, "ddof", [1, 0]) for recipe in GROUPED],
    *[(recipe, "adv_eps", [0.0, 0.1]) for recipe in GROUPED],
]


@pytest.mark.parametrize(("recipe", "switch", "settings"), SWITCHES, ids=lambda x: x if isinstance(x, str) else "")
def test_turning_a_switch_changes_the_loss(recipe, switch, settings):
    losses = [evaluate(recipe, trajectories=batch(recipe), **{switch: setting}).loss.item() for setting in settings]
    assert len({round(loss, 9) for loss in losses}) == len(settings), losses


def test_dropping_and_clipping_a_behaviour_weight_differ():
    losses = {
        mode: evaluate("asyncwebrl", trajectories=batch("asyncwebrl"), behave_cap=5.0, behave_cap_mode=mode).loss.item()
        for mode in ("clip", "drop")
    }
    assert losses["clip"] != losses["drop"]


def test_capping_the_kl_changes_the_loss_where_beta_is_large():
    losses = [
        evaluate("zerogui", trajectories=batch("zerogui"), kl=kl, beta=1.0).loss.item() for kl in ("k2", "k2_capped")
    ]
    assert losses[0] > losses[1]


def test_the_length_adaptive_lambda_changes_advantages_with_the_length_of_the_trajectory():
    objective = load_objective("uitars2", alpha=0.5)
    assert objective.policy_lambda(10) == pytest.approx(0.8)
    assert objective.policy_lambda(100) == pytest.approx(0.98)
    assert load_objective("uitars2", lam=0.7).policy_lambda(100) == 0.7


@pytest.mark.parametrize("recipe", [name for name, cls in OBJECTIVES.items() if cls.released])
def test_the_released_preset_differs_from_the_papers(recipe):
    paper = evaluate(recipe, trajectories=batch(recipe))
    released = evaluate(recipe, trajectories=batch(recipe), preset="released")
    assert paper.loss.item() != released.loss.item()
    assert load_objective(recipe, "released") == load_objective(recipe, **OBJECTIVES[recipe].released)


@pytest.mark.parametrize("recipe", ["uitars", "uitars2", "agentq"])
def test_a_released_preset_that_does_not_exist_is_refused(recipe):
    with pytest.raises(ValueError, match=rf"preset = 'released' does not exist for {recipe}"):
        load_objective(recipe, "released")


@pytest.mark.parametrize(
    ("recipe", "hyper", "message"),
    [
        ("openwebrl", {"eps_low": 1.0}, "openwebrl: eps_low = 1.0 is not allowed: a number >= 0 and < 1"),
        ("openwebrl", {"eps_low": -0.1}, "eps_low = -0.1 is not allowed: a number >= 0 and < 1"),
        ("openwebrl", {"eps_high": -0.1}, "eps_high = -0.1 is not allowed: a number >= 0"),
        ("asyncwebrl", {"k": 0}, "k = 0 is not allowed: a number > 0"),
        ("asyncwebrl", {"k": -1.0}, "k = -1.0 is not allowed: a number > 0"),
        ("asyncwebrl", {"dual_clip": 1.0}, "dual_clip = 1.0 is not allowed: a number > 1 or null"),
        ("asyncwebrl", {"behave_cap": 0.0}, "behave_cap = 0.0 is not allowed: a number > 0 or null"),
        ("asyncwebrl", {"behave_cap_mode": "mask"}, "behave_cap_mode = 'mask' is not allowed: one of drop, clip"),
        ("uitars2", {"alpha": 0.0}, "alpha = 0.0 is not allowed: a number > 0"),
        ("uitars2", {"gamma": 1.1}, "gamma = 1.1 is not allowed: a number >= 0 and <= 1"),
        ("uitars2", {"lam": -0.1}, "lam = -0.1 is not allowed: a number >= 0 and <= 1 or null"),
        ("zerogui", {"kl": "k4"}, "kl = 'k4' is not allowed: one of none, k1, k2, k3, k2_capped"),
        ("zerogui", {"beta": float("nan")}, "beta = nan is not allowed: a number >= 0"),
        ("zerogui", {"beta": "0.1"}, "beta = '0.1' is not allowed: a number >= 0"),
        ("webrl", {"beta": 0.0}, "beta = 0.0 is not allowed: a number > 0"),
        ("uitars", {"beta": 0.0}, "uitars: beta = 0.0 is not allowed: a number > 0"),
        ("webagent_r1", {"ddof": 2}, "ddof = 2 is not allowed: a whole number >= 0 and <= 1"),
        ("webagent_r1", {"step_norm": "sqrt"}, "step_norm = 'sqrt' is not allowed: one of length, k, none"),
        ("webagent_r1", {"drop_flat_groups": 1}, "drop_flat_groups = 1 is not allowed: true or false"),
        ("webgym", {"eps_low": 0.2}, "webgym: unknown key eps_low; allowed: drop_repeats, min_steps, normaliser"),
        ("webgymn", {}, "recipe = 'webgymn' is not known; there are agentq, arpo"),
    ],
)
def test_a_bad_hyperparameter_is_refused_with_its_name_and_range(recipe, hyper, message):
    with pytest.raises(ValueError) as caught:
        load_objective(recipe, **hyper)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


STEP = {"logp": torch.tensor([-1.0, -2.0], requires_grad=True)}


@pytest.mark.parametrize(
    ("recipe", "given", "message"),
    [
        ("webagent_r1", {"trajectories": [STEP]}, "webagent_r1: trajectories[0].steps[0].ref_logp is missing: kl"),
        ("zerogui", {"trajectories": [STEP]}, "zerogui: trajectories[0].steps[0].ref_logp is missing: kl = k2"),
        ("asyncwebrl", {"trajectories": [STEP]}, "asyncwebrl: trajectories[0].steps[0].behave_logp is missing"),
        ("webrl", {"trajectories": [STEP]}, "webrl: trajectories[0].steps[0].ref_logp is missing"),
        ("webrl", {"trajectories": [STEP | {"ref_logp": STEP["logp"]}]}, "steps[0].values is missing: the critic's"),
        ("uitars2", {"trajectories": [STEP]}, "uitars2: trajectories[0].steps[0].values is missing: the critic's"),
        ("hiconagent", {"responses": [STEP]}, "hiconagent: responses[0].steps[0].ref_logp is missing"),
        (
            "hiconagent",
            {"responses": [STEP | {"ref_logp": STEP["logp"], "compressed_logp": STEP["logp"]}]},
            "responses[0].steps[0].compressed_ref_logp is missing",
        ),
        ("openwebrl", {"trajectories": [{}]}, "openwebrl: trajectories[0].steps[0].logp is missing"),
        ("openwebrl", {"trajectories": [{"logp": torch.zeros(2, 2)}]}, "logp has shape (2, 2); a 1-D tensor is needed"),
        ("openwebrl", {"trajectories": [STEP | {"mask": [1]}]}, "steps[0].mask has 1 entries, and logp has 2"),
        ("openwebrl", {"trajectories": [STEP | {"old_logp": torch.ones(3)}]}, "old_logp has 3 entries, and logp has 2"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(recipe, given, message):
    ((kind, steps),) = given.items()
    batch = [{"group": "g", "reward": 1.0, "steps": [step]} for step in steps]
    with pytest.raises(ValueError) as caught:
        evaluate(recipe, **{kind: batch})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "given", "message"),
    [
        ("openwebrl", {}, "openwebrl: takes trajectories, and was given nothing"),
        ("openwebrl", {"pairs": []}, "openwebrl: takes trajectories, and was given pairs"),
        ("uitars", {"trajectories": []}, "uitars: takes pairs, and was given trajectories"),
        ("uitars", {"pairs": [{"chosen": STEP | {"ref_logp": STEP["logp"]}}]}, "uitars: pairs[0].rejected is missing"),
        ("agentq", {"pairs": [(STEP, STEP)]}, "agentq: pairs[0].chosen.ref_logp is missing"),
        ("openwebrl", {"trajectories": [{"steps": []}]}, "trajectories[0].group is missing"),
        ("openwebrl", {"trajectories": [{"group": "g"}]}, "trajectories[0].steps is missing"),
        (
            "openwebrl",
            {"trajectories": [{"group": "g", "steps": [STEP], "advantages": [1.0, 2.0]}]},
            "trajectories[0].advantages has 2 entries for 1 steps",
        ),
        (
            "hiconagent",
            {"trajectories": [{"group": "g", "reward": 1.0, "steps": [STEP | {"ref_logp": STEP["logp"]}] * 2}]},
            "hiconagent: 2 steps are not allowed: an answer is one step",
        ),
    ],
)
def test_input_of_the_wrong_kind_is_refused(recipe, given, message):
    with pytest.raises(ValueError) as caught:
        evaluate(recipe, **given)
    assert message in str(caught.value)


def test_a_trainer_that_forgets_the_critics_values_is_told():
    facts = [TrajectoryFacts("g", 1.0, True, [2])]
    for recipe in ("uitars2", "webrl"):
        assert load_objective(recipe).uses_critic
        with pytest.raises(ValueError, match=f"{recipe}: values is missing"):
            load_objective(recipe).plan(facts)


def test_evaluate_runs_the_plan_and_the_loss_that_trainers_call(monkeypatch):
    calls = []
    cls = OBJECTIVES["openwebrl"]
    plan, loss = cls.plan, cls.loss
    monkeypatch.setattr(cls, "plan", lambda self, facts: (calls.append("plan"), plan(self, facts))[1])
    monkeypatch.setattr(cls, "loss", lambda self, rows: (calls.append("loss"), loss(self, rows))[1])
    evaluate("openwebrl", trajectories=batch("openwebrl"))
    assert calls == ["plan", "loss"]


# What a loss is written with. No adapter has a reason to use these: it asks the objective.
FORMULA_WORDS = {"exp", "minimum", "logsigmoid", "smooth_l1_loss", "mse_loss", "binary_cross_entropy_with_logits"}


def test_no_adapter_holds_a_formula_of_its_own():
    root = Path(__file__).resolve().parents[1]
    importing = 0
    for package in ("trl_webagent", "verl_webagent"):
        for path in sorted((root / package).rglob("*.py")) if (root / package).is_dir() else []:
            if path.parent.name == "cpu":  # a rollout server samples: that is not a method's formula
                continue
            tree = ast.parse(path.read_text())
            imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            importing += "webagent_core.objectives" in imported
            torch_calls = {
                node.func.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in ("torch", "F")
            }
            assert not torch_calls & FORMULA_WORDS, f"{path} computes {torch_calls & FORMULA_WORDS} itself"
    assert importing, "no trainer imports webagent_core.objectives"
