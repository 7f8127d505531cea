"""Couplings are linear: fed unit vectors, they show their covariance. Nothing is sampled."""

import math

import numpy as np
import pytest
import torch
from coupled import correlation, gradient_factor
from grown import F64, branching, from_plan, randn
from torch.testing import assert_close

from flowrl.functional.gaussian import log_prob, log_ratio
from flowrl.functional.noise import COUPLINGS, NEEDS_SHARED
from flowrl.trees.plan import NoiseCoupling

KEEPING = [
    ("independent", 1.0, 3),
    ("shared", 0.0, 3),
    ("shared", 0.5, 4),
    ("shared", 4.0, 2),
    ("simplex", 1.0, 2),
    ("simplex", 1.0, 5),
    ("antithetic", 1.0, 2),
    ("antithetic", 1.0, 6),
]
keeping = pytest.mark.parametrize(("kind", "strength", "siblings"), KEEPING)


def weights(kind, strength, siblings):
    """Each child's noise as coefficients of the draws z_1 ... z_K and shared. (K, K + 1)"""
    unit = torch.eye(siblings + 1, dtype=F64)
    return COUPLINGS[kind](unit[None, :-1], unit[None, -1], strength)[0]


def covariance(kind, strength, siblings):
    linear = weights(kind, strength, siblings)
    return linear @ linear.T


def assert_exact(value, expected):
    assert_close(value, expected, rtol=0, atol=1e-14)


@keeping
def test_every_childs_noise_has_variance_one(kind, strength, siblings):
    assert_exact(covariance(kind, strength, siblings).diagonal(), torch.ones(siblings, dtype=F64))


@keeping
def test_siblings_have_the_stated_correlation(kind, strength, siblings):
    found = covariance(kind, strength, siblings)
    rho = torch.full((siblings,), correlation(kind, strength, siblings), dtype=F64)
    assert_exact((found.sum(1) - 1) / (siblings - 1), rho)
    if kind != "antithetic":
        others = ~torch.eye(siblings, dtype=torch.bool)
        assert_exact(found[others], rho[0].expand(siblings * (siblings - 1)))


def test_the_correlations_are_those_of_the_papers():
    for s in (0.5, 1.0, 4.0):
        assert correlation("shared", s, 5) == 1 / (1 + s * s)
    assert correlation("simplex", 1.0, 5) == correlation("antithetic", 1.0, 5) == -1 / 4
    assert correlation("independent", 1.0, 5) == correlation("scaled", 4.0, 5) == 0


