import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.objectives.spo import softmax_gap, spo_loss

F64 = torch.float64
numbers = st.floats(-3, 3)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


@given(best=numbers, worst=numbers, tau=st.floats(0.05, 5))
def test_the_gap_is_the_difference_of_the_softmax_of_the_two(best, worst, tau):
    probabilities = (f64(best, worst) / tau).softmax(0)
    gap = softmax_gap(f64(best), f64(worst), tau)
    assert_close(gap, (probabilities[0] - probabilities[1])[None], rtol=1e-9, atol=1e-12)


@given(
    w=st.floats(-0.5, 0.5),
    l=st.floats(-0.5, 0.5),
    beta=st.floats(0.1, 50),
    clip=st.floats(0.01, 0.9),
)
def test_the_loss_is_the_published_formula(w, l, beta, clip):  # noqa: E741
    clipped = f64(w, l).exp().clamp(1 - clip, 1 + clip).log()
    expected = -torch.sigmoid(beta * clipped[0] - beta * clipped[1]).log()
    loss = spo_loss(f64(w), f64(l), logratio_beta=beta, clip=clip)
    assert_close(loss[0], expected, rtol=1e-9, atol=1e-12)


def test_a_ratio_outside_the_clip_has_no_gradient_on_either_side():
    for sign in [1, -1]:
        w, l = f64(sign * 0.2, 0.01).requires_grad_(), f64(0.02, sign * 0.2).requires_grad_()  # noqa: E741
        loss = spo_loss(w, l, logratio_beta=10.0, clip=0.1)
        of_w, of_l = torch.autograd.grad(loss.sum(), (w, l))
        assert of_w[0] == 0 and of_l[1] == 0 and of_w[1] < 0 < of_l[0]


def test_ratios_of_a_millionth_are_told_apart_in_fp32():
    w = torch.tensor([1e-7, 2e-7], requires_grad=True)
    loss = spo_loss(w, torch.zeros(2), logratio_beta=1e6, clip=0.1)
    expected = torch.nn.functional.softplus(torch.tensor([-0.1, -0.2]))
    assert_close(loss.detach(), expected, rtol=1e-6, atol=0)
