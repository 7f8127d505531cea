import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.scoring.combine import combine_gdpo

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
