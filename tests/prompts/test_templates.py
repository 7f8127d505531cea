"""The template refiner: its gradient against enumeration, its penalty, and what it learns."""

import math
from copy import deepcopy
from itertools import product

import pytest
import torch

from flowrl.prompts import templates
from flowrl.prompts.records import PromptRecord
from flowrl.prompts.refiner import RefinerOptions, Wording
from flowrl.prompts.templates import SLOTS, TemplateRefiner, fill_in, k3, parts_of

PROMPT = PromptRecord(uid="a", text='a ring and a sign with the word "SALT and OIL", on top')
DRAWS = list(product(*map(range, SLOTS)))
UNEVEN = [[0.3, -0.2, 0.9, 0.0], [1.0, 0.1, -0.4, 0.2], [0.0, -1.1, 0.5, 0.25]]


def refiner_of(logits=None, **options) -> TemplateRefiner:
    refiner = TemplateRefiner(RefinerOptions(**options))
    for slot, row in zip(refiner.logits, logits or [], strict=bool(logits)):
        slot.copy_(torch.tensor(row))
    return refiner


def chance(refiner: TemplateRefiner, draw) -> float:
    return math.prod(slot[choice] for slot, choice in zip(refiner.chances(), draw, strict=True))


def reward(draw) -> float:
    return math.sin(1 + draw[0] + 5 * draw[1] + 25 * draw[2])


def gained(refiner: TemplateRefiner, kl_coef: float) -> float:
    """Expected reward less the KL to the uniform start, by enumeration."""
    chances = {draw: chance(refiner, draw) for draw in DRAWS}
    assert sum(chances.values()) == pytest.approx(1)
    kl = sum(p * math.log(p * len(DRAWS)) for p in chances.values())
    return sum(p * reward(draw) for draw, p in chances.items()) - kl_coef * kl


def test_the_gradient_is_that_of_the_expected_reward_by_enumeration(monkeypatch):
    monkeypatch.setattr(templates, "KL_COEF", 0.0)
    refiner = refiner_of(UNEVEN)
    expected = [[0.0] * size for size in SLOTS]
    for draw in DRAWS:
        rows = refiner.gradient([Wording(text="", draw=draw)], [reward(draw) - 0.7])
        p = chance(refiner, draw)
        expected = [
            [e - p * x for e, x in zip(*pair, strict=True)]
            for pair in zip(expected, rows, strict=True)
        ]
    for slot, row in enumerate(expected):
        for j, value in enumerate(row):
            sides = []
            for step in (1e-5, -1e-5):
                moved = refiner_of(UNEVEN)
                moved.logits[slot][j] += step
                sides.append(gained(moved, 0))
            assert value == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=1e-9)


def test_the_gradient_of_many_is_the_mean_and_the_penalty_is_that_of_k3(monkeypatch):
    monkeypatch.setattr(templates, "KL_COEF", 0.3)
    refiner, draws = refiner_of(UNEVEN), DRAWS[:5]
    wordings, advantages = [Wording(text="", draw=d) for d in draws], [1.0, -2.0, 0.5, 0.0, 0.0]
    found = refiner.gradient(wordings, advantages)

    def loss(moved: TemplateRefiner) -> float:
        terms = [
            0.3 * k3(moved.gap(d)) - a * math.log(chance(moved, d))
            for d, a in zip(draws, advantages, strict=True)
        ]
        return sum(terms) / len(terms)

    for slot, size in enumerate(SLOTS):
        for j in range(size):
            plus, minus = refiner_of(UNEVEN), refiner_of(UNEVEN)
            plus.logits[slot][j] += 1e-5
            minus.logits[slot][j] -= 1e-5
            slope = (loss(plus) - loss(minus)) / 2e-5
            assert found[slot][j] == pytest.approx(slope, abs=1e-8)


def test_k3_is_zero_at_the_start_never_negative_and_the_kl_in_expectation():
    start, later = refiner_of(), refiner_of(UNEVEN)
    assert all(k3(start.gap(draw)) == pytest.approx(0, abs=1e-15) for draw in DRAWS)
    assert all(k3(later.gap(draw)) >= 0 for draw in DRAWS)
    mean = sum(chance(later, draw) * k3(later.gap(draw)) for draw in DRAWS)
    kl = sum(chance(later, draw) * -later.gap(draw) for draw in DRAWS)
    assert mean == pytest.approx(kl) and kl > 0.1


def test_draws_follow_the_key_and_their_chances():
    refiner = refiner_of(UNEVEN)
    (row,) = refiner.propose([PROMPT], 4000, "key")
    assert row == refiner.propose([PROMPT], 4000, "key")[0]
    assert row != refiner.propose([PROMPT], 4000, "another")[0]
    for slot, chances in enumerate(refiner.chances()):
        for choice, p in enumerate(chances):
            share = sum(wording.draw[slot] == choice for wording in row) / len(row)
            assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / len(row)))


def test_forms_keep_every_part_and_what_is_in_quotes():
    assert parts_of(PROMPT.text) == ["a ring", 'a sign with the word "SALT and OIL"', "on top"]
    for draw in DRAWS:
        assert all(part in fill_in(PROMPT.text, draw) for part in parts_of(PROMPT.text))
    assert fill_in(PROMPT.text, (0, 0, 0)) == PROMPT.text == refiner_of().wording(PROMPT)


def test_the_wording_that_earns_more_is_learned_and_a_penalty_holds_it_back(monkeypatch):
    best, kl = (2, 1, 3), {}
    for kl_coef in (0.0, 5.0):
        monkeypatch.setattr(templates, "KL_COEF", kl_coef)
        refiner = refiner_of(lr=0.1)
        for iteration in range(100):
            (row,) = refiner.propose([PROMPT], 16, str(iteration))
            earned = [sum(a == b for a, b in zip(w.draw, best, strict=True)) for w in row]
            mean = sum(earned) / len(earned)
            kl[kl_coef] = refiner.learn(row, [e - mean for e in earned])["refiner/kl"]
        if not kl_coef:
            assert refiner.wording(PROMPT) == fill_in(PROMPT.text, best)
            assert chance(refiner, best) > 0.9
    assert kl[5.0] < 0.1 < 1 < kl[0.0]


def test_a_state_goes_on_bit_for_bit():
    whole, half = refiner_of(), refiner_of()
    for iteration in range(4):
        if iteration == 2:
            half.load_state_dict(deepcopy(whole.state_dict()))
        (row,) = whole.propose([PROMPT], 6, str(iteration))
        for refiner in (whole, half)[: 1 + (iteration > 1)]:
            refiner.learn(row, [reward(wording.draw) for wording in row])
    assert half.chances() == whole.chances() != refiner_of().chances()
