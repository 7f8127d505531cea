import math

import pytest
from flowrl_rewards.chat.token_mass import expectation, merged, on
from hypothesis import given
from hypothesis import strategies as st

SCORES = {str(n): float(n) for n in range(6)}
SPELLINGS = [
    str,
    lambda a: f" {a}",
    lambda a: f"{a}\n",
    lambda a: f"\u2581{a}",
    lambda a: f"\u0120{a}",
]
shares = st.lists(st.floats(1e-6, 1), min_size=6, max_size=6)


def normalised(weights, mass=1.0):
    return [(str(n), mass * w / sum(weights)) for n, w in enumerate(weights)]


@given(shares, st.floats(0.6, 1))
def test_the_expectation_is_that_of_the_accepted_answers_alone(weights, mass):
    score = expectation([*normalised(weights, mass), ("The", 1 - mass)], SCORES)
    expected = sum(n * w for n, w in enumerate(weights)) / sum(weights)
    assert score == pytest.approx(expected)


@given(shares, st.lists(st.tuples(st.floats(0, 1), st.sampled_from(SPELLINGS)), min_size=6))
def test_how_mass_is_split_among_spellings_does_not_matter(weights, splits):
    plain = normalised(weights)
    split = []
    for (answer, p), (share, spell) in zip(plain, splits, strict=False):
        split += [(answer, p * share), (spell(answer), p * (1 - share))]
    assert expectation(split, SCORES) == pytest.approx(expectation(plain, SCORES))


@given(st.floats(0, 0.499))
def test_too_little_mass_nothing_and_nan_are_no_answers(mass):
    for first in ([("3", mass), ("The", 0.5)], [], [("3", math.nan)]):
        with pytest.raises(ValueError, match="0, 1, 2, 3, 4, 5"):
            expectation(first, SCORES)


def test_spellings_are_merged_likeliest_first_and_an_accepted_one_counts_once():
    found = merged([("a", 0.2), ("B", 0.3), (" A", 0.2)])
    assert list(found.items()) == [("a", pytest.approx(0.4)), ("b", 0.3)]
    assert on([("two", 0.4), ("2", 0.3), ("three", 0.1)], ["two", "Two", "2"]) == pytest.approx(0.7)
