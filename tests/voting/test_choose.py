"""What a question tells: exact in the limits, and learning from chosen questions."""

import math

import torch

from flowrl.voting.choose import PRIOR, Taste, all_pairs, learn_taste, next_pair, taste_of

PROMPTS = [row // 4 for row in range(240)]  # 60 prompts, four images each


def voter(features, weights):
    """A scripted voter who likes what lies along hidden weights."""
    liking = features.double() @ weights
    return lambda a, b: float(liking[a] > liking[b])


def asked_by(features, answer, *, informative, seed, count):
    pairs, asked = all_pairs(PROMPTS), []
    for _ in range(count):
        pair = next_pair(pairs, PROMPTS, features, asked, informative=informative, seed=seed)
        assert pair is not None
        asked.append((pair, answer(*pair)))
    return asked


def test_information_agrees_with_sampling_and_is_nothing_for_equal_images():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64) / 2
    taste = Taste(mean=torch.randn(4, generator=generator).double(), covariance=root @ root.T)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(200_000, 4, generator=generator, dtype=torch.float64)
    p = torch.sigmoid((taste.mean + noise @ root.T) @ x.T)  # (draws, pairs)

    def entropy(q):
        return -(q * q.log2() + (1 - q) * (1 - q).log2())

    exact = entropy(p.mean(0)) - entropy(p).mean(0)
    assert torch.allclose(taste.information(x), exact, atol=3e-3)  # of the sampling
    assert taste.information(torch.zeros(1, 4)).abs().item() < 1e-9
    assert torch.allclose(taste.probability(x), p.mean(0), atol=3e-3)


def test_the_model_is_the_posterior_and_finds_a_rule():
    x = torch.tensor([[1.0], [1.0], [1.0]])
    taste = learn_taste(x, torch.tensor([1.0, 1.0, 1.0]))
    (w,) = taste.mean.tolist()
    gradient = w / PRIOR**2 - 3 * (1 - 1 / (1 + math.exp(-w)))
    assert math.isclose(gradient, 0, abs_tol=1e-9)
    none = learn_taste(torch.zeros(0, 2), torch.zeros(0))
    assert none.mean.tolist() == [0, 0]
    assert torch.allclose(none.covariance, PRIOR**2 * torch.eye(2).double())


def test_no_pair_is_asked_twice_and_prompts_take_turns():
    features = torch.randn(240, 3, generator=torch.Generator().manual_seed(1))
    asked = asked_by(features, lambda a, b: None, informative=True, seed=0, count=120)
    assert len({frozenset(pair) for pair, _ in asked}) == 120
    assert sorted(PROMPTS[a] for (a, _), _ in asked[:60]) == list(range(60))
    assert all(PROMPTS[a] == PROMPTS[b] for (a, b), _ in asked)
    few = [0, 0, 1, 1]
    both = [((0, 1), 1.0), ((3, 2), 0.0)]
    assert next_pair(all_pairs(few), few, features[:4], both, informative=True, seed=0) is None


def test_chosen_questions_teach_more_than_any_questions():
    """Over 12 voters, the share of 500 unseen pairs that the model calls right after 30 answers."""
    right = {True: [], False: []}
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        scale = torch.linspace(1.0, 0.1, 16)  # some features vary little, as components do
        features = torch.randn(240, 16, generator=generator) * scale
        weights = torch.randn(16, generator=generator).double()
        answer = voter(features, weights)
        fresh = torch.randn(500, 2, 16, generator=generator) * scale
        truth = (fresh[:, 0] - fresh[:, 1]).double() @ weights > 0
        for informative in (True, False):
            taste = taste_of(features, asked_by(features, answer, informative=informative,
                                                seed=seed, count=30))  # fmt: skip
            guess = taste.scores(fresh[:, 0]) > taste.scores(fresh[:, 1])
            right[informative].append((guess == truth).double().mean().item())
    means = {key: sum(values) / len(values) for key, values in right.items()}
    assert means[True] > means[False] > 0.6, means
