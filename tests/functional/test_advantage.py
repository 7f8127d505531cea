import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.objectives.advantage import clip_advantage, group_stats, normalise, population
from flowrl.objectives.tree_credit import fuse_uniform

F64 = torch.float64
scopes = pytest.mark.parametrize("scope", ["group", "global"])


def group_advantage(reward, valid, group, *, scope="group", eps=1e-4, ddof=0):
    """GRPO's advantage as the trainer computes it: pictures are trees of one node."""
    only = torch.ones(1, 1, dtype=torch.bool)
    value = fuse_uniform(only, reward[:, None], valid[:, None])
    among = population("prompt", group=group, parent=torch.tensor([-1]), step=torch.tensor([0]))
    scale = "std" if scope == "group" else scope
    return normalise(value, among, scale=scale, ddof=ddof, floor=eps)[:, 0].to(reward)


@st.composite
def rollouts(draw):
    """reward (NaN where invalid), valid, group of up to 20 images in up to 4 groups."""
    n = draw(st.integers(1, 20))
    column = lambda elements: draw(st.lists(elements, min_size=n, max_size=n))  # noqa: E731
    reward = torch.tensor(column(st.floats(-5, 5, width=16)), dtype=F64)
    valid = torch.tensor(column(st.booleans()))
    group = torch.tensor(column(st.integers(0, 3)))
    return torch.where(valid, reward, torch.nan), valid, group


def in_numpy(reward, valid, group, scope, ddof):
    """(reward - group mean) / (std + 1e-4) row by row, in NumPy; 0 without two unequal rewards."""
    reward, valid, group = (t.numpy() for t in (reward, valid, group))
    advantage = np.zeros(len(reward))
    for i in np.flatnonzero(valid):
        members = reward[valid & (group == group[i])]
        if len(members) > 1 and members.min() < members.max():
            spread = np.std(members if scope == "group" else reward[valid], ddof=ddof)
            advantage[i] = (reward[i] - members.mean()) / (spread + 1e-4)
    return torch.tensor(advantage)


@scopes
@pytest.mark.parametrize("ddof", [0, 1])
@given(rollout=rollouts())
def test_it_is_grpos_formula_row_by_row(scope, ddof, rollout):
    advantage = group_advantage(*rollout, scope=scope, ddof=ddof)
    assert_close(advantage, in_numpy(*rollout, scope, ddof), rtol=0, atol=1e-9)


@scopes
@pytest.mark.parametrize("ddof", [0, 1])
@given(rollout=rollouts())
def test_advantages_of_a_group_sum_to_zero(scope, ddof, rollout):
    reward, valid, group = rollout
    advantage = group_advantage(reward, valid, group, scope=scope, ddof=ddof)
    for name in group.unique():
        assert abs(advantage[group == name].sum().item()) < 1e-9


@scopes
@given(rollout=rollouts(), shift=st.integers(-64, 64))
def test_a_constant_added_to_one_groups_rewards_changes_nothing_in_it(scope, rollout, shift):
    reward, valid, group = rollout
    shifted = reward + shift * (1.0 if scope == "global" else (group == 0))
    before = group_advantage(reward, valid, group, scope=scope)
    assert_close(group_advantage(shifted, valid, group, scope=scope), before, rtol=0, atol=1e-9)


@scopes
@given(rollout=rollouts())
def test_masked_rows_count_as_removed_rows(scope, rollout):
    reward, valid, group = rollout
    advantage = group_advantage(reward, valid, group, scope=scope)
    kept = group_advantage(reward[valid], valid[valid], group[valid], scope=scope)
    assert torch.equal(advantage[valid], kept)
    assert torch.equal(advantage[~valid], torch.zeros(int((~valid).sum()), dtype=F64))


@scopes
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@given(rollout=rollouts())
def test_nothing_of_an_invalid_reward_leaks(scope, garbage, rollout):
    reward, valid, group = rollout
    clean = group_advantage(torch.where(valid, reward, 0.0), valid, group, scope=scope)
    dirty = torch.where(valid, reward, garbage)
    assert torch.equal(group_advantage(dirty, valid, group, scope=scope), clean)
    assert bool(clean.isfinite().all())
    assert all(math.isfinite(x) for x in vars_of(group_stats(dirty, valid, group)))


def vars_of(stats):
    return [getattr(stats, name) for name in ("groups", "no_signal", "invalid", "spread")]


