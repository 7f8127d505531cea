import pytest
import torch
from gaussian_flow import f64
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.objectives.gdro import best_error, lair_loss, suffix_loss, top1_loss

F64 = torch.float64


def gradient(loss, at: torch.Tensor) -> torch.Tensor:
    at = at.clone().requires_grad_()
    return torch.autograd.grad(loss(at).sum(), at)[0]


def plainly(s, reward, group, tau, key) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 7, and its gradient, group by group and suffix by suffix."""
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


@st.composite
def lists(draw):
    size = draw(st.integers(1, 9))
    s = torch.tensor(draw(st.lists(st.floats(-2, 2), min_size=size, max_size=size)), dtype=F64)
    group = draw(st.lists(st.sampled_from([0, 3, -1]), min_size=size, max_size=size))
    key = torch.tensor(draw(st.permutations(range(size)))).double()
    reward = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
    return s, reward.double() / 4, torch.tensor(group), key


@given(case=lists(), tau=st.sampled_from([0.0, 0.05, 0.5]))
def test_both_forms_and_their_coefficients_are_those_of_the_formulas(case, tau):
    s, reward, group, key = case
    value, slope = plainly(s, reward, group, tau, key)
    near = {"rtol": 1e-10, "atol": 1e-10}
    assert_close(suffix_loss(s, reward, group, tau, key), value, **near)
    assert_close(gradient(lambda x: suffix_loss(x, reward, group, tau, key), s), slope, **near)
    for name in group.unique():
        rows = group == name
        best = (reward[rows] == reward[rows].max()).double()
        q = (reward[rows] / tau).softmax(0) if tau else best / best.sum()
        value[rows] = s[rows].logsumexp(0) - (q * s[rows]).sum()
        slope[rows] = rows.sum() * (s[rows].softmax(0) - q)
    near = {"rtol": 1e-10, "atol": 1e-10 if tau else 1e-6}  # the shared target is in fp32
    assert_close(top1_loss(s, reward, group, tau), value, **near)
    assert_close(gradient(lambda x: top1_loss(x, reward, group, tau), s), slope, **near)


def test_the_regulariser_is_the_error_of_the_best_image():
    group, err = torch.tensor([6, 2, 6, 6, 2, 6]), f64(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    reward = f64(0.1, 0.9, 0.7, 0.7, 0.2, 0.5)
    assert_close(best_error(err, reward, group), f64(0.35, 0.2, 0.35, 0.35, 0.2, 0.35))
    slope = gradient(lambda e: best_error(e, reward, group) / torch.tensor([4, 2, 4, 4, 2, 4]), err)
    assert_close(slope, f64(0.0, 1.0, 0.5, 0.5, 0.0, 0.0))
    with pytest.raises(ValueError, match="rewards"):
        top1_loss(err, reward * torch.nan, group, 0.3)


def test_lair_has_its_least_at_the_advantage():
    advantage = f64(1.0, -2.0)
    loss = lambda s: lair_loss(s, advantage)  # noqa: E731
    assert_close(loss(f64(0.5, 0.5)), f64(-0.5 + 0.125, 1.0 + 0.125))
    assert_close(gradient(loss, advantage), f64(0.0, 0.0), rtol=0, atol=1e-12)
