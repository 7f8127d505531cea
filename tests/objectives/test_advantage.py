"""Z-scores of groups, against numpy row by row."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.config.objectives import AdvantageOptions
from flowrl.objectives.advantage import (
    MOST_EMPHASIS,
    combine_gdpo,
    emphasis,
    group_stats,
    image_advantages,
    z_scores,
)

F64 = torch.float64


@st.composite
def rollouts(draw):
    n = draw(st.integers(1, 20))
    column = lambda elements: draw(st.lists(elements, min_size=n, max_size=n))  # noqa: E731
    reward = torch.tensor(column(st.floats(-5, 5, width=16)), dtype=F64)
    valid = torch.tensor(column(st.booleans()))
    group = torch.tensor(column(st.integers(0, 3)))
    return torch.where(valid, reward, torch.nan), valid, group


def in_numpy(reward, valid, group, scale):
    reward, valid, group = (t.numpy() for t in (reward, valid, group))
    advantage = np.zeros(len(reward))
    for i in np.flatnonzero(valid):
        members = reward[valid & (group == group[i])]
        if len(members) > 1 and members.min() < members.max():
            spread = {"std": members, "global": reward[valid]}.get(scale)
            by = 1 if spread is None else np.std(spread) + 1e-4
            advantage[i] = (reward[i] - members.mean()) / by
    return torch.tensor(advantage)


@given(scale=st.sampled_from(["std", "global", "none"]), case=rollouts())
def test_z_scores_are_grpos_formula_row_by_row(scale, case):
    reward, valid, group = case
    found = z_scores(reward, group, AdvantageOptions(scale=scale))
    assert_close(found, in_numpy(reward, valid, group, scale), rtol=0, atol=1e-9)
    silent = [not found[group == name].any() for name in group.unique()]
    stats = group_stats(reward, valid, group)
    assert stats.no_signal == pytest.approx(np.mean(silent))
    assert all(map(math.isfinite, (stats.no_signal, stats.invalid, stats.spread)))


@given(value=st.sampled_from([0.1, 1 / 3, -7.3, 1e6 + 0.1, 0.0]), n=st.integers(1, 9))
def test_equal_rewards_get_exactly_0_and_a_common_reward_hides_no_difference(value, n):
    group, options = torch.zeros(n).long(), AdvantageOptions(scale="std")
    assert not z_scores(torch.full((n,), value), group, options).any()
    reward, group = torch.tensor([0.0, 2.0, 6.0]), torch.zeros(3).long()
    shifted = z_scores(reward + 2**24, group, options)  # where fp32 numbers lie 2 apart
    assert_close(shifted, z_scores(reward, group, options), rtol=1e-8, atol=0)


def test_values_that_are_not_counted_are_measured_by_the_rest():
    value, group = torch.tensor([0.0, 2.0, 5.0]), torch.zeros(3).long()
    counted = torch.tensor([True, True, False])
    found = z_scores(value, group, AdvantageOptions(), counted=counted)
    assert found.tolist() == pytest.approx([-1, 1, 4], rel=2e-4)
    # The global std of the two leaves 2 and 5 is 1.5.
    leaf = torch.tensor([False, True, True])
    options = AdvantageOptions(scale="global")
    found = z_scores(value, group, options, counted=counted, leaf=leaf)
    assert found.tolist() == pytest.approx([-1 / 1.5, 1 / 1.5, 4 / 1.5], rel=2e-4)


def test_stats_count_groups_without_signal():
    nan = math.nan
    reward = torch.tensor([1.0, 3.0, 0.1, 0.1, 2.0, nan, nan, nan])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    stats = group_stats(reward, ~reward.isnan(), group)
    assert (stats.no_signal, stats.invalid) == (0.75, 3 / 8)
    assert stats.spread == pytest.approx(1 / 3)  # 1, 0 and 0
    with pytest.raises(ValueError, match="not finite"):
        group_stats(torch.tensor([1.0, math.inf]), torch.ones(2).bool(), torch.zeros(2).long())


def test_gdpo_divides_the_sum_of_z_scores_by_their_std_over_all_images():
    scores = torch.tensor([[0.0, 5.0], [1.0, 5.0], [0.2, 1.0], [0.8, 3.0]]).double()
    group = torch.tensor([0, 0, 1, 1])
    rollout = SimpleNamespace(
        scores=scores, weights=torch.ones(2), group=group, applicable=torch.ones(4, 2).bool()
    )
    advantage, compared = image_advantages(rollout, AdvantageOptions(rewards="gdpo"))
    summed = np.array([-1.0, 1.0, -2.0, 2.0])
    assert advantage.tolist() == pytest.approx((summed / summed.std()).tolist(), rel=1e-3)
    assert compared.all()
    # A lone image has nothing to be compared with, and 5 is the largest advantage.
    alone = SimpleNamespace(
        reward=torch.tensor([*[0.0] * 99, 1.0, 3.0]), valid=torch.ones(101).bool(),
        group=torch.tensor([0] * 100 + [1]),
    )  # fmt: skip
    advantage, compared = image_advantages(alone, AdvantageOptions())
    assert advantage.max() == 5 and not compared[100] and compared[:100].all()


# --- with the prompt book: what it expected of each image ---------------------------------------


def remembered(reward, group, expected, failures=None) -> SimpleNamespace:
    return SimpleNamespace(
        reward=torch.tensor(reward), valid=~torch.tensor(reward).isnan(), group=torch.tensor(group),
        expected_reward=torch.tensor(expected).double(),
        expected_failures=None if failures is None else torch.tensor(failures).double(),
    )  # fmt: skip


def test_with_a_tracker_lone_images_are_compared_by_what_each_prompt_gave_before():
    rollout = remembered([0.2, 0.9, math.nan, 0.4], [0, 1, 2, 3], [0.1, 0.9, 0.5, 0.8])
    advantage, compared = image_advantages(rollout, AdvantageOptions(center="tracker"))
    gain = np.array([0.1, 0.0, -0.4])  # of the rewarded three, over all of the iteration
    expected = (gain - gain.mean()) / gain.std()
    assert advantage[[0, 1, 3]].tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert compared.tolist() == [True, True, False, True] and advantage[2] == 0
    _, compared = image_advantages(rollout, AdvantageOptions())
    assert not compared.any()


@given(st.lists(st.floats(0, 1, width=16), min_size=1, max_size=20), st.floats(0.0625, 1, width=16))
def test_emphasis_maximises_the_failures_and_the_entropy_of_its_weights(failures, eta):
    """sum q L + H(q) / eta is largest at q = softmax(eta L), where it is logsumexp(eta L) / eta."""
    rollout = remembered(
        [0.0] * len(failures), [0] * len(failures), [0.0] * len(failures), failures
    )
    loss = torch.tensor(failures).double()
    weight = emphasis(rollout, AdvantageOptions(emphasis=eta))
    q = weight / len(failures)  # below its bound: exp(1) is less than MOST_EMPHASIS
    value = (q * loss).sum() - (q * q.log()).sum() / eta
    assert value.item() == pytest.approx((torch.logsumexp(eta * loss, 0) / eta).item())


def test_emphasis_goes_from_none_to_the_prompt_that_fails_most_within_its_bound():
    rollout = remembered([0.0, 1.0] * 4, [0, 0, 1, 1, 2, 2, 3, 3], [0.0] * 8,
                         [0.1, 0.1, 0.9, 0.9, 0.5, 0.5, 0.2, 0.2])  # fmt: skip
    plain, _ = image_advantages(rollout, AdvantageOptions())
    none, _ = image_advantages(rollout, AdvantageOptions(emphasis=1e-9))
    assert_close(none, plain)
    worst, _ = image_advantages(rollout, AdvantageOptions(emphasis=1e3))
    weight = torch.tensor([0, 0, MOST_EMPHASIS, MOST_EMPHASIS, 0, 0, 0, 0])
    assert_close(worst, plain * weight)


REAL = st.floats(-9, 9, width=16)


@st.composite
def several_rewards(draw):
    """scores (n, k), weights (k,) with 0 and negative ones, group (n,), applicable (n, k), which is
    decided by the group."""
    n, k = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    column = lambda of, size: draw(st.lists(of, min_size=size, max_size=size))  # noqa: E731
    group = torch.tensor(column(st.integers(0, 2), n))
    applicable = torch.tensor(column(st.booleans(), 3 * k)).view(3, k)[group]
    entry = st.one_of(REAL, st.just(math.nan))
    scores = torch.tensor(column(entry, n * k)).double().view(n, k)
    weights = torch.tensor(column(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]), k))
    return scores.masked_fill(~applicable, math.nan), weights, group, applicable


def published(scores, weights, group, applicable):
    s, w, g, fits = (t.numpy().astype(float) for t in (scores, weights, group, applicable))
    total = np.full(len(s), math.nan)
    for i in range(len(s)):
        trained = [k for k in range(s.shape[1]) if fits[i, k] and w[k] != 0]
        if not any(np.isfinite(s[i, k]) for k in trained):
            continue
        total[i] = 0.0
        for k in trained:
            members = s[(g == g[i]) & np.isfinite(s[:, k]), k]
            z = 0.0  # also of a score that failed
            if np.isfinite(s[i, k]) and members.max() > members.min():
                z = (s[i, k] - members.mean()) / (members.std() + 1e-4)
            share = w[k] * np.abs(w).sum() / sum(abs(w[j]) for j in trained)
            total[i] += share * z
    return torch.tensor(total)


@given(case=several_rewards())
def test_gdpo_is_the_formula_row_by_row(case):
    assert_close(combine_gdpo(*case), published(*case), rtol=0, atol=1e-9, equal_nan=True)
