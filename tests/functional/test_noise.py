import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.functional.noise import COUPLINGS, keyed_noise, noise_seed

FIELDS = ("seed", "iteration", "prompt", "root", "path", "step", "role")
KEY = dict(zip(FIELDS, (0, 3, "a1b2", 1, (2, 0), 4, "step"), strict=True))
OTHER = dict(zip(FIELDS, (1, 4, "a1b3", 2, (2, 1), 5, "init"), strict=True))


def noise(seeds, shape=(16, 8, 8)):
    return keyed_noise(seeds, shape, device="cpu")


def seeds_of(count, role="step"):
    return [noise_seed(**{**KEY, "root": root, "role": role}) for root in range(count)]


def test_seeds_tell_all_keys_apart_and_stay_the_same():
    # Every field of a key changes the seed.
    for field in KEY:
        assert noise_seed(**KEY) != noise_seed(**{**KEY, field: OTHER[field]})
    # Fields do not run into each other.
    for one, other in [
        ({"path": (1, 23)}, {"path": (12, 3)}),
        ({"path": ()}, {"path": (0,)}),
        ({"seed": 1, "iteration": 23}, {"seed": 12, "iteration": 3}),
        ({"prompt": 'a", 1'}, {"prompt": "a"}),
        ({"prompt": "a", "role": "b"}, {"prompt": "b", "role": "a"}),
    ]:
        assert noise_seed(**{**KEY, **one}) != noise_seed(**{**KEY, **other})
    # A seed stays the same between releases and machines.
    assert noise_seed(**KEY) == 8967696811266256172
    assert noise_seed(**{**KEY, "path": [2, 0]}) == noise_seed(**KEY)


@given(
    order=st.permutations(range(8)), shape=st.sampled_from([(1,), (3,), (15,), (4, 4), (16, 8, 8)])
)
def test_a_row_does_not_depend_on_its_place_in_the_batch(order, shape):
    seeds = seeds_of(8)
    assert torch.equal(noise([seeds[i] for i in order], shape), noise(seeds, shape)[list(order)])


def test_noise_depends_on_seeds_alone():
    # Noise does not depend on the micro batch.
    for size in [1, 2, 3, 8]:
        seeds = seeds_of(8)
        parts = [noise(seeds[i : i + size]) for i in range(0, 8, size)]
        assert torch.equal(torch.cat(parts), noise(seeds))
    # Noise leaves the global generator alone.
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    noise(seeds_of(4))
    assert torch.equal(torch.rand(3), expected)
    # No rows is an empty batch.
    assert noise([]).shape == (0, 16, 8, 8)


F64 = torch.float64


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


def test_siblings_have_the_stated_correlation():
    for kind, strength, siblings in KEEPING:
        found = covariance(kind, strength, siblings)
        assert_exact(found.diagonal(), torch.ones(siblings, dtype=F64))
        rho = torch.full((siblings,), correlation(kind, strength, siblings), dtype=F64)
        assert_exact((found.sum(1) - 1) / (siblings - 1), rho)
        rest = ~torch.eye(siblings, dtype=torch.bool)
        assert_exact(found[rest], rho[0].expand(siblings * (siblings - 1)))
