import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.sampling.two_stage import best_and_worst, select_candidates

SCORES = st.lists(
    st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, math.inf]) | st.floats(-3, 3, width=32),
    min_size=1,
    max_size=40,
)


def chosen(proxy, keep):
    return select_candidates(torch.tensor(proxy), keep).tolist()


def test_the_best_and_the_worst_are_kept_one_more_of_the_worst_where_the_number_is_odd():
    proxy = [0.3, 0.9, 0.1, 0.5, 0.7, 0.2]
    assert chosen(proxy, 4) == [1, 2, 4, 5]
    assert chosen(proxy, 3) == [1, 2, 5]
    assert chosen(proxy, 1) == [2]


def test_of_equal_proxies_the_first_count_as_the_better_ones():
    assert chosen([0.5] * 6, 4) == [0, 1, 4, 5]
    assert chosen([0.5] * 400, 2) == [0, 399]
    assert chosen([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], 2) == [1, 5]


def test_candidates_without_a_proxy_are_never_kept():
    assert chosen([math.nan, 0.1, math.inf, 0.2, -math.inf], 2) == [1, 3]
    assert chosen([math.nan, 0.1, math.nan], 2) == [1]
    assert chosen([math.nan, math.nan], 2) == []


def test_more_than_there_are_cannot_be_kept():
    for keep in [0, 4]:
        with pytest.raises(ValueError, match=f"{keep} of 3"):
            chosen([0.1, 0.2, 0.3], keep)


@given(SCORES, st.integers(1, 40))
def test_the_kept_are_distinct_ascending_finite_and_as_many_as_can_be(proxy, keep):
    keep = min(keep, len(proxy))
    found = chosen(proxy, keep)
    finite = [i for i, score in enumerate(proxy) if math.isfinite(score)]
    assert found == sorted(set(found))
    assert set(found) <= set(finite)
    assert len(found) == min(keep, len(finite))


@given(SCORES, st.integers(1, 40))
def test_no_other_is_better_than_the_best_or_worse_than_the_worst(proxy, keep):
    score = torch.tensor(proxy)
    found = select_candidates(score, min(keep, len(proxy)))
    others = [i for i in range(len(proxy)) if i not in found.tolist() and math.isfinite(proxy[i])]
    if not others:
        return
    ranked = score[found].sort(descending=True).values
    best, worst = (ranked[ends] for ends in best_and_worst(len(found), len(found)))
    assert bool((best[:, None] >= score[others]).all())
    assert bool((worst[:, None] <= score[others]).all())
