"""The model of a voter: the posterior, its predictions, the features it sees."""

import math

import pytest
import torch

from flowrl.voting.taste import (
    GRID,
    PRIOR,
    Taste,
    describe,
    learn_taste,
)


def test_the_model_is_the_posterior_of_the_votes():
    taste = learn_taste(torch.ones(3, 1), torch.ones(3))
    (w,) = taste.mean.tolist()
    gradient = w / PRIOR**2 - 3 * (1 - 1 / (1 + math.exp(-w)))
    assert math.isclose(gradient, 0, abs_tol=1e-9)
    none = learn_taste(torch.zeros(0, 2), torch.zeros(0))
    assert none.mean.tolist() == [0, 0]
    assert torch.allclose(none.covariance, PRIOR**2 * torch.eye(2).double())


def test_a_probability_averages_over_what_the_model_does_not_know():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64) / 2
    taste = Taste(mean=torch.randn(4, generator=generator).double(), covariance=root @ root.T)
    noise = torch.randn(100_000, 4, generator=generator, dtype=torch.float64)
    for x in torch.randn(6, 4, generator=generator, dtype=torch.float64):
        exact = torch.sigmoid((taste.mean + noise @ root.T) @ x).mean().item()
        assert taste.probability(x) == pytest.approx(exact, abs=0.02)
    assert taste.probability(torch.zeros(4)) == 0.5


def test_features_have_a_part_for_layout_and_one_that_ignores_places():
    latents = torch.zeros(3, 1, 8, 8)
    latents[0, 0, 0, 0] = latents[1, 0, 7, 7] = latents[2, 0, 7, 6] = 1.0
    none = torch.zeros(3, 1)
    places, amounts, _ = describe(latents, none).split((GRID**2, 4, 1), dim=1)
    assert torch.equal(amounts[0], amounts[1]) and torch.equal(amounts[1], amounts[2])
    assert not torch.equal(places[0], places[1]) and torch.equal(places[1], places[2])
    latents[0] *= 2
    assert not torch.equal(*describe(latents, none)[:2, GRID**2 :])
