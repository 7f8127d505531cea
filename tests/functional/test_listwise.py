import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from worlds import F64, f64

from flowrl.objectives.dpo import dpo_loss
from flowrl.objectives.gdro import best_error, lair_loss, suffix_loss, top1_loss
from flowrl.objectives.noising import implicit_reward

TAU = 0.3
REWARD = f64(0.1, 0.9, 0.4, 0.7, 0.2, 0.5)
GROUP = torch.tensor([6, 2, 6, 6, 2, 6])  # one of four rows, one of two
S = f64(0.3, -0.2, 0.8, -0.5, 0.4, 0.1)
KEY = f64(5.0, 3.0, 1.0, 0.0, 4.0, 2.0)
ONE = torch.zeros(4).long()


def gradient(loss, at: torch.Tensor) -> torch.Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(loss(at).sum(), at)[0]


def plainly(s, reward, group, tau, key) -> tuple[torch.Tensor, torch.Tensor]:
    """The full loss and its gradient in s, row by row as the formula reads."""
    loss, slope = torch.zeros_like(s), torch.zeros_like(s)
    for name in group.unique().tolist():
        rows = [i for i in range(len(s)) if group[i] == name]
        rows.sort(key=lambda i: (-reward[i].item(), -key[i].item()))
        for i in range(len(rows) - 1):
            tail = rows[i:]
            q = (reward[tail] / tau).softmax(0) if tau else torch.eye(len(tail), dtype=F64)[0]
            loss[rows] += s[tail].logsumexp(0) - (q * s[tail]).sum()
            slope[tail] += len(rows) * (s[tail].softmax(0) - q)  # the loss stands in every row
    return loss, slope


def by_key(s, reward, group, tau):
    return suffix_loss(s, reward, group, tau, KEY)


soft = pytest.mark.parametrize("loss", [by_key, top1_loss])


@st.composite
def lists(draw):
    size = draw(st.integers(1, 9))
    s = torch.tensor(draw(st.lists(st.floats(-2, 2), min_size=size, max_size=size)), dtype=F64)
    group = draw(st.lists(st.sampled_from([0, 3, -1]), min_size=size, max_size=size))
    key = torch.tensor(draw(st.permutations(range(size)))).double()
    reward = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    return s, reward.double() / 4, torch.tensor(group), key


@given(case=lists(), tau=st.sampled_from([0.0, 0.05, 0.5]))
def test_the_full_loss_and_its_coefficients_are_those_of_the_formula(case, tau):
    s, reward, group, key = case
    value, slope = plainly(s, reward, group, tau, key)
    assert_close(suffix_loss(s, reward, group, tau, key), value, rtol=1e-10, atol=1e-10)
    actual = gradient(lambda x: suffix_loss(x, reward, group, tau, key), s)
    assert_close(actual, slope, rtol=1e-10, atol=1e-10)


def test_at_the_reference_the_full_loss_is_log_factorial_and_top1_log_of_the_size():
    zero = torch.zeros(6, dtype=F64)
    size = torch.where(GROUP == 6, 4.0, 2.0).double()
    for tau in (0.0, TAU):
        full = suffix_loss(zero, REWARD, GROUP, tau, KEY)
        assert_close(full, (size + 1).lgamma())
        assert_close(top1_loss(zero, REWARD, GROUP, tau), size.log())


@soft
def test_gradients_sum_to_zero_over_each_group_and_a_constant_of_the_group_changes_nothing(loss):
    slope = gradient(lambda s: loss(s, REWARD, GROUP, TAU), S)
    assert abs(slope[GROUP == 6].sum()) < 1e-12 and abs(slope[GROUP == 2].sum()) < 1e-12
    assert slope.abs().max() > 0.1
    constant = torch.where(GROUP == 6, 3.0, -7.0).double()
    before = loss(S, REWARD, GROUP, TAU)
    assert_close(loss(S + constant, REWARD, GROUP, TAU), before, rtol=1e-10, atol=1e-12)
    assert_close(loss(S, REWARD + constant, GROUP, TAU), before, rtol=1e-10, atol=1e-12)


def test_matched_rewards_have_no_gradient_and_the_entropies_as_value():
    s = REWARD / TAU + torch.where(GROUP == 6, 2.0, -1.0).double()
    full, top1 = (gradient(lambda x, f=f: f(x, REWARD, GROUP, TAU), s) for f in (by_key, top1_loss))
    assert_close(full, torch.zeros_like(s), rtol=0, atol=1e-12)
    assert_close(top1, torch.zeros_like(s), rtol=0, atol=1e-12)
    ranked = REWARD[GROUP == 6].sort(descending=True).values / TAU
    entropies = [torch.distributions.Categorical(logits=ranked[i:]).entropy() for i in range(4)]
    value = suffix_loss(s, REWARD, GROUP, TAU, KEY)[0]
    assert_close(value, torch.stack(entropies).sum())
    assert_close(top1_loss(s, REWARD, GROUP, TAU)[0], entropies[0])


