"""Every objective against a slow twin: plain loops over floats, written from the formulas, sharing no code.

The twin reads `live`, the log-probabilities of the policy in training, and the batch's own numbers for everything that
is not differentiated, so that moving one entry of `live` gives the gradient by finite differences.
"""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch

from webagent_core.objectives import OBJECTIVES, evaluate

torch.set_num_threads(1)

BATCHES = 8
H = 1e-6


# ---------------------------------------------------------------------------------------------------- random batches


def random_step(rng: random.Random, on_policy: bool, longest: int = 4) -> dict:
    length = rng.choice([0, *range(1, longest + 1), *range(1, longest + 1)])
    draw = lambda near: [x + rng.uniform(-0.4, 0.4) for x in near]  # noqa: E731
    logp = [-rng.uniform(0.05, 2.5) for _ in range(length)]
    kind = rng.random()
    mask = [0] * length if kind < 0.15 else [1] * length if kind < 0.4 else [rng.randint(0, 1) for _ in range(length)]
    step = {
        "logp": logp,
        "mask": mask,
        "ref_logp": draw(logp),
        "prox_logp": draw(logp),
        "behave_logp": [x - rng.choice([0.0, 0.0, 2.0]) for x in draw(logp)],
        "compressed_logp": draw(logp),
        "compressed_old_logp": draw(logp),
        "compressed_ref_logp": draw(logp),
        "values": [rng.uniform(0, 1) for _ in range(length)],
        "state_value": rng.uniform(0, 1),
        "repeats_next": rng.random() < 0.3,
    }
    if not on_policy:
        step["old_logp"] = draw(logp)
    return step


def random_batch(seed: int, recipe: str) -> list[dict]:
    """Four groups or more: one mixed, one flat, one of a single member, and some with invalid members."""
    rng = random.Random(seed)
    on_policy = seed % 3 == 0
    rewards = [[1.0, 0.0, 1.0], [0.0, 0.0], [1.0], [1.0, 0.0, -1.0, None], [1.0, 0.0, 0.0]]
    if seed % 2:
        rewards.append([rng.choice([0.0, 1.0, -1.0]) for _ in range(4)])
    batch = []
    for g, group in enumerate(rewards):
        for reward in group:
            steps = 1 if recipe == "hiconagent" else rng.choice([0, 1, 2, 3])
            batch.append(
                {
                    "group": f"g{g}",
                    "reward": reward,
                    "valid": not (g == 4 and rng.random() < 0.3),
                    "steps": [random_step(rng, on_policy) for _ in range(steps)],
                }
            )
    if recipe == "arpo":
        for g, reward in ((1, 1.0), (1, 1.0), (0, 1.0)):  # one is taken by the failed group 1, the others are not
            batch.append({"group": f"g{g}", "reward": reward, "valid": True, "stored": True})
            batch[-1]["steps"] = [random_step(rng, on_policy) for _ in range(2)]
    rng.shuffle(batch)
    return batch


def as_tensors(batch: list[dict], recipe: str) -> list[dict]:
    """The batch as `evaluate` takes it, with garbage under every mask."""
    out = []
    for trajectory in batch:
        steps = []
        for step in trajectory["steps"]:
            tensors = {"mask": torch.tensor(step["mask"]), "repeats_next": step["repeats_next"]}
            for name, value in step.items():
                if name.endswith("logp") or name == "values":
                    dirty = [x if m else math.nan for x, m in zip(value, step["mask"], strict=True)]
                    tensors[name] = torch.tensor(dirty, dtype=torch.float64)
            if recipe == "webrl":
                tensors["values"] = torch.tensor([step["state_value"]], dtype=torch.float64)
            if recipe != "hiconagent":
                tensors.pop("compressed_logp")
            tensors["logp"].requires_grad_()
            if "compressed_logp" in tensors:
                tensors["compressed_logp"].requires_grad_()
            steps.append(tensors)
        out.append({**trajectory, "steps": steps})
    return out


# ------------------------------------------------------------------------------------------------------- slow parts


def usable(trajectory: dict) -> bool:
    return trajectory["valid"] and trajectory["reward"] is not None


def groups_of(batch: list[dict]) -> list[list[int]]:
    order: dict[str, list[int]] = {}
    for i, trajectory in enumerate(batch):
        if usable(trajectory):
            order.setdefault(trajectory["group"], []).append(i)
    return list(order.values())


def zscores(batch: list[dict], members: list[int], eps: float) -> dict[int, float]:
    rewards = [batch[i]["reward"] for i in members]
    mean = sum(rewards) / len(rewards)
    if max(rewards) == min(rewards):
        return {i: 0.0 for i in members}
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return {i: (batch[i]["reward"] - mean) / (std + eps) for i in members}