def test_strength_zero_of_shared_noise_makes_siblings_identical_and_a_large_one_independent():
    z, shared = randn(2, 3, 4), randn(2, 4, seed=1)
    assert torch.equal(COUPLINGS["shared"](z, shared, 0.0), shared[:, None].expand(2, 3, 4))
    assert_close(COUPLINGS["shared"](z, shared, 1e9), z, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", COUPLINGS)
@pytest.mark.parametrize("shape", [(), (5,), (3, 2, 2)], ids=str)
def test_every_coupling_works_on_latents_of_any_shape_element_by_element(kind, shape):
    z, shared = randn(2, 4, *shape), randn(2, *shape, seed=1)
    noise = COUPLINGS[kind](z, shared, 1.5)
    assert noise.shape == z.shape and noise.dtype == F64
    flat = COUPLINGS[kind](z.flatten(2) if shape else z[..., None], shared.view(2, -1), 1.5)
    assert torch.equal(noise.reshape(2, 4, -1), flat)


@pytest.mark.parametrize("kind", COUPLINGS)
def test_parents_do_not_see_each_other(kind):
    z, shared = randn(3, 4, 2), randn(3, 2, seed=1)
    together = COUPLINGS[kind](z, shared, 1.5)
    for row in range(3):
        alone = COUPLINGS[kind](z[row : row + 1], shared[row : row + 1], 1.5)
        assert_exact(alone[0], together[row])


@pytest.mark.parametrize("kind", COUPLINGS)
def test_a_lone_child_ignores_the_coupling(kind):
    z = randn(2, 1, 3)
    assert torch.equal(COUPLINGS[kind](z, None, 4.0), z)
    assert correlation(kind, 4.0, 1) == 0


@pytest.mark.parametrize("kind", COUPLINGS)
def test_the_shared_draw_is_needed_exactly_where_it_is_said_to_be(kind):
    z, shared = randn(2, 4, 3), randn(2, 3, seed=1)
    changed = not torch.equal(COUPLINGS[kind](z, shared, 1.5), COUPLINGS[kind](z, -shared, 1.5))
    assert changed == (kind in NEEDS_SHARED)
    if kind in NEEDS_SHARED:
        with pytest.raises(ValueError, match="NEEDS_SHARED"):
            COUPLINGS[kind](z, None, 1.5)


def test_simplex_noises_sum_to_zero_and_for_two_they_are_antithetic():
    assert_exact(
        COUPLINGS["simplex"](randn(2, 5, 3), None, 1.0).sum(1), torch.zeros(2, 3, dtype=F64)
    )
    assert_exact(covariance("simplex", 1.0, 2), covariance("antithetic", 1.0, 2))


def test_antithetic_siblings_are_neighbours_of_opposite_sign_and_an_odd_number_is_refused():
    noise = COUPLINGS["antithetic"](randn(2, 6, 3), None, 1.0)
    assert torch.equal(noise[:, 0::2], -noise[:, 1::2])
    with pytest.raises(ValueError, match="come in pairs, got 3"):
        COUPLINGS["antithetic"](randn(2, 3, 3), None, 1.0)


# The gradient of section 2.5: r_b = w . child_b, hence E[r_b xi_a] is proportional to Cov(b, a).


def baseline_leaves(noise_covariance: torch.Tensor) -> torch.Tensor:
    """E[(r_b - mean r) xi_b] / E[r_b xi_b] for a linear reward of the children."""
    left = noise_covariance - noise_covariance.mean(0, keepdim=True)
    return left.diagonal() / noise_covariance.diagonal()


@keeping
@pytest.mark.parametrize("parents", [1, 2, 3])
def test_a_mean_baseline_leaves_the_stated_part_of_the_gradient(kind, strength, siblings, parents):
    """One parent is the sibling baseline: (1 - 1/K)(1 - rho). More are nodes of one depth."""
    found = torch.block_diag(*[covariance(kind, strength, siblings)] * parents)
    rho, n = correlation(kind, strength, siblings), parents * siblings
    factor = gradient_factor(rho, siblings, n)
    assert_exact(baseline_leaves(found), torch.full((n,), factor, dtype=F64))
    if parents == 1:
        assert factor == pytest.approx((1 - 1 / siblings) * (1 - rho), abs=1e-15)


@pytest.mark.parametrize("kind", ["simplex", "antithetic"])
@pytest.mark.parametrize("parents", [1, 4])
def test_simplex_and_antithetic_noise_keep_the_whole_gradient_in_any_scope(kind, parents):
    for siblings in (2, 4, 6):
        rho = correlation(kind, 1.0, siblings)
        assert gradient_factor(rho, siblings, parents * siblings) == pytest.approx(1, abs=1e-15)


# scaled, the released code.


def test_uncorrected_scaling_breaks_the_variance_that_every_other_coupling_keeps():
    assert_exact(covariance("scaled", 4.0, 3), 16 * torch.eye(3, dtype=F64))


@pytest.mark.parametrize("c", [1.0, 4.0])
def test_scaled_noise_multiplies_the_score_of_a_split_edge(c):
    """d log p / d mean = (x - mean) / std^2 per element: c z / std for a draw of c z."""
    z, std = randn(1, 3, 5), torch.tensor(0.7, dtype=F64)
    mean = randn(3, 5).requires_grad_()
    x = mean.detach() + std * COUPLINGS["scaled"](z, None, c)[0]
    density = log_prob(x, mean, std.expand(3)) * 5  # summed over the latent
    (score,) = torch.autograd.grad(density.sum(), mean)
    assert_close(score, c * z[0] / std, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("c", [0.3, 1.0, 1.3])
@pytest.mark.parametrize("delta", [0.1, -0.4])
def test_the_ratio_of_scaled_noise_averages_to_one_only_at_the_std_of_the_draw(c, delta):
    """By Gauss quadrature over the noise, exact to rounding for these integrands."""
    z, mass = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(60))
    mass = mass / math.sqrt(2 * math.pi)
    std = torch.tensor(0.7, dtype=F64)
    noise = COUPLINGS["scaled"](torch.stack([z, z], dim=1), None, c)[:, 0]
    x, old = (std * noise)[:, None], torch.zeros(60, 1, dtype=F64)
    new = old + delta * std
    uncorrected = (mass * log_ratio(x, new, old, std).exp()).sum().item()
    assert uncorrected == pytest.approx(math.exp(delta**2 * (c**2 - 1) / 2), abs=1e-12)
    corrected = (mass * log_ratio(x, new, old, c * std).exp()).sum().item()
    assert corrected == pytest.approx(1, abs=1e-12)
    assert (abs(uncorrected - 1) > 1e-3) == (c != 1)


# A linear sampler x_{i+1} = a_i x_i + std_i xi_i over a whole tree.

GAINS, STDS = [0.9, 1.1, 0.8, 1.2, 0.7], [0.5, 0.4, 0.3, 0.2, 0.0]


def leaf_covariance(coupling: NoiseCoupling) -> torch.Tensor:
    """Every node as coefficients of all draws of the tree, the root's first."""
    tree = from_plan(branching(5, {1: 2, 3: 4}, coupling))
    n = len(tree.parent)
    draws = torch.eye(2 * n, dtype=F64)  # each node's own draw, and the one its children share
    x = torch.zeros(n, 2 * n, dtype=F64)
    x[0] = draws[0]
    for node in range(n):
        if children := tree.children(node):
            step = int(tree.step[node])
            couple = COUPLINGS[coupling.kind]
            noise = couple(draws[None, children], draws[None, n + node], coupling.strength)[0]
            x[children] = GAINS[step] * x[node] + STDS[step] * noise
    leaves = x[tree.leaf]
    return leaves @ leaves.T


@pytest.mark.parametrize(
    ("kind", "strength"),
    [("independent", 1.0), ("shared", 2.0), ("shared", 0.0), ("simplex", 1.0), ("scaled", 1.5)],
)
def test_leaves_of_a_linear_sampler_vary_as_a_chain_and_covary_by_their_split(kind, strength):
    """Leaves first parted at step d share all noise before it, and rho of it at d."""
    found = leaf_covariance(NoiseCoupling(kind, strength))
    after = [math.prod(GAINS[i + 1 :]) for i in range(5)]
    spread = [(s * a) ** 2 for s, a in zip(STDS, after, strict=True)]
    start = math.prod(GAINS) ** 2
    variance = torch.full((8,), start + sum(spread), dtype=F64)
    if kind == "scaled":
        assert bool((found.diagonal() - variance > 0.01).all())
        return
    assert_exact(found.diagonal(), variance)
    parted_at_1 = start + spread[0] + correlation(kind, strength, 2) * spread[1]
    parted_at_3 = start + sum(spread[:3]) + correlation(kind, strength, 4) * spread[3]
    assert found[0, 4:].tolist() == pytest.approx([parted_at_1] * 4, abs=1e-14)
    assert found[0, 1:4].tolist() == pytest.approx([parted_at_3] * 3, abs=1e-14)
