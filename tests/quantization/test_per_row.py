"""A row's result depends on the row alone, and is as good as the backend's."""

import pytest
import torch

from flowrl.quantization.backends import (
    FP8Dequantised,
    FP8Rowwise,
    NVFP4Emulated,
    NVFP4Native,
    PerRow,
    Plain,
)

OUT, IN = 48, 64


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-3, 3, 12)[:, None]
    return torch.randn(12, IN, generator=generator) * size


@pytest.fixture
def weight():
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1))


def relative(y, expected):
    return ((y - expected).norm(dim=1) / expected.norm(dim=1)).tolist()


def test_a_row_does_not_depend_on_the_rows_beside_it(rows, weight):
    for dtype in [torch.float32, torch.bfloat16]:
        rows, plain, backend = rows.to(dtype), NVFP4Emulated(), PerRow(NVFP4Emulated())
        state = backend.pack(weight)
        for part in (rows[:6], rows[3:9]):
            place = (rows == part[:1]).all(1).nonzero().item()
            whole = backend.matmul(rows, state)[place : place + 6]
            assert torch.equal(backend.matmul(part, state), whole)
            assert not torch.equal(plain.matmul(part, state), plain.matmul(rows, state)[place:][:6])


def test_small_rows_keep_their_precision_beside_large_ones(rows, weight):
    state, expected = NVFP4Emulated().pack(weight), rows @ weight.T
    alone = relative(PerRow(NVFP4Emulated()).matmul(rows, state), expected)
    together = relative(NVFP4Emulated().matmul(rows, state), expected)
    assert max(alone) < 0.25 < max(together)


def test_rows_of_zeros_and_powers_of_two_are_exact(weight):
    state = NVFP4Emulated().pack(weight)
    x = torch.zeros(3, IN)
    x[1:, 5] = torch.tensor([1.0, 2.0**-40])
    y = PerRow(NVFP4Emulated()).matmul(x, state, torch.ones(OUT))
    assert torch.equal(y[0], torch.ones(OUT))
    assert torch.equal(y[2], y[1] * 0 + 1), "2^-40 of a weight is lost beside a bias of 1"
    without = PerRow(NVFP4Emulated()).matmul(x, state)
    assert torch.equal(without[2], without[1] * 2.0**-40)


def test_it_is_checked_against_the_reference_of_what_it_wraps():
    assert PerRow(NVFP4Native()).reference == PerRow(NVFP4Emulated())
    assert PerRow(NVFP4Emulated()).reference is None
    assert PerRow(Plain(torch.float32)).reference is None
    assert PerRow(FP8Rowwise()).reference == PerRow(FP8Dequantised())
