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
scopes = st.sampled_from(["group", "global"])


def group_advantage(reward, valid, group, *, scope="group", eps=1e-4, ddof=0):
    only = torch.ones(1, 1, dtype=torch.bool)
    value = fuse_uniform(only, reward[:, None], valid[:, None])
    among = population("prompt", group=group, parent=torch.tensor([-1]), step=torch.tensor([0]))
    scale = "std" if scope == "group" else scope
    return normalise(value, among, scale=scale, ddof=ddof, floor=eps)[:, 0].to(reward)


@st.composite
def rollouts(draw):
    n = draw(st.integers(1, 20))
    column = lambda elements: draw(st.lists(elements, min_size=n, max_size=n))  # noqa: E731
    reward = torch.tensor(column(st.floats(-5, 5, width=16)), dtype=F64)
    valid = torch.tensor(column(st.booleans()))
    group = torch.tensor(column(st.integers(0, 3)))
    return torch.where(valid, reward, torch.nan), valid, group


def in_numpy(reward, valid, group, scope, ddof):
    reward, valid, group = (t.numpy() for t in (reward, valid, group))
    advantage = np.zeros(len(reward))
    for i in np.flatnonzero(valid):
        members = reward[valid & (group == group[i])]
        if len(members) > 1 and members.min() < members.max():
            spread = np.std(members if scope == "group" else reward[valid], ddof=ddof)
            advantage[i] = (reward[i] - members.mean()) / (spread + 1e-4)
    return torch.tensor(advantage)


@given(scope=scopes, ddof=st.integers(0, 1), rollout=rollouts())
def test_it_is_grpos_formula_row_by_row(scope, ddof, rollout):
    advantage = group_advantage(*rollout, scope=scope, ddof=ddof)
    assert_close(advantage, in_numpy(*rollout, scope, ddof), rtol=0, atol=1e-9)


@given(scope=scopes, garbage=st.sampled_from([math.nan, math.inf, 1e30]), rollout=rollouts())
def test_nothing_of_an_invalid_reward_leaks(scope, garbage, rollout):
    reward, valid, group = rollout
    clean = group_advantage(torch.where(valid, reward, 0.0), valid, group, scope=scope)
    dirty = torch.where(valid, reward, garbage)
    assert torch.equal(group_advantage(dirty, valid, group, scope=scope), clean)
    assert bool(clean.isfinite().all())
    stats = group_stats(dirty, valid, group)
    assert all(map(math.isfinite, (stats.no_signal, stats.invalid, stats.spread)))


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
