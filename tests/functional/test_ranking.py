import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.sampling.rank_audit import (
    contrast_retention,
    halves,
    kendall_tau,
    mean_true_rank,
    overlap,
    paired,
    ranks,
    regenerated_rank,
    spearman_rho,
)
from flowrl.sampling.two_stage import select_candidates

NAN, INF = math.nan, math.inf
few = st.integers(0, 4)  # many ties


def scores(*values):
    return torch.tensor(values, dtype=torch.float64)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pairs_of(values):
    return [(a, b) for i, a in enumerate(values) for b in values[:i]]


@given(rows=st.lists(st.tuples(few, few), min_size=2, max_size=12))
def test_kendalls_tau_is_agreeing_minus_disagreeing_pairs_over_those_not_tied(rows):
    proxy, true = (scores(*column) for column in zip(*rows, strict=True))
    signs = [((a[0] > b[0]) - (a[0] < b[0]), (a[1] > b[1]) - (a[1] < b[1])) for a, b in
             pairs_of(rows)]  # fmt: skip
    agree = sum(x * y for x, y in signs)
    untied = math.prod(sum(pair[side] != 0 for pair in signs) for side in (0, 1))
    found = kendall_tau(proxy, true)
    assert math.isnan(found) if not untied else found == pytest.approx(agree / math.sqrt(untied))


@given(rows=st.lists(st.tuples(few, few), min_size=2, max_size=12))
def test_spearmans_rho_is_the_correlation_of_average_ranks(rows):
    proxy, true = (scores(*column) for column in zip(*rows, strict=True))
    table = torch.stack([ranks(proxy), ranks(true)])
    found = spearman_rho(proxy, true)
    if bool((table == table[:, :1]).all(1).any()):
        assert math.isnan(found)
    else:
        assert found == pytest.approx(torch.corrcoef(table)[0, 1].item())


@given(values=st.lists(few, min_size=1, max_size=12))
def test_a_rank_is_one_more_than_those_above_and_half_of_those_equal(values):
    expected = [
        1 + sum(v > own for v in values) + (values.count(own) - 1) / 2 for own in values
    ]  # fmt: skip
    assert ranks(scores(*values)).tolist() == expected


def test_small_differences_of_large_scores_are_differences():
    for measure in [kendall_tau, spearman_rho]:
        true = randn(30)
        assert measure(1e6 + 1e-6 * true, true) == pytest.approx(1)


def test_there_is_no_correlation_with_a_constant_or_without_two_pairs():
    for measure in [kendall_tau, spearman_rho]:
        for proxy, true in [
            ([1, 1, 1], [1, 2, 3]),
            ([1, 2, 3], [1, 1, 1]),
            ([1], [1]),
            ([], []),
            ([1, NAN], [2, 3]),
        ]:
            assert math.isnan(measure(scores(*proxy), scores(*true)))


def test_a_candidate_without_one_score_is_left_out_of_both():
    for measure in [kendall_tau, spearman_rho]:
        proxy = scores(3, NAN, 1, 2, INF, 9)
        true = scores(0.3, 0.9, 0.2, 0.1, 0.0, NAN)
        assert paired(proxy, true).tolist() == [True, False, True, True, False, False]
        left = measure(scores(3, 1, 2), scores(0.3, 0.2, 0.1))
        assert measure(proxy, true) == left != 1


def test_ranks_leave_out_what_has_no_score():
    found = ranks(scores(2, NAN, 5, 5))
    assert found[[0, 2, 3]].tolist() == [3, 1.5, 1.5] and bool(found[1].isnan())


@given(values=st.lists(few, min_size=1, max_size=12), data=st.data())
def test_halves_are_the_two_ends_of_what_best_worst_chooses(values, data):
    keep = data.draw(st.integers(1, len(values)))
    score = scores(*values)
    best, worst = halves(score, select_candidates(score, keep, "best_worst", torch.Generator()))
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert best.tolist() == ranked[: keep // 2]
    assert worst.tolist() == ranked[len(values) - (keep - keep // 2) :]


def test_overlap_is_the_share_of_what_was_found_that_was_wanted():
    assert overlap(torch.tensor([1, 2, 3, 4]), torch.tensor([4, 9, 1, 0])) == 0.5
    assert math.isnan(overlap(torch.tensor([]).long(), torch.tensor([]).long()))


def test_mean_true_rank_is_that_of_the_true_scores_among_all():
    true = scores(0.1, 0.9, 0.9, 0.4)
    assert mean_true_rank(true, torch.tensor([1, 2])) == 1.5
    assert mean_true_rank(true, torch.tensor([0, 1])) == (4 + 1.5) / 2
    assert math.isnan(mean_true_rank(true, torch.tensor([]).long()))


def test_retention_is_the_chosen_contrast_over_the_best_one():
    true = scores(0, 1, 2, 3, 10)
    ends = torch.tensor([4]), torch.tensor([0])
    assert contrast_retention(true, ends, ends) == 1
    assert contrast_retention(true, ends[::-1], ends) == -1
    assert contrast_retention(true, (torch.tensor([3]), torch.tensor([1])), ends) == 0.2


def test_nothing_is_retained_of_no_contrast():
    ends = torch.tensor([1]), torch.tensor([0])
    none = torch.tensor([]).long(), torch.tensor([0])
    assert math.isnan(contrast_retention(torch.ones(2), ends, ends))
    assert math.isnan(contrast_retention(scores(0, 1), none, none))


def test_the_regenerated_rank_is_the_mean_within_prompts_and_prompts_without_one_are_left_out():
    true = randn(3, 8)
    proxy = torch.stack([true[0], -true[1], torch.zeros(8).double()])
    assert regenerated_rank(proxy[:2], true[:2]) == pytest.approx(0)
    assert regenerated_rank(proxy[[0, 2]], true[[0, 2]]) == pytest.approx(1)
    assert math.isnan(regenerated_rank(proxy[2:], true[2:]))
    assert math.isnan(regenerated_rank(torch.empty(0, 2), torch.empty(0, 2)))
