import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata
from torch.testing import assert_close

from flowrl.scoring.combine import affine, clip, rank

nan = math.nan
ELEMENTWISE = {
    "affine": lambda s, g: affine(s, g, scale=-0.5, shift=2.0),
    "clip": lambda s, g: clip(s, g, low=-1.0, high=2.0),
}


@st.composite
def scored(draw, most=15):
    n = draw(st.integers(1, most))
    entry = st.one_of(st.integers(-3, 3).map(float), st.floats(-3, 3, width=16), st.just(nan))
    scores = torch.tensor(draw(st.lists(entry, min_size=n, max_size=n))).double()
    return scores, torch.tensor(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))


def test_the_formulas_on_a_table():
    scores, group = torch.tensor([-2.0, 0.5, 1.0, 3.0]), torch.zeros(4).long()
    assert affine(scores, group, scale=1 / 26, shift=1.0).tolist() == pytest.approx(
        [1 - 2 / 26, 1 + 0.5 / 26, 1 + 1 / 26, 1 + 3 / 26]
    )
    assert clip(scores, group, low=0.0, high=2.0).tolist() == [0.0, 0.5, 1.0, 2.0]
    assert clip(scores, group, low=0.0).tolist() == [0.0, 0.5, 1.0, 3.0]
    assert clip(scores, group, high=0.0).tolist() == [-2.0, 0.0, 0.0, 0.0]
    assert rank(scores, group).tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])


@given(transform=st.sampled_from([*ELEMENTWISE.values(), rank]), case=scored())
def test_what_is_missing_stays_missing_and_nothing_else_becomes_so(transform, case):
    scores, group = case
    found = transform(scores, group)
    assert found.dtype == scores.dtype
    assert torch.equal(found.isnan(), scores.isnan())


@given(case=scored())
def test_rank_is_scipys_mean_rank_of_the_known_scores_of_a_group(case):
    scores, group = case
    expected = torch.full_like(scores, nan)
    for name in group.unique():
        rows = ((group == name) & ~scores.isnan()).nonzero().flatten()
        if len(rows) == 1:
            expected[rows] = 0.5
        elif len(rows):
            ranks = torch.tensor(rankdata(scores[rows].numpy(), method="average"))
            expected[rows] = (ranks - 1) / (len(rows) - 1)
    assert_close(rank(scores, group), expected, equal_nan=True)


def test_gradients_are_those_of_finite_differences():
    for transform in ELEMENTWISE.values():
        scores = torch.tensor([-2.0, -0.3, 0.4, 1.1, 2.5], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(partial(transform, g=torch.zeros(5).long()), scores)
