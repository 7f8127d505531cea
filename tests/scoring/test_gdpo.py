import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.scoring.combine import combine_gdpo, share_weights, z_scores

nan = math.nan
REAL = st.floats(-9, 9, width=16)


@st.composite
def several_rewards(draw, entry=REAL, missing=True):
    """scores (n, k), weights (k,) with 0 and negative ones, group (n,), applicable (n, k), which is
    decided by the group."""
    n, k = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    column = lambda of, size: draw(st.lists(of, min_size=size, max_size=size))  # noqa: E731
    group = torch.tensor(column(st.integers(0, 2), n))
    applicable = torch.tensor(column(st.booleans(), 3 * k)).view(3, k)[group]
    given = st.one_of(entry, st.just(nan)) if missing else entry
    scores = torch.tensor(column(given, n * k)).double().view(n, k)
    weights = torch.tensor(column(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]), k))
    return scores.masked_fill(~applicable, nan), weights, group, applicable


def published(scores, weights, group, applicable):
    s, w, g, fits = (t.numpy().astype(float) for t in (scores, weights, group, applicable))
    total = np.full(len(s), nan)
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


@given(case=several_rewards(), value=st.floats(-1e6, 1e6, width=32))
def test_a_reward_that_is_the_same_throughout_contributes_exactly_0(case, value):
    scores, weights, group, applicable = case
    scores, weights = scores.clone(), weights.clone()
    scores[:, 0] = torch.where(applicable[:, 0], value, nan)
    weights[0] = 2.0
    assert bool((z_scores(scores, group)[:, 0] == 0).all())
    found = combine_gdpo(scores, weights, group, applicable)
    alone = applicable.clone()
    alone[:, 1:] = False
    only = combine_gdpo(scores, weights, group, alone)
    assert set(only[applicable[:, 0]].tolist()) <= {0.0}
    assert bool(found[applicable[:, 0]].isfinite().all())


def test_equal_scores_of_any_size_are_no_difference():
    scores, group = torch.full((3, 1), 0.1e12 / 3, dtype=torch.float64), torch.zeros(3).long()
    assert z_scores(scores, group).flatten().tolist() == [0.0] * 3


def test_rounding_between_equal_images_stays_far_below_a_standard_deviation():
    """Eight equal PickScores, as fp32 sums of a thousand terms, beside a reward that tells."""
    off = torch.tensor([0, 30, -20, 110, 10, -90, 40, 0]) * torch.finfo(torch.float32).eps
    pickscore, telling = 0.8317 * (1 + off), torch.linspace(0, 1, 8)
    assert 1e-6 < pickscore.double().std() < 1e-5  # a floor of 1e-6 makes these 1.9
    z = z_scores(torch.stack([pickscore, telling], 1), torch.zeros(8).long())
    assert 0 < z[:, 0].abs().max() < 0.15
    assert z[:, 1].abs().max() > 1.5


def test_weights_are_shared_out_among_the_rewards_that_apply():
    fits = torch.tensor([[True, True, True], [True, False, True], [False, False, True]])
    share = share_weights(fits, torch.tensor([1.0, -3.0, 0.0]))
    assert share.tolist() == [[1, -3, 0], [4, 0, 0], [0, 0, 0]]
