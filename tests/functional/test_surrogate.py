import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl.functional.gaussian import latent_kl, log_ratio, ratio_norm
from flowrl.functional.sde import KERNELS
from flowrl.objectives.grpo import GRPO, clipped_surrogate
from flowrl.objectives.tree_credit import TreeCredit

F64 = torch.float64


def vectors(elements):
    return st.lists(elements, min_size=6, max_size=6).map(lambda v: torch.tensor(v, dtype=F64))


@given(
    log_r=vectors(st.floats(-1, 1)),
    advantage=vectors(st.floats(-5, 5)),
    low=st.floats(1e-6, 0.5),
    high=st.floats(1e-6, 0.5),
)
def test_loss_is_the_pessimistic_bound(log_r, advantage, low, high):
    r = log_r.exp()
    expected = torch.maximum(-r * advantage, -r.clamp(1 - low, 1 + high) * advantage)
    loss, _ = clipped_surrogate(log_r, advantage, low, high)
    assert_close(loss, expected, rtol=0, atol=1e-12)


def test_only_changes_for_the_better_are_clipped():
    log_r = torch.tensor([0.2, -0.2, 0.2, -0.2, 0.05, 0.2], dtype=F64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 0.0], dtype=F64)
    _, clipped = clipped_surrogate(log_r, advantage, 0.1, 0.1)
    assert clipped.tolist() == [True, False, False, True, False, False]


def test_clipped_rows_have_no_gradient_and_others_that_of_the_ratio():
    log_r = torch.tensor([0.2, -0.2, 0.2, -0.2, 0.05], dtype=F64, requires_grad=True)
    advantage = torch.tensor([1.5, 1.0, -1.0, -1.0, 2.0], dtype=F64)
    loss, clipped = clipped_surrogate(log_r, advantage, 0.1, 0.1)
    loss.sum().backward()
    expected = torch.where(clipped, 0.0, -advantage * log_r.exp()).detach()
    assert log_r.grad is not None
    assert_close(log_r.grad, expected, rtol=1e-12, atol=0)


def test_the_two_sides_have_their_own_range():
    log_r = torch.tensor([0.15, -0.15]).log1p()
    _, clipped = clipped_surrogate(log_r, torch.tensor([1.0, -1.0]), 0.1, 0.2)
    assert clipped.tolist() == [False, True]


def test_a_published_range_of_a_millionth_is_resolved_in_fp32():
    log_r = torch.tensor([0.999e-6, 1.001e-6])
    _, clipped = clipped_surrogate(log_r, torch.ones(2), 1e-6, 1e-6)
    assert clipped.tolist() == [False, True]


def test_ranges_may_differ_by_row():
    clip = torch.tensor([0.1, 0.3])
    _, clipped = clipped_surrogate(torch.full((2,), 0.2), torch.ones(2), clip, clip)
    assert clipped.tolist() == [True, False]


@given(seed=st.integers(0, 2**31), std=st.floats(0.05, 2))
def test_a_range_in_nats_means_the_same_for_every_kind_of_ratio(seed, std):
    x, mean, mean_old = torch.randn(
        3, 1, 4, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(seed)
    )
    std, size = torch.tensor([std], dtype=F64), x[0].numel()
    nats = log_ratio(x, mean, mean_old, std).item() * size
    shifted = nats + latent_kl(mean, mean_old, std).item() * size
    edge = torch.tensor([clip("gaussian", nats, size, std)], dtype=F64)
    assert_close(log_ratio(x, mean, mean_old, std), edge, rtol=1e-10, atol=1e-12)
    normed = clip("normalised", shifted, size, std)
    assert_close(ratio_norm(x, mean, mean_old, std), normed, rtol=1e-10, atol=1e-12)


def clip(ratio, nats, size, std):
    kernel, credit = KERNELS["flow_sde"], TreeCredit()
    return GRPO(kernel=kernel, credit=credit, ratio=ratio, clip_nats=nats).clip(size, std)
