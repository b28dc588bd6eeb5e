"""Relatives of the cases on training maths, generated: each kind of case as a rule that holds for all of its kind."""

from __future__ import annotations

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from webagent_core.objectives import TrajectoryFacts, evaluate, load_objective
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
from webagent_core.sampling.filters import GroupFilter
from webagent_core.sampling.progress import Progress
from webagent_core.sampling.replay import SuccessReplay
from webagent_core.sampling.stored import Stored
from webagent_core.tasks.task import Task

torch.set_num_threads(1)
SOME = settings(max_examples=150, deadline=None)
rewards = st.lists(st.none() | st.sampled_from([0.0, 1.0, -1.0, 0.5, 0.1 + 0.2, 0.3]), min_size=1, max_size=8)


def planned(groups: list[list[float | None]], **settings) -> list[list[float]]:
    """Advantages as the objective plans them."""
    facts = [TrajectoryFacts(str(g), r, True, [1]) for g, group in enumerate(groups) for r in group]
    flat = iter(load_objective("webagent_r1", **settings).plan(facts).trajectories)
    return [[next(flat).advantage for _ in group] for group in groups]


# --- Advantages -------------------------------------------------------------------------------------------------------


@SOME
@given(st.lists(rewards, min_size=1, max_size=4), st.sampled_from([0, 1]))
def test_an_advantage_is_the_z_score_within_the_valid_members_of_its_own_group(groups, ddof):
    for group, got in zip(groups, planned(groups, ddof=ddof, adv_eps=1e-6), strict=True):
        valid = [r for r in group if r is not None]
        mean = math.fsum(valid) / max(1, len(valid))
        spread = math.fsum((r - mean) ** 2 for r in valid)
        for reward, advantage in zip(group, got, strict=True):
            if reward is None or len(valid) < 2 or max(valid) - min(valid) < 1e-8:
                assert advantage == 0.0  # exactly, float noise among equals included
            else:
                wanted = (reward - mean) / (math.sqrt(spread / (len(valid) - ddof)) + 1e-6)
                assert advantage == pytest.approx(wanted, abs=1e-9)


@SOME
@given(rewards, st.sampled_from([1e-3, 1.0, 100.0, 1e6]), st.integers(-3, 3))
def test_an_advantage_does_not_depend_on_offset_or_invalid_neighbours(group, scale, offset):
    (plain,) = planned([group], adv_eps=0.0)
    (moved,) = planned([[None if r is None else scale * (r + offset) for r in group]], adv_eps=0.0)
    assert moved == pytest.approx(plain, abs=1e-5)
    (among,) = planned([[None, *group, None]], adv_eps=0.0)
    assert among[1:-1] == plain
    valid = [r for r in group if r is not None]
    assert group_zscore(valid, eps=0.0) == [a for a, r in zip(plain, group, strict=True) if r is not None]
    assert math.fsum(plain) == pytest.approx(0.0, abs=1e-9)


@SOME
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 1.0, 0.25]), st.integers(1, 4)), min_size=1, max_size=8
    )
)
def test_the_rows_of_a_session_share_its_advantage_however_many_there_are(sessions):
    def advantages(of: list[tuple[str, float, int]]) -> list[float]:
        facts = [TrajectoryFacts(task, reward, True, [1] * rows) for task, reward, rows in of]
        plan = load_objective("webagent_r1").plan(facts)
        for each in plan.trajectories:
            assert {row.advantage for row in each.rows} <= {each.advantage}
        return [each.advantage for each in plan.trajectories]

    assert advantages(sessions) == pytest.approx(advantages([(task, reward, 1) for task, reward, _ in sessions]))
    order = sorted(range(len(sessions)), key=lambda i: sessions[i][::-1])  # interleaved in another way
    again = advantages([sessions[i] for i in order])
    assert again == pytest.approx([advantages(sessions)[i] for i in order])


# --- Groups with signal -----------------------------------------------------------------------------------------------


@SOME
@given(st.lists(rewards, min_size=1, max_size=5))
def test_a_group_is_kept_if_two_valid_members_differ(groups):
    def differs(group: list[float | None]) -> bool:
        valid = [r for r in group if r is not None]
        return len(valid) > 1 and max(valid) - min(valid) > 1e-8

    wanted = [differs(group) for group in groups]
    assert [why_no_signal(group) is None for group in groups] == wanted
    batch = GroupFilter(len(groups), most=len(groups)).batch()
    assert [batch.offer(Task("t", i), i, group) for i, group in enumerate(groups)] == wanted
    trajectories = [
        {"group": str(g), "reward": r, "steps": [{"logp": torch.tensor([-1.0], requires_grad=True)}]}
        for g, group in enumerate(groups)
        for r in group
    ]
    result = evaluate("openwebrl", trajectories=trajectories)
    assert math.isfinite(result.loss.item())  # also when nothing is left
    kept = {g for one, t in zip(result.plan.trajectories, trajectories, strict=True) if one.kept for g in [t["group"]]}
    assert kept == {str(g) for g, keep in enumerate(wanted) if keep}


# --- Masks and returns ------------------------------------------------------------------------------------------------


