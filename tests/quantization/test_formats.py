"""Number formats: codes against ml_dtypes, torchao and diffusers, and what is not finite."""

import warnings

import numpy as np
import pytest
import torch
from software_nvfp4 import randn

from flowrl.quantization.formats import e2m1, fp8, nvfp4

ml_dtypes = pytest.importorskip("ml_dtypes", reason="it is the reference for E2M1 and E4M3")

# --- E2M1 ----------------------------------------------------------------------------------------


VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ALL_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


def test_codes_of_every_bfloat16_number_are_those_of_ml_dtypes():
    x = ALL_BF16[~ALL_BF16.isnan()]
    assert len(x) == 2**16 - 2 * 127
    clipped = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert torch.equal(e2m1.encode(x), torch.from_numpy(clipped.view(np.uint8) & 15))


def test_rounding_is_decoding_the_code_bit_for_bit_with_the_sign_of_zero():
    x = torch.cat([ALL_BF16[~ALL_BF16.isnan()], torch.linspace(-7, 7, 100_001)])
    rounded, decoded = e2m1.round_e2m1_(x.clone()), e2m1.decode(e2m1.encode(x))
    assert torch.equal(rounded.view(torch.int32), decoded.view(torch.int32))
    assert torch.signbit(e2m1.round_e2m1_(torch.tensor([-0.1, -0.0, 0.1]))).tolist() == [1, 1, 0]


def test_codes_decode_to_the_sixteen_values():
    codes = torch.arange(16, dtype=torch.uint8)
    decoded = e2m1.decode(codes)
    assert decoded.tolist() == VALUES + [-v for v in VALUES]
    assert torch.signbit(decoded).tolist() == [False] * 8 + [True] * 8
    stored = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(decoded.numpy(), stored)


def test_infinities_saturate_and_nan_is_six_as_a_code_and_nan_as_a_number():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan])
    assert e2m1.encode(x).tolist() == [7, 15, 7, 7]
    rounded = e2m1.round_e2m1_(x)
    assert rounded[:2].tolist() == [6.0, -6.0] and rounded[2:].isnan().all()


def test_every_pair_of_codes_survives_packing_with_the_first_in_the_low_bits():
    codes = torch.cartesian_prod(*2 * [torch.arange(16, dtype=torch.uint8)]).view(16, 32)
    packed = e2m1.pack(codes)
    assert packed.shape == (16, 16) and len(packed.unique()) == 256
    assert torch.equal(e2m1.unpack(packed), codes)
    assert e2m1.pack(torch.tensor([[1, 10]], dtype=torch.uint8)).tolist() == [[10 * 16 + 1]]


# --- E4M3 with a scale a row ---------------------------------------------------------------------


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


# --- NVFP4 ---------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
F = np.float32


def uneven(seed: int = 0) -> torch.Tensor:
    """Rows of many sizes with zero, constant, tiny and outlying blocks. (64, 96)"""
    x = randn(64, 96, seed=seed) * torch.logspace(-6, 1, 64)[:, None]
    x[3, :16], x[4, 16:32], x[5, 40], x[6, :16] = 0, -0.75, 300.0, -1e-9
    return x


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def reference(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes, scales and global scale in torchao's order of operations, in numpy float32."""
    rows = x.float().numpy().reshape(x.shape[0], -1, 16)
    g = np.abs(rows).max() / F(448 * 6)
    scale = np.clip(np.abs(rows).max(-1) / F(6) / g, F(2**-6), F(448))
    scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(F)
    steps = np.clip(rows * ((F(1) / g) / scale)[..., None], -6, 6)
    codes = steps.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return torch.from_numpy(codes.reshape(x.shape)), torch.from_numpy(scale), torch.tensor(g)


def test_codes_and_scales_are_those_of_torchaos_order_in_numpy():
    for seed, dtype in enumerate(DTYPES):
        x = uneven(seed).to(dtype)
        q = nvfp4.quantise(x)
        codes, scale, g = reference(x)
        assert torch.equal(q.global_scale, g)
        assert torch.equal(q.scale.float(), scale)
        assert torch.equal(q.codes, codes)
    assert q.scale.float().min() == 2**-6 and not q.codes[3, :16].any()


def test_the_tensor_of_torchao_is_equal_bit_for_bit():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = "torchao has the reference of its own order"
        name = "torchao.prototype.mx_formats.nvfp4_tensor"
        torchao = pytest.importorskip(name, reason=reason)
    for dtype in DTYPES[:2]:
        x = uneven(2).to(dtype)
        g = torchao.per_tensor_amax_to_scale(x.abs().amax())
        theirs = torchao.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=g)
        q = nvfp4.quantise(x)
        assert q.global_scale == g and torch.equal(bits(q.scale), bits(theirs.scale))
        assert torch.equal(e2m1.pack(q.codes), theirs.qdata.view(torch.uint8))
        assert torch.equal(bits(nvfp4.dequantise(q)), bits(theirs.dequantize(torch.float32)))


def test_the_fake_numbers_are_those_of_the_codes_bit_for_bit():
    for x in (randn(2000, 208), *(uneven().to(dtype) for dtype in DTYPES)):
        before = x.clone()
        q = nvfp4.quantise(x)
        product, g = nvfp4.fake_unscaled(x)
        assert nvfp4.dequantise(q).isfinite().all()
        blocks = e2m1.decode(q.codes).unflatten(-1, (-1, 16))
        unscaled = (blocks * q.scale.float().unsqueeze(-1)).flatten(-2).bfloat16()
        assert torch.equal(bits(product), bits(unscaled)) and g == q.global_scale
        assert torch.equal(bits(x), bits(before))


def test_tensors_of_any_size_stay_finite():
    for size in (0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38):
        x = randn(16, 32).clamp(-1, 1) * size
        q = nvfp4.quantise(x)
        assert q.scale.float().isfinite().all() and q.global_scale.isfinite()
        assert nvfp4.dequantise(q).isfinite().all()
        rounding = 1 / 16 if size < 2e-27 else 0  # of a block scale, where g is the smallest
        assert nvfp4.dequantise(q).abs().max() <= x.abs().max() * (1 + rounding + 1e-6), size


def test_one_bad_number_makes_all_nan():
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = randn(16, 32)
        x[3, 20] = bad
        assert nvfp4.fake_unscaled(x)[0].isnan().all()
        assert nvfp4.dequantise(nvfp4.quantise(x)).isnan().all()
