"""What must hold of the formulas whatever the numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from webagent_core.objectives import PairTensors, TrajectoryFacts, ValueTensors, evaluate, load_objective, spread
from webagent_core.objectives.advantages import gae, terminal_reward
from webagent_core.objectives.kl import k2, k2_capped, k3
from webagent_core.objectives.preference import dpo

torch.set_num_threads(1)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def leaf(*values: float) -> torch.Tensor:
    return tensor(*values).requires_grad_()


def attempt(reward: float | None, *steps: list[float], group: str = "g", old_shift: float = 0.1, **more) -> dict:
    """A trajectory whose steps have these log-probabilities; everything else is near them."""
    return {
        "group": group,
        "reward": reward,
        "steps": [
            {
                "logp": leaf(*step),
                "old_logp": tensor(*step) - old_shift,
                "prox_logp": tensor(*step) - old_shift,
                "behave_logp": tensor(*step) + 0.2,
                "ref_logp": tensor(*step) - 0.3,
            }
            for step in steps
        ],
        **more,
    }


def gradients(trajectories: list[dict]) -> list[torch.Tensor]:
    return [step["logp"].grad for t in trajectories for step in t["steps"]]


GROUPED = ("webagent_r1", "asyncwebrl", "openwebrl", "zerogui", "arpo")


def test_the_gradient_of_k2_is_the_log_ratio_and_that_of_k3_one_minus_the_ratio():
    logp, ref = leaf(-0.5, -3.0, -0.2), tensor(-1.0, -0.1, -0.2)
    k2(logp, ref).sum().backward()
    assert torch.allclose(logp.grad, (logp - ref).detach())
    logp.grad = None
    k3(logp, ref).sum().backward()
    assert torch.allclose(logp.grad, 1 - torch.exp(ref - logp.detach()))


def test_the_capped_k2_never_pulls_harder_than_the_policy_term_pushes():
    logp, ref, advantage = leaf(-0.5, -9.0, -0.2, -1.0), tensor(-1.0, -0.1, -0.2, -0.9), tensor(1.0, -0.5, 1.0, 0.0)
    k2_capped(logp, ref, advantage, beta=0.1).sum().backward()
    pull = 0.1 * logp.grad.abs()
    assert (pull <= advantage.abs() + 1e-12).all()
    assert pull[1].item() == pytest.approx(0.5)  # 0.1 * 8.9 would be more than |A|
    assert pull[0].item() == pytest.approx(0.05)  # uncapped: beta times the log-ratio
    assert pull[3].item() == 0.0


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("recipe", GROUPED)
def test_a_flat_group_gives_exactly_zero(recipe, drop):
    trajectories = [attempt(0.1, [-1.0, -2.0]), attempt(0.1, [-0.5], [-0.1, -3.0]), attempt(0.1, [-1.5])]
    result = evaluate(recipe, trajectories=trajectories, beta=0.0, drop_flat_groups=drop)
    result.loss.backward()
    assert result.advantages == [0.0, 0.0, 0.0]
    assert result.loss.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(trajectories))


def test_a_flat_group_that_stays_counts_in_the_mean_and_feels_its_kl():
    mixed = lambda: [attempt(1.0, [-1.0, -2.0], group="a"), attempt(0.0, [-0.5], group="a")]  # noqa: E731
    flat = lambda: [attempt(1.0, [-1.0], group="b"), attempt(1.0, [-2.0], group="b")]  # noqa: E731
    alone = evaluate("webagent_r1", trajectories=mixed(), beta=0.5).loss
    both = evaluate("webagent_r1", trajectories=mixed() + flat(), beta=0.5).loss
    of_flat = evaluate("webagent_r1", trajectories=flat(), beta=0.5).loss
    dropped = evaluate("webagent_r1", trajectories=mixed() + flat(), beta=0.5, drop_flat_groups=True).loss
    assert of_flat.item() > 0
    assert both.item() == pytest.approx((alone.item() + of_flat.item()) / 2)
    assert dropped.item() == pytest.approx(alone.item())


@pytest.mark.parametrize("recipe", GROUPED)
def test_more_steps_in_a_trajectory_leave_its_groups_advantages_unchanged(recipe):
    short = [attempt(1.0, [-1.0]), attempt(0.0, [-1.0]), attempt(0.0, [-1.0])]
    long = [attempt(1.0, *[[-1.0]] * 9), attempt(0.0, [-1.0]), attempt(0.0, [-1.0], [-1.0])]
    assert evaluate(recipe, trajectories=short).advantages == evaluate(recipe, trajectories=long).advantages


def test_constant_k_weighs_a_trajectory_by_its_length_and_the_length_norm_does_not():
    facts = [TrajectoryFacts("g", 1.0, True, [1] * 2), TrajectoryFacts("g", 0.0, True, [1] * 12)]
    for step_norm, weights in (("k", [2 / 20, 12 / 20]), ("length", [1 / 2, 1 / 2]), ("none", [2 / 2, 12 / 2])):
        plan = load_objective("asyncwebrl", step_norm=step_norm, k=10.0).plan(facts)
        assert [sum(r.coefficient for r in t.rows) for t in plan.trajectories] == pytest.approx(weights)


def test_openwebrl_adds_turns_up():
    once = [attempt(1.0, [-1.0, -2.0]), attempt(0.0, [-0.5])]
    twice = [attempt(1.0, [-1.0, -2.0], [-1.0, -2.0]), attempt(0.0, [-0.5])]
    only_second = [attempt(1.0), attempt(0.0, [-0.5])]
    a, b, c = (evaluate("openwebrl", trajectories=t).loss.item() for t in (once, twice, only_second))
    assert b - c == pytest.approx(2 * (a - c))


def test_swapping_a_pair_turns_the_sign_of_the_margin():
    chosen, rejected, beta = tensor(0.3, -1.0, 4.0), tensor(-0.2, 0.5, -4.0), 0.7
    margin = beta * (chosen - rejected)
    assert torch.allclose(dpo(rejected, chosen, beta) - dpo(chosen, rejected, beta), margin)
    step = lambda *x: {"logp": leaf(*x), "ref_logp": tensor(*x) * 0.5}  # noqa: E731
    pair = (step(-1.0, -2.0), step(-0.3))
    there = evaluate("uitars", pairs=[pair]).loss
    back = evaluate("uitars", pairs=[pair[::-1]]).loss
    one = 0.1 * ((-3.0 + 1.5) - (-0.3 + 0.15))
    assert (back - there).item() == pytest.approx(one)


def test_a_stored_reference_sum_is_as_good_as_the_reference_itself():
    logp, ref, mask = leaf(-1.0, -2.0, -4.0), tensor(-1.5, -1.0, -9.0), torch.tensor([1, 1, 0])
    other = {"logp": leaf(-1.0), "ref_logp": tensor(-2.0)}
    computed = evaluate("agentq", pairs=[({"logp": logp, "ref_logp": ref, "mask": mask}, other)]).loss
    stored = evaluate("agentq", pairs=[({"logp": logp, "ref_logp": -2.5, "mask": mask}, other)]).loss
    assert stored.item() == computed.item()


def test_preference_micro_batches_add_up():
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(5, 3, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.rand(5, 3, generator=generator) < 0.7
    whole = PairTensors(draw(), mask, draw(), draw(), ~mask, draw(), torch.full((5,), 0.2, dtype=torch.float64))
    objective = load_objective("agentq")
    parts = [PairTensors(**{k: v[i] for k, v in vars(whole).items()}) for i in ([0, 1], [2], [3, 4])]
    total = sum(objective.pair_loss(part).loss.item() for part in parts)
    assert total == pytest.approx(objective.pair_loss(whole).loss.item())


def test_webrl_stands_still_where_the_log_ratio_has_arrived():
    beta, value = 0.5, 0.25
    # One step that ends in success: TD and MC part agree, A = 1 - V.
    advantage = 1 - value
    logp = leaf(-1.0, -2.0)
    ref = tensor(-1.0, -2.0 - advantage / beta)
    step = {"logp": logp, "ref_logp": ref, "values": tensor(value)}
    result = evaluate("webrl", trajectories=[{"group": "g", "reward": 1.0, "steps": [step]}], beta=beta)
    result.loss.backward()
    assert result.advantages == [[pytest.approx(advantage)]]
    assert result.loss.item() == pytest.approx(0.0, abs=1e-20)
    assert logp.grad.abs().max().item() == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize("x", [-3.0, -0.2, 0.0, 0.3, 0.9, 1.5])
def test_released_webrl_clones_with_a_weight_that_ends_at_one_over_beta(x):
    beta, logp = 1.0, leaf(-2.0, -3.0)
    ref = tensor(-2.0 - x, -3.0 - x)
    result = evaluate(
        "webrl",
        preset="released",
        beta=beta,
        sure=1.0,
        trajectories=[{"group": "g", "reward": 1.0, "steps": [{"logp": logp, "ref_logp": ref, "values": 0.1}]}],
    )
    result.loss.backward()
    weight = min(1.0, max(0.0, 1 - beta * x))
    assert logp.grad.tolist() == pytest.approx([-weight / 2, -weight / 2], abs=1e-12)


def test_gae_with_lambda_one_is_the_monte_carlo_return_minus_the_value():
    mask = torch.tensor([1, 1, 0, 1, 0, 1])
    values = tensor(0.3, 0.1, 7.0, 0.9, 8.0, 0.4)
    rewards = terminal_reward(1.0, mask)
    got = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert torch.allclose(got, torch.where(mask.bool(), 1.0 - values, 0.0))
    discounted = gae(rewards, values, mask, gamma=0.5, lam=1.0)
    assert discounted[mask.bool()].tolist() == pytest.approx([0.125 - 0.3, 0.25 - 0.1, 0.5 - 0.9, 1.0 - 0.4])


def test_gae_with_lambda_zero_is_one_step_of_temporal_difference():
    mask, values = torch.ones(3), tensor(0.3, 0.1, 0.9)
    got = gae(terminal_reward(1.0, mask), values, mask, gamma=1.0, lam=0.0)
    assert got.tolist() == pytest.approx([-0.2, 0.8, 0.1])


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_decoupled_is_plain_where_prox_and_behaviour_agree(dual_clip):
    def run(**hyper):
        trajectories = [attempt(1.0, [-1.0, -2.0], [-0.1]), attempt(0.0, [-0.7, -0.2], old_shift=-1.6)]
        for trajectory in trajectories:
            for step in trajectory["steps"]:
                step["behave_logp"] = step["prox_logp"]
        result = evaluate("asyncwebrl", trajectories=trajectories, dual_clip=dual_clip, **hyper)
        result.loss.backward()
        return result.loss.item(), torch.cat(gradients(trajectories))

    loss, gradient = run(decoupled=True)
    plain_loss, plain_gradient = run(decoupled=False)
    assert loss == pytest.approx(plain_loss)
    assert torch.allclose(gradient, plain_gradient)


def test_staleness_scales_the_gradient_and_is_not_clipped():
    trajectories = [attempt(1.0, [-1.0]), attempt(0.0, [-1.0])]
    for trajectory in trajectories:
        step = trajectory["steps"][0]
        step["prox_logp"] = step["logp"].detach()
        step["behave_logp"] = step["logp"].detach() - math.log(4.0)
    result = evaluate("asyncwebrl", trajectories=trajectories)
    result.loss.backward()
    assert gradients(trajectories)[0].item() == pytest.approx(-4 * math.sqrt(0.5) / (2 * 10))


def test_value_pretraining_holds_the_policy_and_trains_the_critic_on_monte_carlo_returns():
    objective = load_objective("uitars2", pretrain_updates=3)
    facts = [TrajectoryFacts("g", 1.0, True, [2, 1], values=[tensor(0.1, 0.2), tensor(0.3)])]
    waiting, training = objective.plan(facts, update=2), objective.plan(facts, update=3)
    assert [row.coefficient for row in waiting.rows] == [0.0, 0.0]
    assert [row.coefficient for row in training.rows] == pytest.approx([1 / 3, 1 / 3])
    for plan in (waiting, training):
        assert torch.cat([row.value_target for row in plan.rows]).tolist() == pytest.approx([1.0, 1.0, 1.0])
        assert [row.value_coefficient for row in plan.rows] == pytest.approx([1 / 3, 1 / 3])
    blended = replace_targets(objective.model_copy(update={"value_lam": 0.0}).plan(facts))
    assert blended == pytest.approx([0.2, 0.3, 1.0])  # one-step targets instead


def replace_targets(plan) -> list[float]:
    return torch.cat([row.value_target for row in plan.rows]).tolist()


def test_value_losses_add_up_over_micro_batches_and_vanish_at_their_targets():
    ppo, webrl = load_objective("uitars2"), load_objective("webrl")
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    outputs = torch.tensor([[0.5, 0.0, math.nan], [2.0, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    tokens = ValueTensors(outputs, torch.ones(2, 3), torch.full((2,), 1 / 3), mask)
    whole = ppo.value_loss(tokens).loss
    assert whole.item() == pytest.approx((0.125 + 0.5 + 0.5) / 3, abs=1e-7)
    whole.backward()
    assert outputs.grad.flatten().tolist() == pytest.approx([-1 / 6, -1 / 3, 0.0, 1 / 3, 0.0, 0.0], abs=1e-7)
    halves = [ppo.value_loss(ValueTensors(*(t[i : i + 1] for t in vars(tokens).values()))).loss for i in range(2)]
    assert sum(halves).item() == pytest.approx(whole.item())

    states = ValueTensors(tensor(0.0, 3.0, math.nan), tensor(1.0, 0.0, 1.0), tensor(0.5, 0.5, 0.0))
    expected = (math.log(2.0) + math.log(1 + math.exp(3.0))) / 2
    assert webrl.value_loss(states).loss.item() == pytest.approx(expected)
    assert webrl.values(tensor(0.0)).item() == 0.5
    plan = webrl.plan([TrajectoryFacts("g", 1.0, True, [3, 0], values=[tensor(0.5), tensor(0.7)])])
    assert [(row.value_target, row.value_coefficient) for row in plan.rows] == [(1.0, 0.5), (1.0, 0.5)]


def test_spread_lays_loss_tokens_out_along_the_mask():
    assert spread(tensor(5.0, 6.0), torch.tensor([0, 1, 0, 1])).tolist() == [0.0, 5.0, 0.0, 6.0]


@pytest.mark.parametrize("recipe", ["webagent_r1", "asyncwebrl", "openwebrl", "zerogui", "arpo", "webgym"])
def test_single_precision_agrees_with_double_and_stays_single(recipe):
    def run(dtype):
        trajectories = [attempt(1.0, [-1.0, -2.0], [-0.3]), attempt(0.0, [-0.5, -1.0, -0.2]), attempt(None, [-1.0])]
        for trajectory in trajectories:
            for step in trajectory["steps"]:
                for name in step:
                    step[name] = step[name].detach().to(dtype)
                step["logp"].requires_grad_()
        return evaluate(recipe, trajectories=trajectories).loss

    single, double = run(torch.float32), run(torch.float64)
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert single.item() == pytest.approx(double.item(), abs=1e-6)


def test_a_replayed_success_stands_where_a_failure_stood():
    facts = [TrajectoryFacts("g", 0.0, True, [1]) for _ in range(4)]
    facts.append(TrajectoryFacts("g", 1.0, True, [1], stored=True))
    plan = load_objective("arpo").plan(facts)
    reasons = [t.dropped for t in plan.trajectories]
    assert reasons.count("replaced") == 1 and reasons[-1] is None
    assert plan.trajectories[-1].advantage == pytest.approx(1.5)  # (1 - 1/4) / sqrt(1/4)
    assert sum(t.kept for t in plan.trajectories) == 4
    off = load_objective("arpo", replay=False).plan(facts)
    assert [t.dropped for t in off.trajectories] == [None] * 4 + ["stored"]
    succeeded = load_objective("arpo").plan([replace(facts[0], reward=1.0), *facts[1:]])
    assert [t.dropped for t in succeeded.trajectories] == [None] * 4 + ["stored"]
    invalid = [replace(f, valid=f.stored) for f in facts]
    assert load_objective("arpo").plan(invalid).trajectories[-1].dropped == "stored"  # no evidence of failing


def test_the_replayed_slot_is_random_and_repeats_with_the_seed():
    facts = [TrajectoryFacts(str(g), 0.0, True, [1]) for g in range(30) for _ in range(4)]
    facts += [TrajectoryFacts(str(g), 1.0, True, [1], stored=True) for g in range(30)]

    def slots(**hyper):
        plan = load_objective("arpo", **hyper).plan(facts)
        return [i % 4 for i, t in enumerate(plan.trajectories) if t.dropped == "replaced"]

    assert slots() == slots()
    assert set(slots()) == {0, 1, 2, 3}
    assert slots(replay_seed=1) != slots()
    assert slots(replay_slot="first") == [0] * 30


@pytest.mark.parametrize("recipe", ["webagent_r1", "asyncwebrl", "openwebrl", "zerogui", "arpo"])
def test_passing_the_current_log_probabilities_as_the_old_ones_is_being_on_policy(recipe):
    def run(old):
        trajectories = [attempt(1.0, [-1.0, -2.0]), attempt(0.0, [-0.5], [])]
        for trajectory in trajectories:
            for step in trajectory["steps"]:
                step.pop("prox_logp"), step.pop("old_logp")
                if old:
                    step["old_logp"] = step["logp"]
        evaluate(recipe, trajectories=trajectories).loss.backward()
        return torch.cat(gradients(trajectories))

    assert run(old=True).abs().sum() > 0
    assert torch.equal(run(old=True), run(old=False))


@pytest.mark.parametrize("recipe", ["webagent_r1", "asyncwebrl", "openwebrl", "zerogui", "arpo", "webgym", "webrl"])
def test_a_batch_of_empty_steps_is_zero(recipe):
    trajectories = [attempt(1.0, [], []), attempt(0.0, [])]
    for trajectory in trajectories:
        for step in trajectory["steps"]:
            step["values"] = 0.5
    result = evaluate(recipe, trajectories=trajectories)
    result.loss.backward()
    assert result.loss.item() == 0.0


def test_own_advantages_replace_the_estimator_and_need_no_baseline():
    trajectories = [attempt(1.0, [-1.0, -2.0], [-3.0], old_shift=0.0, advantages=[0.5, tensor(-2.0)])]
    result = evaluate("openwebrl", trajectories=trajectories)
    assert result.loss.item() == pytest.approx(-(0.5 - 2.0))
    assert result.advantages[0][0] == 0.5
    assert torch.equal(result.advantages[0][1], tensor(-2.0))
