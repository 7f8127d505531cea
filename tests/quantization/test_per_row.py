"""A row's result depends on the row alone, and is as good as the backend's."""

import pytest
import torch

from flowrl.quantization.backends import (
    NVFP4Emulated,
    PerRow,
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


def test_a_row_does_not_depend_on_the_rows_beside_it(rows, weight):
    for dtype in [torch.float32, torch.bfloat16]:
        rows, plain, backend = rows.to(dtype), NVFP4Emulated(), PerRow(NVFP4Emulated())
        state = backend.pack(weight)
        for part in (rows[:6], rows[3:9]):
            place = (rows == part[:1]).all(1).nonzero().item()
            whole = backend.matmul(rows, state)[place : place + 6]
            assert torch.equal(backend.matmul(part, state), whole)
            assert not torch.equal(plain.matmul(part, state), plain.matmul(rows, state)[place:][:6])
