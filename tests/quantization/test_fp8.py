"""E4M3 with a scale per row: rounding, scales, and the product on a CPU."""

import numpy as np
import pytest
import torch

from flowrl.quantization.formats import fp8

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the reference for E4M3")

ALL_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


def points() -> torch.Tensor:
    """All bfloat16 numbers, and all mid-points of E4M3 with their neighbours."""
    values = CODES[~CODES.isnan()].double().unique()
    middle = ((values[1:] + values[:-1]) / 2).float()
    beside = [torch.nextafter(middle, torch.tensor(to)) for to in (-torch.inf, torch.inf)]
    return torch.cat(
        [ALL_BF16[~ALL_BF16.isnan()], middle, *beside, torch.linspace(-500, 500, 9999)]
    )


def test_the_clamped_cast_is_that_of_ml_dtypes_bit_for_bit():
    x = points()
    expected = np.clip(x.numpy(), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert torch.equal(fp8.to_e4m3(x).view(torch.uint8), torch.from_numpy(expected))
    assert fp8.to_e4m3(torch.tensor([torch.nan])).float().isnan().all()


def test_rows_of_zeros_stay_and_rows_that_are_not_finite_are_nan_alone():
    x = torch.ones(4, 16)
    x[0], x[1, 3], x[2, 5] = 0, torch.nan, -torch.inf
    codes, scale = fp8.quantise_rowwise(x)
    assert codes.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert codes.shape == x.shape and scale.shape == (len(x), 1)
    fake = codes.float() * scale
    assert fake[0].eq(0).all() and fake[1:3].isnan().all() and fake[3].eq(1).all()


def test_codes_and_scales_are_those_of_the_diffusers_quantiser():
    bfl = pytest.importorskip("diffusers.quantizers.bfl.utils", reason="newer diffusers only")
    w = torch.randn(64, 96, generator=torch.Generator().manual_seed(4))
    codes, scale = fp8.quantise_rowwise(w)
    theirs, their_scale = bfl.quantize_fp8r(w)
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(scale.squeeze(1), their_scale)
