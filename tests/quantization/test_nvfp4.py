"""NVFP4: its codes against numpy and torchao, bounds, fixed points, and what is not finite."""

import warnings

import numpy as np
import pytest
import torch
from software_nvfp4 import randn

from flowrl.quantization.formats import e2m1, nvfp4

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
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="it is the reference for E2M1 and E4M3")
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
