import pytest
import torch
from torch.testing import assert_close

from flowrl.functional.noise import COUPLINGS, NEEDS_SHARED

F64 = torch.float64


def randn(*shape: int, seed: int = 0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


KEEPING = [
    ("independent", 1.0, 3),
    ("shared", 0.0, 3),
    ("shared", 0.5, 4),
    ("shared", 4.0, 2),
    ("simplex", 1.0, 2),
    ("simplex", 1.0, 5),
]


def correlation(kind: str, strength: float, siblings: int) -> float:
    if kind == "shared":
        return 1 / (1 + strength**2)
    return -1 / (siblings - 1) if kind == "simplex" else 0.0


def weights(kind, strength, siblings):
    """Each child's noise as coefficients of the draws z_1 ... z_K and shared. (K, K + 1)"""
    unit = torch.eye(siblings + 1, dtype=F64)
    return COUPLINGS[kind](unit[None, :-1], unit[None, -1], strength)[0]


def covariance(kind, strength, siblings):
    linear = weights(kind, strength, siblings)
    return linear @ linear.T


def assert_exact(value, expected):
    assert_close(value, expected, rtol=0, atol=1e-14)


def test_every_childs_noise_has_variance_one():
    for kind, strength, siblings in KEEPING:
        variance = covariance(kind, strength, siblings).diagonal()
        assert_exact(variance, torch.ones(siblings, dtype=F64))


def test_siblings_have_the_stated_correlation():
    for kind, strength, siblings in KEEPING:
        found = covariance(kind, strength, siblings)
        rho = torch.full((siblings,), correlation(kind, strength, siblings), dtype=F64)
        assert_exact((found.sum(1) - 1) / (siblings - 1), rho)
        rest = ~torch.eye(siblings, dtype=torch.bool)
        assert_exact(found[rest], rho[0].expand(siblings * (siblings - 1)))


def test_strength_zero_of_shared_noise_makes_siblings_identical_and_a_large_one_independent():
    z, shared = randn(2, 3, 4), randn(2, 4, seed=1)
    assert torch.equal(COUPLINGS["shared"](z, shared, 0.0), shared[:, None].expand(2, 3, 4))
    assert_close(COUPLINGS["shared"](z, shared, 1e9), z, rtol=0, atol=1e-8)


def test_every_coupling_works_on_latents_of_any_shape_element_by_element():
    for kind in COUPLINGS:
        for shape in [(), (5,), (3, 2, 2)]:
            z, shared = randn(2, 4, *shape), randn(2, *shape, seed=1)
            noise = COUPLINGS[kind](z, shared, 1.5)
            assert noise.shape == z.shape and noise.dtype == F64
            flat = COUPLINGS[kind](z.flatten(2) if shape else z[..., None], shared.view(2, -1), 1.5)
            assert torch.equal(noise.reshape(2, 4, -1), flat)


def test_parents_do_not_see_each_other():
    for kind in COUPLINGS:
        z, shared = randn(3, 4, 2), randn(3, 2, seed=1)
        together = COUPLINGS[kind](z, shared, 1.5)
        for row in range(3):
            alone = COUPLINGS[kind](z[row : row + 1], shared[row : row + 1], 1.5)
            assert_exact(alone[0], together[row])


def test_a_lone_child_ignores_the_coupling():
    for kind in COUPLINGS:
        z = randn(2, 1, 3)
        assert torch.equal(COUPLINGS[kind](z, None, 4.0), z)


def test_the_shared_draw_is_needed_exactly_where_it_is_said_to_be():
    for kind in COUPLINGS:
        z, shared = randn(2, 4, 3), randn(2, 3, seed=1)
        changed = not torch.equal(COUPLINGS[kind](z, shared, 1.5), COUPLINGS[kind](z, -shared, 1.5))
        assert changed == (kind in NEEDS_SHARED)
        if kind in NEEDS_SHARED:
            with pytest.raises(ValueError, match="NEEDS_SHARED"):
                COUPLINGS[kind](z, None, 1.5)


def test_simplex_noises_sum_to_zero():
    assert_exact(
        COUPLINGS["simplex"](randn(2, 5, 3), None, 1.0).sum(1), torch.zeros(2, 3, dtype=F64)
    )