def surrogate(rho: float, a: float, low: float, high: float, dual: float | None = None) -> float:
    value = min(rho * a, min(max(rho, 1 - low), 1 + high) * a)
    if dual is not None and a < 0:
        value = max(value, dual * a)
    return value


def k3(logp: float, ref: float) -> float:
    return math.exp(ref - logp) - (ref - logp) - 1


def tokens_of(step: dict) -> int:
    return sum(step["mask"])


def old_of(step: dict, t: int) -> float:
    return step["old_logp"][t] if "old_logp" in step else step["logp"][t]


def group_method(batch, live, *, eps, drop_flat, weight, token_loss):
    """Loss of a method with group z-scores; weight(groups, members, i, m) and token_loss(step, live, t, A) vary."""
    groups = [members for members in groups_of(batch) if len(members) >= 2]
    if drop_flat:
        groups = [g for g in groups if len({batch[i]["reward"] for i in g}) > 1]
    loss = 0.0
    for members in groups:
        advantages = zscores(batch, members, eps)
        for i in members:
            for j, step in enumerate(batch[i]["steps"]):
                total = 0.0
                for t, on in enumerate(step["mask"]):
                    if on:
                        total += token_loss(step, live[i][j], t, advantages[i])
                loss += weight(groups, members, i, tokens_of(step)) * total
    return loss


def lengths(batch, members):
    return sum(len(batch[i]["steps"]) for i in members)


def all_tokens(batch, groups):
    return sum(tokens_of(s) for members in groups for i in members for s in batch[i]["steps"])


def trajectory_tokens(batch, i):
    return max(sum(tokens_of(s) for s in batch[i]["steps"]), 1)


def clip_loss(low, high, dual=None):
    def token(step, now, t, a):
        return -surrogate(math.exp(now["logp"][t] - old_of(step, t)), a, low, high, dual)

    return token


# ----------------------------------------------------------------------------------------------------- slow methods


def webagent_r1(batch, live, released):
    def token(step, now, t, a):
        return clip_loss(0.2, 0.2)(step, now, t, a) + 0.001 * k3(now["logp"][t], step["ref_logp"][t])

    def paper(groups, members, i, m):
        return 1 / len(groups) / len(members) / len(batch[i]["steps"]) / max(m, 1)

    def code(groups, members, i, m):
        return 1 / sum(len(g) for g in groups) / trajectory_tokens(batch, i)

    weight, eps = (code, 1e-4) if released else (paper, 0.0)
    return group_method(batch, live, eps=eps, drop_flat=False, weight=weight, token_loss=token)


def asyncwebrl(batch, live, released):
    def token(step, now, t, a):
        stale = math.exp(step["prox_logp"][t] - step["behave_logp"][t])
        if released and stale > 5:
            return 0.0
        return -stale * surrogate(math.exp(now["logp"][t] - step["prox_logp"][t]), a, 0.2, 0.2, 3.0)

    def paper(groups, members, i, m):
        return 1 / len(groups) / len(members) / 10

    def code(groups, members, i, m):
        return 1 / all_tokens(batch, groups) / 10

    weight, eps = (code, 1e-5) if released else (paper, 0.0)
    return group_method(batch, live, eps=eps, drop_flat=True, weight=weight, token_loss=token)


def openwebrl(batch, live, released):
    def paper(groups, members, i, m):
        return 1 / len(groups) / len(members) / max(m, 1)

    def code(groups, members, i, m):
        return 1 / sum(lengths(batch, g) for g in groups) / max(m, 1)

    weight = code if released else paper
    return group_method(batch, live, eps=1e-6, drop_flat=True, weight=weight, token_loss=clip_loss(0.2, 0.28))


def zerogui(batch, live, released):
    def token(step, now, t, a):
        distance = now["logp"][t] - step["ref_logp"][t]
        cap = min(1.0, abs(a) / 0.1 / abs(step["logp"][t] - step["ref_logp"][t])) if released else 1.0
        return clip_loss(0.2, 0.2)(step, now, t, a) + 0.1 * cap * distance**2 / 2

    def paper(groups, members, i, m):
        return 1 / len(groups) / lengths(batch, members) / max(m, 1)

    def code(groups, members, i, m):
        return 1 / sum(lengths(batch, g) for g in groups) / max(m, 1)

    weight, eps = (code, 1e-8) if released else (paper, 0.0)
    return group_method(batch, live, eps=eps, drop_flat=True, weight=weight, token_loss=token)


