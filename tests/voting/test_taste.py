"""The model of a voter: the posterior, its predictions, the features it sees."""

import math

import pytest
import torch
from flowrl_rewards.taste import WIDTHS, describe

from flowrl.scoring.spec import load_reward
from flowrl.voting.taste import (
    PRIOR,
    TastePosterior,
    feature_space,
    held_out_accuracy,
    learn_taste,
    save_taste,
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
    taste = TastePosterior(
        mean=torch.randn(4, generator=generator).double(), covariance=root @ root.T
    )
    noise = torch.randn(100_000, 4, generator=generator, dtype=torch.float64)
    for x in torch.randn(6, 4, generator=generator, dtype=torch.float64):
        exact = torch.sigmoid((taste.mean + noise @ root.T) @ x).mean().item()
        assert taste.probability(x) == pytest.approx(exact, abs=0.02)
    assert taste.probability(torch.zeros(4)) == 0.5


def test_the_reward_ranks_images_as_the_model_of_the_votes_does(tmp_path):
    images = torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    space = feature_space(describe(images))
    features = space(describe(images))
    assert features[:, 0].std().item() == pytest.approx(1)
    taste = learn_taste(features[:4] - features[4:8], torch.tensor([1.0, 0.0, 1.0, 1.0]))
    save_taste(tmp_path, space.centre, space.basis @ taste.mean)
    reward = load_reward("taste", {"path": str(tmp_path)})
    scores = reward(images, [""] * 12, [{}] * 12)
    assert torch.allclose(scores.double(), taste.scores(features).sigmoid(), atol=1e-5)
    version = reward.version
    save_taste(tmp_path, space.centre, -space.basis @ taste.mean)
    assert load_reward("taste", {"path": str(tmp_path)}).version != version
    missing = load_reward("taste", {"path": str(tmp_path / "none")})
    with pytest.raises(FileNotFoundError, match="none is not there"):
        missing(images, [""] * 12, [{}] * 12)


def test_held_out_votes_are_predicted_where_a_rule_made_them():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    assert held_out_accuracy(x, (x[:, 0] > 0).double()) > 0.9
    noise = torch.rand(60, generator=torch.Generator().manual_seed(2)) > 0.5
    assert 0.3 < held_out_accuracy(x, noise.double()) < 0.7


def test_a_description_tells_colours_places_and_edges():
    left = torch.ones(1, 3, 64, 64)
    left[..., :32] = 0.0
    red = left * torch.tensor([1.0, 0, 0])[:, None, None]
    parts = [describe(image).split(WIDTHS, 1) for image in (left, left.flip(3), red)]
    cells, edges, means, spreads, palettes = zip(*parts[:2], strict=True)
    assert not torch.allclose(*cells) and all(
        torch.allclose(*x) for x in (means, spreads, palettes)
    )
    assert (edges[0].view(8, 8).sum(0) > 0.01).nonzero().flatten().tolist() in ([3], [4], [3, 4])
    assert not torch.allclose(parts[0][4], parts[2][4])
