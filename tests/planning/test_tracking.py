import gc

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flowrl.planning.activations import BLOCK, MemoryCounter, nbytes


def test_a_multilayer_perceptron_is_counted_as_by_hand():
    """Two layers without bias, of 8 rows: 32 -> 64 -> 16, with a ReLU in between, fp32."""
    first, second = nn.Linear(32, 64, bias=False), nn.Linear(64, 16, bias=False)
    x = torch.randn(8, 32)
    with MemoryCounter([x, first.weight, second.weight], block=1) as count:
        hidden = torch.relu(first(x))  # the product is gone once the ReLU has its result
        assert count.live == 8 * 64 * 4
        assert count.peak == 2 * 8 * 64 * 4
        y = second(hidden)
        assert count.live == 8 * 64 * 4 + 8 * 16 * 4
        loss = y.sum()
        assert count.live == 8 * 64 * 4 + 8 * 16 * 4 + 4
        loss.backward()
    grads = nbytes(p.grad for p in (first.weight, second.weight) if p.grad is not None)
    assert grads == 4 * (32 * 64 + 64 * 16)
    assert count.live == 8 * 64 * 4 + 8 * 16 * 4 + 4 + grads
    # Backward is widest while the second weight's gradient, that of the hidden layer and its
    # masked copy are there beside what forward has kept.
    kept = 8 * 64 * 4 + 8 * 16 * 4 + 4
    assert count.peak >= kept + 4 * 64 * 16 + 2 * 8 * 64 * 4


def test_views_changes_in_place_and_tensors_from_outside_take_nothing():
    outside = torch.zeros(100)
    with MemoryCounter([outside], block=1) as count:
        outside.t().add_(1)
        x = torch.zeros(10)
        x.view(2, 5).t().add_(1)
        x[2:].mul_(2)
    assert count.peak == count.live == 40


def test_what_is_dropped_is_counted_no_more_but_stays_in_the_peak():
    with MemoryCounter(block=1) as count:
        x = torch.zeros(100)
        view = x[:1]
        del x
        gc.collect()
        assert count.live == 400  # a view holds all of it
        del view
        gc.collect()
        assert count.live == 0
    assert count.peak == 400


def test_each_region_has_a_peak_of_its_own_and_a_kernels_own_memory_is_in_it_alone():
    kernels = {torch.ops.aten.mul.Tensor: lambda args, out: 1000}
    with MemoryCounter(block=1, kernels=kernels) as count:
        count.enter("a")
        x = torch.zeros(100)
        del x
        count.enter("b")
        x = torch.zeros(10)
        y = x * x
    assert count.peaks == {"a": 400, "b": 1080} and count.live == 80 and y.shape == x.shape


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8))
def test_sizes_are_rounded_up_to_the_allocators_blocks(sizes):
    with MemoryCounter() as count:
        held = [torch.empty(n, dtype=torch.uint8) for n in sizes]
    assert count.live == sum(-(-n // BLOCK) * BLOCK for n in sizes)
    assert len(held) == len(sizes)