def arpo(batch, live, released):
    keep = [not trajectory.get("stored") for trajectory in batch]
    for name in {trajectory["group"] for trajectory in batch}:
        members = [i for i, t in enumerate(batch) if t["group"] == name and usable(t)]
        fresh = [i for i in members if not batch[i].get("stored")]
        stored = [i for i in members if batch[i].get("stored")]
        if stored and fresh and all(batch[i]["reward"] < 1 for i in fresh):
            assert not released or all(batch[i]["reward"] == 0 for i in fresh)  # the two rules agree on this batch
            keep[fresh[0]], keep[stored[0]] = False, True
    batch = [{**t, "valid": t["valid"] and kept} for t, kept in zip(batch, keep, strict=True)]

    def paper(groups, members, i, m):
        return 1 / len(groups) / len(members) / trajectory_tokens(batch, i)

    def code(groups, members, i, m):
        return 1 / sum(len(g) for g in groups) / trajectory_tokens(batch, i)

    weight, eps, dual = (code, 1e-6, 3.0) if released else (paper, 0.0, None)
    return group_method(batch, live, eps=eps, drop_flat=False, weight=weight, token_loss=clip_loss(0.2, 0.3, dual))


def hiconagent(batch, live, released):
    def token(step, now, t, a):
        full, short = now["logp"][t], now["compressed_logp"][t]
        old = step["logp"][t] if released else old_of(step, t)
        loss = -surrogate(math.exp(full - old), a, 0.2, 0.2) + 0.01 * k3(full, step["ref_logp"][t])
        loss -= surrogate(math.exp(short - step["compressed_old_logp"][t]), a, 0.2, 0.2)
        loss += 0.01 * k3(short, step["compressed_ref_logp"][t])
        return loss + 0.1 * k3(short, step["logp"][t])

    def paper(groups, members, i, m):
        return 1 / len(groups) / len(members) / max(m, 1)

    def code(groups, members, i, m):
        return 1 / all_tokens(batch, groups)

    weight, eps = (code, 1e-6) if released else (paper, 0.0)
    return group_method(batch, live, eps=eps, drop_flat=False, weight=weight, token_loss=token)


def hiconagent_without_compression(batch, live, released):
    def token(step, now, t, a):
        return clip_loss(0.2, 0.2)(step, now, t, a) + 0.01 * k3(now["logp"][t], step["ref_logp"][t])

    def weight(groups, members, i, m):
        return 1 / len(groups) / len(members) / max(m, 1)

    return group_method(batch, live, eps=0.0, drop_flat=False, weight=weight, token_loss=token)


def webgym(batch, live, released):
    attempts = [i for i, t in enumerate(batch) if usable(t) and not (released and len(t["steps"]) < 2)]
    loss, tokens = 0.0, 0
    for i in attempts:
        if batch[i]["reward"] != 1:
            continue
        for j, step in enumerate(batch[i]["steps"]):
            if not step["repeats_next"]:
                tokens += tokens_of(step)
                loss -= sum(x for x, on in zip(live[i][j]["logp"], step["mask"], strict=True) if on)
    return loss / max(tokens, 1) if released else loss / len(attempts)


def uitars2(batch, live, released):
    loss, count = 0.0, 0
    for i, trajectory in enumerate(batch):
        if not usable(trajectory):
            continue
        places = [(j, t) for j, s in enumerate(trajectory["steps"]) for t, on in enumerate(s["mask"]) if on]
        count += len(places)
        values = [trajectory["steps"][j]["values"][t] for j, t in places] + [0.0]
        lam = max(0.0, 1 - 1 / (0.4 * len(places))) if places else 0.0
        for n, (j, t) in enumerate(places):
            advantage = 0.0
            for later in range(n, len(places)):
                reward = trajectory["reward"] if later == len(places) - 1 else 0.0
                delta = reward + 0.97 * values[later + 1] - values[later]
                advantage += (0.97 * lam) ** (later - n) * delta
            loss += clip_loss(0.2, 0.28)(trajectory["steps"][j], live[i][j], t, advantage)
    return loss / max(count, 1)


def webrl(batch, live, released):
    loss, rows = 0.0, 0
    for i, trajectory in enumerate(batch):
        if not usable(trajectory):
            continue
        reward, steps = trajectory["reward"], trajectory["steps"]
        for j, step in enumerate(steps):
            rows += 1
            last = j == len(steps) - 1
            value = step["state_value"]
            following = 0.0 if last else steps[j + 1]["state_value"]
            at = [t for t, on in enumerate(step["mask"]) if on]
            if not at:
                continue
            x = sum(live[i][j]["logp"][t] - step["ref_logp"][t] for t in at)
            now = reward if last else 0.0
            if not released:
                advantage = 0.5 * (now + following - value) + 0.5 * (reward - value)
                loss += (0.7 * x - advantage) ** 2
                continue
            advantage = following - value - 0.05 + now + 0.9 ** (len(steps) - 1 - j) * reward
            if advantage <= 0:
                continue
            frozen = sum(step["logp"][t] - step["ref_logp"][t] for t in at) / len(at)
            sure = math.exp(sum(step["ref_logp"][t] for t in at) / len(at)) >= 0.8
            b = min(5.0 if sure else 0.7, 1 / abs(frozen))
            error = abs(b * x / len(at) - 1)
            loss += (error**2 / 2 if error < 1 else error - 0.5) / b
    return loss / max(rows, 1)


