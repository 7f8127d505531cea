import math
from itertools import combinations
from typing import get_args

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.sampling.two_stage import SelectRule, select_candidates

SCORES = st.lists(
    st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, math.inf]) | st.floats(-3, 3, width=32),
    min_size=1,
    max_size=40,
)


def chosen(proxy, keep, mode="best_worst", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return select_candidates(torch.tensor(proxy), keep, mode, generator).tolist()


def test_the_best_and_the_worst_are_kept_one_more_of_the_worst_where_the_number_is_odd():
    proxy = [0.3, 0.9, 0.1, 0.5, 0.7, 0.2]
    assert chosen(proxy, 4) == [1, 2, 4, 5]
    assert chosen(proxy, 3) == [1, 2, 5]
    assert chosen(proxy, 1) == [2]


def test_of_equal_proxies_the_first_count_as_the_better_ones():
    assert chosen([0.5] * 6, 4) == [0, 1, 4, 5]
    assert chosen([0.5] * 400, 2) == [0, 399]
    assert chosen([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], 2) == [1, 5]


def test_those_furthest_from_the_mean_are_kept():
    assert chosen([0.0, 0.4, 0.5, 0.6, 3.0], 2, "mean_deviation") == [0, 4]
    assert chosen([0.0, 0.1, 0.1, 4.0, 4.2], 3, "mean_deviation") == [0, 3, 4]


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=8), st.integers(1, 8))
def test_the_variance_of_those_kept_is_the_largest_of_all_choices(proxy, keep):
    keep, scores = min(keep, len(proxy)), torch.tensor(proxy).double()
    best = max(
        scores[list(rows)].var(correction=0) for rows in combinations(range(len(proxy)), keep)
    )
    kept = chosen(proxy, keep, "max_variance")
    torch.testing.assert_close(scores[kept].var(correction=0), best)


def test_extremes_are_kept_with_others_at_random():
    found = {tuple(chosen(list(range(9)), 4, "extremes_random", seed)) for seed in range(40)}
    assert len(found) > 5
    assert all(kept[0] == 0 and kept[-1] == 8 for kept in found)
    assert chosen([0.2, 0.1], 1, "extremes_random") == [0]


def test_a_random_choice_reads_no_proxies():
    assert chosen([0.1, 0.2, 0.3, 0.4], 2, "random") == chosen([4.0, 3.0, 2.0, 1.0], 2, "random")
    assert len({tuple(chosen([0.0] * 6, 3, "random", seed)) for seed in range(200)}) == 20


def test_most_mixed_keeps_the_highest_scores():
    assert chosen([0.1, 0.25, math.nan, 0.2, 0.0], 2, "most_mixed") == [1, 3]


@given(SCORES, st.integers(1, 40), st.sampled_from(get_args(SelectRule)), st.integers(0, 9))
def test_the_kept_are_distinct_ascending_finite_and_as_many_as_can_be(proxy, keep, mode, seed):
    keep = min(keep, len(proxy))
    found = chosen(proxy, keep, mode, seed)
    finite = [i for i, score in enumerate(proxy) if math.isfinite(score)]
    assert found == sorted(set(found))
    assert set(found) <= set(finite)
    assert len(found) == min(keep, len(finite))