@SOME
@given(
    st.lists(st.tuples(st.sampled_from(["model", "obs", "template"]), st.integers(0, 5)), max_size=8),
    st.integers(0, 30),
)
def test_a_mask_is_one_where_the_model_wrote_and_a_cut_only_shortens_it(segments, most):
    mask = response_mask(segments)
    assert mask == [int(role == "model") for role, tokens in segments for _ in range(tokens)]
    assert response_mask(segments, most) == mask[:most]


policy_tokens = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 3)), min_size=1, max_size=8)


@SOME
@given(policy_tokens, st.sampled_from([1.0, 0.99, 0.5]), st.sampled_from([1.0, 0.95, 0.0]), st.integers(0, 3))
def test_observation_tokens_are_skipped_as_if_they_were_absent(tokens, gamma, lam, trailing):
    """Whatever stands in the gaps, the values at the policy's tokens are those without gaps."""
    close = torch.tensor([[reward, value] for reward, value, _ in tokens], dtype=torch.float64)
    spread, mask = [], []
    for reward, value, gap in tokens:
        spread += [[7.0, -9.0]] * gap + [[reward, value]]
        mask += [0] * gap + [1]
    spread, mask = spread + [[5.0, 5.0]] * trailing, torch.tensor(mask + [0] * trailing)
    wide = torch.tensor(spread, dtype=torch.float64)
    ones = torch.ones(len(tokens), dtype=torch.int64)
    for got, wanted in (
        (discounted_returns(wide[:, 0], mask, gamma), discounted_returns(close[:, 0], ones, gamma)),
        (gae(wide[:, 0], wide[:, 1], mask, gamma, lam), gae(close[:, 0], close[:, 1], ones, gamma, lam)),
    ):
        assert got[mask.bool()].tolist() == pytest.approx(wanted.tolist(), abs=1e-9)
        assert not got[~mask.bool()].any()
    at = terminal_reward(3.0, mask).nonzero().flatten().tolist()
    assert at == [int(mask.nonzero().max())]  # the last token that the policy wrote
    by_hand, after = [], 0.0
    for reward in close[:, 0].flip(0).tolist():
        after = reward + gamma * after
        by_hand.insert(0, after)
    assert discounted_returns(close[:, 0], ones, gamma).tolist() == pytest.approx(by_hand, abs=1e-9)


@SOME
@given(st.integers(1, 5000), st.sampled_from([0.05, 0.1, 1.0]))
def test_the_adaptive_lambda_grows_with_the_length_and_stays_a_share(length, alpha):
    now, later = length_adaptive_lambda(length, alpha), length_adaptive_lambda(length + 1, alpha)
    assert 0.0 <= now <= later < 1.0
    if alpha * length > 1:
        assert now == pytest.approx(1 - 1 / (alpha * length), abs=1e-12)


@SOME
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_blend_lies_between_its_two_ends(values, outcome, lam):
    blends = {share: td_mc_blend(values, outcome, share) for share in (0.0, lam, 1.0)}
    for ends, mixed in zip(zip(blends[0.0], blends[1.0], strict=True), blends[lam], strict=True):
        assert mixed == pytest.approx((1 - lam) * ends[0] + lam * ends[1], abs=1e-9)


# --- Replay and resumption --------------------------------------------------------------------------------------------

adds = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.5, 1.0])), max_size=30)


@SOME
@given(adds, st.integers(1, 4), st.integers(0, 30))
def test_a_buffer_keeps_the_newest_successes_of_each_task_also_across_a_checkpoint(given_adds, capacity, stopped_after):
    buffer = SuccessReplay(capacity)
    wanted: dict[str, list[str]] = {}
    for number, (task, outcome) in enumerate(given_adds):
        if number == stopped_after:
            file = io.BytesIO()
            torch.save(buffer.state_dict(), file)
            file.seek(0)
            buffer = SuccessReplay(capacity)
            buffer.load_state_dict(torch.load(file, weights_only=True))
        assert buffer.add(Stored(str(number), task, 0, outcome)) == (outcome >= 1)
        if outcome >= 1:
            wanted[task] = [*wanted.get(task, []), str(number)][-capacity:]
    assert {task: [entry.id for entry in kept] for task, kept in buffer.tasks.items() if kept} == wanted
    for task in "ab":
        offered = buffer.offer(task, [0, None, 0])
        assert (offered is None) == (task not in wanted) and (offered is None or offered.id in wanted[task])
        assert buffer.offer(task, [0, 1]) is None and buffer.offer(task, [None]) is None


@SOME
@given(st.integers(1, 60), st.integers(1, 5), st.integers(0, 300))
def test_a_resumed_count_leaves_no_update_out_and_does_none_twice(per_epoch, epochs, saved):
    total = per_epoch * epochs
    saved = min(saved, total)
    progress = Progress(saved, total, per_epoch)
    assert progress.remaining == total - saved
    assert progress.next == (saved + 1 if saved < total else None)
    assert 0 <= progress.skip_in_epoch < per_epoch and (saved - progress.skip_in_epoch) % per_epoch == 0
    assert Progress(saved, total + 7, per_epoch).remaining == total + 7 - saved  # a run that is made longer