CASES = [
    ("webgym", webgym, {}),
    ("asyncwebrl", asyncwebrl, {}),
    ("openwebrl", openwebrl, {}),
    ("zerogui", zerogui, {}),
    ("arpo", arpo, {"replay_slot": "first"}),
    ("uitars2", uitars2, {"alpha": 0.4, "gamma": 0.97}),
    ("webrl", webrl, {"beta": 0.7}),
    ("webagent_r1", webagent_r1, {}),
    ("hiconagent", hiconagent, {}),
    ("hiconagent", hiconagent_without_compression, {"hcpo": False}),
]
PARAMETERS = [
    pytest.param(recipe, slow, preset, hyper, id=f"{slow.__name__}-{preset}")
    for recipe, slow, hyper in CASES
    for preset in ("paper", "released")
    if preset == "paper" or (OBJECTIVES[recipe].released is not None and "hcpo" not in hyper)
]


@pytest.mark.parametrize(("recipe", "slow", "preset", "hyper"), PARAMETERS)
def test_loss_and_gradient_equal_the_slow_twin(recipe, slow, preset, hyper):
    released, groups, moved = preset == "released", 0, 0
    for seed in range(BATCHES):
        batch = random_batch(seed, recipe)
        groups += len({trajectory["group"] for trajectory in batch})
        tensors = as_tensors(batch, recipe)
        result = evaluate(recipe, trajectories=tensors, preset=preset, **hyper)
        live = [[{k: s[k] for k in ("logp", "compressed_logp")} for s in t["steps"]] for t in batch]
        assert result.loss.dtype == torch.float64
        assert result.loss.item() == pytest.approx(slow(batch, live, released), abs=1e-10)

        result.loss.backward()
        live = copy.deepcopy(live)
        for i, trajectory in enumerate(tensors):
            for j, step in enumerate(trajectory["steps"]):
                for name in ("logp", "compressed_logp"):
                    if name not in step:
                        continue
                    row = live[i][j][name]
                    gradient = torch.zeros_like(step[name]) if step[name].grad is None else step[name].grad
                    for t, derivative in enumerate(gradient.tolist()):
                        at = row[t]
                        row[t] = at + H
                        above = slow(batch, live, released)
                        row[t] = at - H
                        below = slow(batch, live, released)
                        row[t] = at
                        assert derivative == pytest.approx((above - below) / (2 * H), abs=2e-8)
                        moved += derivative != 0
    assert groups >= 20
    assert moved >= 20


@pytest.mark.parametrize("recipe", ["uitars", "agentq"])
def test_preference_loss_and_gradient_equal_the_slow_twin(recipe):
    beta = 0.3

    def slow(pairs, live):
        total = 0.0
        for pair, now in zip(pairs, live, strict=True):
            ratios = [
                sum(x - r for x, r, on in zip(logp, step["ref_logp"], step["mask"], strict=True) if on)
                for step, logp in zip(pair, now, strict=True)
            ]
            total += math.log(1 + math.exp(-beta * (ratios[0] - ratios[1])))
        return total / len(pairs)

    for seed in range(20):
        rng = random.Random(seed)
        pairs = [(random_step(rng, True), random_step(rng, True)) for _ in range(1 + seed % 4)]
        live = [[list(step["logp"]) for step in pair] for pair in pairs]
        tensors = [
            [
                {
                    "mask": torch.tensor(step["mask"]),
                    "logp": torch.tensor(step["logp"], dtype=torch.float64, requires_grad=True),
                    "ref_logp": torch.tensor(step["ref_logp"], dtype=torch.float64),
                }
                for step in pair
            ]
            for pair in pairs
        ]
        named = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in tensors]
        result = evaluate(recipe, pairs=named if seed % 2 else [tuple(pair) for pair in tensors], beta=beta)
        assert result.loss.item() == pytest.approx(slow(pairs, live), abs=1e-10)
        result.loss.backward()
        for n, pair in enumerate(tensors):
            for side, step in enumerate(pair):
                for t, derivative in enumerate(step["logp"].grad.tolist()):
                    at = live[n][side][t]
                    live[n][side][t] = at + H
                    above = slow(pairs, live)
                    live[n][side][t] = at - H
                    below = slow(pairs, live)
                    live[n][side][t] = at
                    assert derivative == pytest.approx((above - below) / (2 * H), abs=2e-8)
