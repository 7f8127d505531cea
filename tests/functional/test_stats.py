import math

import pytest
import torch

from flowrl.functional.groups import paired_bootstrap


def scores(n, seed=0):
    return torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_same_scores_give_the_same_interval():
    before, after = scores(50)
    first, again, other = (
        paired_bootstrap(before, after, resamples=500, seed=s) for s in (0, 0, 1)
    )
    assert first == again != other


def test_an_equal_change_of_every_pair_is_certain():
    before, _ = scores(50)
    interval = paired_bootstrap(before, before + 0.25, resamples=200)
    for value in (interval.mean, interval.low, interval.high):
        assert value == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize(("level", "width"), [(0.95, 1.960), (0.8, 1.2816)])
def test_interval_of_many_scores_is_that_of_the_normal_theory(level, width):
    before, after = scores(600)
    change = after - before
    error = change.std().item() / math.sqrt(600)
    interval = paired_bootstrap(before, after, level=level)
    assert interval.mean == pytest.approx(change.mean().item(), abs=1e-12)
    assert interval.low == pytest.approx(interval.mean - width * error, abs=0.1 * error)
    assert interval.high == pytest.approx(interval.mean + width * error, abs=0.1 * error)


def test_pairs_stay_together():
    """Scores that differ widely between prompts but change alike have a narrow interval."""
    prompt, jitter = scores(200)
    interval = paired_bootstrap(100 * prompt, 100 * prompt + 1 + 0.1 * jitter, resamples=1000)
    assert 0.9 < interval.low < interval.high < 1.1


def test_interval_covers_the_truth_as_often_as_it_says():
    trials, n, hits = 300, 60, 0
    for seed in range(trials):
        before, after = scores(n, seed)
        interval = paired_bootstrap(before, after + 0.3, resamples=300, seed=seed)
        hits += interval.low <= 0.3 <= interval.high
    # 95 %, less about 1 % for the small sample; four standard errors of the count either side.
    assert hits / trials == pytest.approx(0.94, abs=4 * math.sqrt(0.06 * 0.94 / trials))


def test_scores_of_different_length_or_none_are_refused():
    for before, after in [(torch.ones(2), torch.ones(3)), (torch.ones(0), torch.ones(0))]:
        with pytest.raises(ValueError, match="two equal, non-empty vectors"):
            paired_bootstrap(before, after)


def test_a_missing_score_is_refused():
    with pytest.raises(ValueError, match="finite"):
        paired_bootstrap(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
