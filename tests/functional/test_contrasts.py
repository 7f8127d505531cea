"""Intervals over prompts, and Holm's correction."""

import math

import pytest
import torch

from flowrl.functional.contrasts import (
    RESAMPLES,
    fewest_prompts,
    holm,
    paired_contrast,
    resamples_for,
)


def test_interval_of_many_prompts_is_that_of_the_normal_theory():
    before, after = torch.randn(2, 600, generator=torch.Generator().manual_seed(0))
    change = after - before
    error = change.std().item() / math.sqrt(600)
    contrast = paired_contrast(before, after, torch.arange(600))
    assert contrast == paired_contrast(before, after, torch.arange(600))
    assert contrast.mean == pytest.approx(change.mean().item(), abs=1e-6)
    assert contrast.low == pytest.approx(contrast.mean - 1.96 * error, abs=0.1 * error)
    assert contrast.high == pytest.approx(contrast.mean + 1.96 * error, abs=0.1 * error)


def test_an_equal_change_of_every_pair_is_certain_but_of_one_prompt_nothing_is():
    before = torch.rand(50)
    contrast = paired_contrast(before, before + 0.25, torch.arange(50) // 5)
    assert (contrast.low, contrast.high) == pytest.approx((0.25, 0.25), abs=1e-6)
    alone = paired_contrast(before, before + 0.25, torch.zeros(50))
    assert math.isnan(alone.low) and math.isnan(alone.high) and alone.p == 1


def test_a_plain_difference_is_found_and_missing_scores_are_left_out():
    prompt = torch.arange(40)
    before = torch.linspace(0, 1, 40)
    after = before + 0.5
    after[3] = torch.nan
    found = paired_contrast(before, after, prompt)
    assert found.mean == pytest.approx(0.5) and found.images == 39 and found.prompts == 39
    assert found.p == 1 / (1 + RESAMPLES)


def test_a_certain_difference_is_found_however_many_comparisons_there_are():
    """13 contestants and 7 measures: 546 comparisons, of which the least p has to bear them all."""
    count = 78 * 7
    resamples, prompts = resamples_for(count), fewest_prompts(count)
    prompt, change = torch.arange(40), torch.ones(40)
    found = paired_contrast(torch.zeros(40), change, prompt, resamples=resamples)
    assert max(holm([found.p] * count)) < 0.05
    assert max(holm([1 / (1 + RESAMPLES)] * count)) > 0.05  # what those of one pair would say
    assert resamples_for(1) == RESAMPLES
    assert 2 / 2**prompts * count <= 0.05 < 2 / 2 ** (prompts - 1) * count
    assert fewest_prompts(1) == 6


def test_holm_is_the_published_step_down():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []
