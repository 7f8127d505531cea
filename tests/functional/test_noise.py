import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.functional.noise import coupled, keyed_noise, noise_seed

FIELDS = ("seed", "iteration", "prompt", "root", "path", "step", "role")
KEY = dict(zip(FIELDS, (0, 3, "a1b2", 1, (2, 0), 4, "step"), strict=True))
OTHER = dict(zip(FIELDS, (1, 4, "a1b3", 2, (2, 1), 5, "init"), strict=True))


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
    rows=st.lists(st.integers(0, 7), max_size=8),
    shape=st.sampled_from([(1,), (3,), (15,), (4, 4), (16, 8, 8)]),
)
def test_a_row_does_not_depend_on_the_batch_or_the_global_generator(rows, shape):
    seeds = [noise_seed(**{**KEY, "root": root}) for root in range(8)]
    state = torch.get_rng_state()
    whole, part = (keyed_noise(s, shape, device="cpu") for s in (seeds, [seeds[i] for i in rows]))
    assert torch.equal(part, whole[rows])
    assert torch.equal(torch.get_rng_state(), state)


KEEPING = [
    ("independent", 1.0, 3, 0.0),
    ("shared", 0.0, 3, 1.0),
    ("shared", 0.5, 4, 1 / (1 + 0.5**2)),
    ("shared", 4.0, 2, 1 / (1 + 4.0**2)),
    ("simplex", 1.0, 2, -1.0),
    ("simplex", 1.0, 5, -1 / (5 - 1)),
]


def test_siblings_have_the_stated_correlation():
    for kind, strength, siblings, rho in KEEPING:
        expected = torch.full((siblings, siblings), rho, dtype=torch.float64).fill_diagonal_(1)
        # Each child's noise as coefficients of the draws z_1 ... z_K and shared. (K, K + 1)
        unit = torch.eye(siblings + 1, dtype=torch.float64)
        linear = coupled(unit[None, :-1], kind, strength, lambda unit=unit: unit[None, -1])[0]
        assert_close(linear @ linear.T, expected, rtol=0, atol=1e-14)
