"""The layout of block scales that cuBLAS reads: a bijection, and undone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.quantization.formats.nvfp4 import swizzle, unswizzle

rows, columns = st.integers(1, 300), st.integers(1, 23)


def numbered(height: int, width: int, period: int) -> torch.Tensor:
    return (torch.arange(height * width).view(height, width) % period).to(torch.uint8)


def offset(r: int, c: int, width: int) -> int:
    tile = (r // 128) * -(-width // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


@given(rows, columns)
def test_every_scale_is_at_its_offset_and_the_padding_is_zero(height, width):
    scale = numbered(height, width, 255) + 1
    flat = swizzle(scale)
    at = torch.tensor([[offset(r, c, width) for c in range(width)] for r in range(height)])
    assert torch.equal(flat[at], scale)
    flat[at] = 0
    assert not flat.any()


@given(rows, columns)
def test_unswizzling_undoes_it_whatever_the_padding(height, width):
    scale = numbered(height, width, 127).view(torch.float8_e4m3fn)
    flat = swizzle(scale)
    assert flat.dtype == scale.dtype and flat.numel() % 512 == 0
    back = unswizzle(flat, height, width)
    assert back.dtype == scale.dtype
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))