@scopes
@given(rollout=rollouts(), seed=st.integers(0, 2**31))
def test_order_of_rows_and_names_of_groups_do_not_matter(scope, rollout, seed):
    reward, valid, group = rollout
    order = torch.randperm(len(reward), generator=torch.Generator().manual_seed(seed))
    advantage = group_advantage(reward, valid, group, scope=scope)
    mixed = group_advantage(reward[order], valid[order], 7 - 2 * group[order], scope=scope)
    assert_close(mixed, advantage[order], rtol=0, atol=1e-9)


@scopes
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.float16])
@given(value=st.floats(-10, 10), size=st.integers(1, 24))
def test_tied_rewards_have_advantage_exactly_zero(scope, dtype, value, size):
    reward = torch.cat([torch.full((size,), value), torch.tensor([0.0, 1.0])]).to(dtype)
    group = torch.tensor([0] * size + [1, 1])
    advantage = group_advantage(reward, torch.ones(size + 2, dtype=torch.bool), group, scope=scope)
    assert torch.equal(advantage[:size], torch.zeros(size, dtype=dtype))
    assert advantage[-1] > 0


def test_three_times_a_tenth_is_a_tie_though_its_mean_is_not_a_tenth():
    reward = torch.tensor([0.1, 0.1, 0.1], dtype=F64)
    assert reward.sum() / 3 != reward[0]
    three = torch.ones(3, dtype=torch.bool)
    for kind in (reward, reward.float()):
        assert torch.equal(
            group_advantage(kind, three, torch.zeros(3).long()), torch.zeros_like(kind)
        )


@scopes
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_of_one_has_advantage_zero(scope, ddof):
    reward = torch.tensor([3.0, 1.0, 2.0, 9.0])
    valid = torch.tensor([True, True, True, True])
    group = torch.tensor([5, 7, 7, 8])
    advantage = group_advantage(reward, valid, group, scope=scope, ddof=ddof)
    assert advantage[[0, 3]].tolist() == [0, 0]
    assert advantage[1] == -advantage[2] != 0


@pytest.mark.parametrize(("ddof", "eps"), [(0, 1e-4), (1, 1e-8)], ids=["flow-grpo", "dance-grpo"])
def test_the_spread_is_that_of_numpy_in_the_group_or_over_all(ddof, eps):
    rows = np.array([[1.0, 2.0, 4.0], [10.0, 30.0, 35.0]])
    reward, group = torch.tensor(rows).flatten(), torch.tensor([0, 0, 0, 1, 1, 1])
    valid = torch.ones(6, dtype=torch.bool)
    centred = rows - rows.mean(1, keepdims=True)
    spreads = {"group": rows.std(1, ddof=ddof, keepdims=True), "global": rows.std(ddof=ddof)}
    for scope, spread in spreads.items():
        advantage = group_advantage(reward, valid, group, scope=scope, eps=eps, ddof=ddof)
        expected = torch.tensor(centred / (spread + eps)).flatten()
        assert_close(advantage, expected, rtol=1e-12, atol=0)


def test_a_large_common_reward_does_not_drown_the_differences():
    """Near 2^24 the numbers of fp32 lie 2 apart, so that a mean taken in fp32 would be rounded."""
    valid, group = torch.ones(3, dtype=torch.bool), torch.zeros(3).long()
    reward = torch.tensor([0.0, 2.0, 6.0])
    advantage = group_advantage(reward + 2**24, valid, group)
    assert advantage.dtype == torch.float32
    assert_close(advantage, group_advantage(reward, valid, group), rtol=1e-6, atol=0)


def test_a_valid_reward_must_be_a_number():
    group = torch.tensor([0, 0])
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not finite"):
            group_advantage(torch.tensor([1.0, bad]), torch.tensor([True, True]), group)


def test_clipping_bounds_both_sides():
    advantage = torch.tensor([-9.0, -5.0, 0.5, 7.0])
    assert clip_advantage(advantage, 5.0).tolist() == [-5, -5, 0.5, 5]


def test_stats_count_groups_that_teach_nothing():
    """Group 0 learns, 1 is tied, 2 has one valid row, 3 has none."""
    nan = math.nan
    reward = torch.tensor([1.0, 3.0, 0.1, 0.1, 2.0, nan, nan, nan])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    stats = group_stats(reward, ~reward.isnan(), group)
    assert (stats.groups, stats.no_signal, stats.invalid) == (4, 0.75, 3 / 8)
    assert stats.spread == pytest.approx(1 / 3)  # 1, 0 and 0


@given(rollout=rollouts())
def test_groups_without_signal_are_those_with_no_advantage(rollout):
    reward, valid, group = rollout
    advantage = group_advantage(reward, valid, group)
    silent = [not advantage[group == name].any() for name in group.unique()]
    assert group_stats(reward, valid, group).no_signal == pytest.approx(np.mean(silent))
