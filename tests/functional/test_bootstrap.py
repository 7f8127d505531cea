import math

import pytest
import torch

from flowrl.training.evaluate import paired_bootstrap


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


def test_interval_of_many_scores_is_that_of_the_normal_theory():
    for level, width in [(0.95, 1.960), (0.8, 1.2816)]:
        before, after = scores(600)
        change = after - before
        error = change.std().item() / math.sqrt(600)
        interval = paired_bootstrap(before, after, level=level)
        assert interval.mean == pytest.approx(change.mean().item(), abs=1e-12)
        assert interval.low == pytest.approx(interval.mean - width * error, abs=0.1 * error)
        assert interval.high == pytest.approx(interval.mean + width * error, abs=0.1 * error)


def test_scores_of_different_length_or_none_are_refused():
    for before, after in [(torch.ones(2), torch.ones(3)), (torch.ones(0), torch.ones(0))]:
        with pytest.raises(ValueError, match="vectors"):
            paired_bootstrap(before, after)


def test_a_missing_score_is_refused():
    with pytest.raises(ValueError, match="finite"):
        paired_bootstrap(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
