import functools
import math

import pytest
import torch
from chat_servers import Scripted, completion, images_of, redness, refusal
from flowrl_rewards.pairwise import PairwiseWinRate, chosen_pairs, verdict, win_rates
from hypothesis import given
from hypothesis import strategies as st

SHADES = [0.9, 0.1, 0.5, 0.7]  # of red; the rest is blue
IMAGES = torch.tensor([[s, 0, 1 - s] for s in SHADES])[:, :, None, None].expand(-1, 3, 8, 8)


def redder(body, taste=0.0):
    """P(1) grows with the redness of the first image against the second."""
    first, second = (redness(image) for image in images_of(body))
    one = 1 / (1 + math.exp(-8 * (first - second) - taste))
    return completion("", {"1": one, "2": 1 - one})


def compared(script, images=IMAGES, **args):
    with Scripted(script) as server:
        made = PairwiseWinRate({"model": "m", "base_url": server.url}, **args)
        rates, reasons = made(images, ["red"] * len(images), [{}] * len(images))
    return rates, reasons, len(server.asked)


@given(st.permutations(range(6)))
def test_with_a_strict_order_the_rate_is_the_share_of_images_below(order):
    wins = {(i, j): float(order[i] > order[j]) for i, j in chosen_pairs(6)}
    assert win_rates(6, wins) == [pytest.approx(place / 5) for place in order]


@given(st.integers(2, 30), st.integers(1, 30))
def test_every_image_meets_as_many_others_and_at_least_the_wanted(count, rivals):
    pairs = chosen_pairs(count, rivals)
    assert pairs == chosen_pairs(count, rivals)
    assert len(set(pairs)) == len(pairs) and all(0 <= i < j < count for i, j in pairs)
    met = [sum(i in pair for pair in pairs) for i in range(count)]
    assert len(set(met)) == 1
    assert min(rivals, count - 1) <= met[0] <= rivals + 1


def test_the_preferred_image_wins_more_often_and_fewer_rivals_cost_fewer_questions():
    rates, reasons, asked = compared(redder)
    assert sorted(SHADES) == [s for _, s in sorted(zip(rates, SHADES, strict=True))]
    assert sum(rates) == pytest.approx(2) and not reasons
    assert asked == 12 and compared(redder, rivals=2)[2] == 8


def test_a_liking_for_one_place_cancels_and_is_measured():
    same = IMAGES[:1].expand(3, -1, -1, -1) + torch.tensor([0, 1e-2, 2e-2])[:, None, None, None]
    for taste in (-3.0, 3.0):
        script = functools.partial(redder, taste=taste)
        assert compared(script, same)[0] == [pytest.approx(0.5, abs=0.02)] * 3
        with Scripted(script) as server:
            judge = PairwiseWinRate({"model": "m", "base_url": server.url})
            assert math.isnan(judge.place_bias)
            judge(IMAGES[:1].expand(3, -1, -1, -1), ["red"] * 3, [{}] * 3)
        assert judge.place_bias == pytest.approx(1 / (1 + math.exp(-taste)), abs=1e-6)


def test_a_lost_comparison_is_left_out_and_an_image_without_any_is_missing():
    def script(body):
        blue = min(redness(image) for image in images_of(body)) < 0.2
        return refusal(400) if blue else redder(body)

    rates, reasons, _ = compared(script)
    assert math.isnan(rates[1]) and sum(r for r in rates if r == r) == pytest.approx(1.5)
    assert list(reasons) == [1] and "answered 400" in reasons[1]


def test_verdicts_in_words_count_as_whole_wins_and_none_is_missing():
    def script(body):
        first, second = (redness(image) for image in images_of(body))
        place = 1 if first > second else 2
        return completion(f"Image 2 is better? no: <answer>Image {place} is better</answer>")

    rates, _, _ = compared(script, mode="text")
    assert rates == [1.0, 0.0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    with pytest.raises(ValueError, match="which image is better"):
        verdict("both are fine")
    rates, reasons, _ = compared(lambda body: completion("both are fine"), mode="text")
    assert all(map(math.isnan, rates)) and set(reasons) == set(range(4))