def test_for_pairs_the_hard_limit_is_dpo_with_twice_the_implicit_beta():
    err, err_ref, beta = f64(0.30, 0.42), f64(0.33, 0.40), 12.0
    s, reward, pair = implicit_reward(err, err_ref, beta), f64(0.2, 0.6), torch.zeros(2).long()
    delta = err - err_ref
    expected = dpo_loss(delta[1:], delta[:1], 2 * beta).expand(2)
    for tau in (0.0, 1e-3):
        assert_close(suffix_loss(s, reward, pair, tau, s), expected, rtol=1e-12, atol=0)
        assert_close(top1_loss(s, reward, pair, tau), expected, rtol=1e-12, atol=0)
    assert abs(suffix_loss(s, reward, pair, 0.5, s)[0] - expected[0]) > 0.05


def test_a_falling_temperature_tends_to_the_hard_ranking():
    hard = suffix_loss(S, REWARD, GROUP, 0.0, KEY)
    away = [(suffix_loss(S, REWARD, GROUP, tau, KEY) - hard).abs().max() for tau in (0.1, 0.02)]
    assert away[1] < 1e-2 < away[0]


def test_hard_rankings_are_the_probabilities_of_plackett_and_luce():
    """Drawing one after the other without replacement; over all rankings they sum to 1."""
    s, total = S[:4], 0.0
    for ranking in itertools.permutations(range(4)):
        reward = torch.empty(4, dtype=F64)
        reward[list(ranking)] = f64(4.0, 3.0, 2.0, 1.0)
        p, left = 1.0, s.exp().sum().item()
        for i in ranking:
            p, left = p * s[i].exp().item() / left, left - s[i].exp().item()
        loss = suffix_loss(s, reward, ONE, 0.0, KEY[:4])
        assert_close(loss, torch.full_like(loss, -math.log(p)))
        total += math.exp(-loss[0])
    assert total == pytest.approx(1, abs=1e-12)


def test_the_order_of_rows_does_not_matter():
    order = torch.tensor([5, 0, 4, 2, 1, 3])
    moved = suffix_loss(S[order], REWARD[order], GROUP[order], TAU, KEY[order])
    assert_close(moved, suffix_loss(S, REWARD, GROUP, TAU, KEY)[order])


def test_ties_are_ranked_by_the_key_in_the_full_loss_and_not_at_all_in_top1():
    reward = f64(0.5, 0.5, 0.5, 0.1)
    swapped = KEY[[2, 1, 0, 3]]
    for tau in (0.0, TAU):
        one, other = (suffix_loss(S[:4], reward, ONE, tau, k) for k in (KEY[:4], swapped))
        assert abs(one[0] - other[0]) > 1e-2
        mirrored = suffix_loss(S[[2, 1, 0, 3]], reward, ONE, tau, KEY[:4])
        assert_close(mirrored, other)
        before, after = (top1_loss(s, reward, ONE, tau) for s in (S[:4], S[[2, 1, 0, 3]]))
        assert_close(before, after)


@soft
def test_a_tied_group_has_no_gradient_at_the_reference_and_is_pulled_together_away_from_it(loss):
    tied, reference = torch.full((6,), 0.7, dtype=F64), torch.zeros(6, dtype=F64)
    at_reference = gradient(lambda s: loss(s, tied, GROUP, TAU), reference)
    assert_close(at_reference, reference, rtol=0, atol=1e-12)
    slope = gradient(lambda s: loss(s, tied, GROUP, TAU), S)
    assert slope[S.argmax()] > 0 > slope[S.argmin()]


def test_a_group_of_one_teaches_nothing():
    one = torch.tensor([0])
    for tau in (0.0, TAU):
        loss = suffix_loss(f64(0.4), f64(1.0), one, tau, f64(0.0))
        assert loss.item() == 0 and top1_loss(f64(0.4), f64(1.0), one, tau).item() == 0


def test_the_hard_top1_target_is_shared_by_all_best():
    reward = f64(0.5, 0.2, 0.5, 0.1)
    expected = S[:4].logsumexp(0) - (S[0] + S[2]) / 2
    assert_close(top1_loss(S[:4], reward, ONE, 0.0), expected.expand(4))


def test_the_regulariser_is_the_error_of_the_best_image():
    err = f64(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    reward = f64(0.1, 0.9, 0.7, 0.7, 0.2, 0.5)
    assert_close(best_error(err, reward, GROUP), f64(0.35, 0.2, 0.35, 0.35, 0.2, 0.35))
    slope = gradient(lambda e: best_error(e, reward, GROUP) / torch.tensor([4, 2, 4, 4, 2, 4]), err)
    assert_close(slope, f64(0.0, 1.0, 0.5, 0.5, 0.0, 0.0))


def test_lair_has_its_least_at_the_advantage_over_kappa():
    advantage, kappa = f64(1.0, -2.0), 0.4
    loss = lambda s: lair_loss(s, advantage, kappa)  # noqa: E731
    assert_close(loss(f64(0.5, 0.5)), f64(-0.5 + 0.05, 1.0 + 0.05))
    assert_close(gradient(loss, advantage / kappa), f64(0.0, 0.0), rtol=0, atol=1e-12)
    assert_close(gradient(loss, f64(0.0, 0.0)), -advantage)


@soft
def test_a_negative_temperature_and_missing_rewards_are_refused(loss):
    with pytest.raises(ValueError, match="tau is -0.1; it must be positive, or 0"):
        loss(S, REWARD, GROUP, -0.1)
    with pytest.raises(ValueError, match="6 of 6 rewards are not finite"):
        loss(S, REWARD * torch.nan, GROUP, TAU)
