"""MXFP4 and MXFP8: codes and power-of-two scales, those of torchao, and what saturates."""

import warnings

import numpy as np
import pytest
import torch

from flowrl.quantization.formats import e2m1, mx

CASES = [(element, rule) for element in ("e2m1", "e4m3") for rule in ("floor", "ceil")]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def sample(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-20, 20, (64, 1), generator=generator).float())
    x = torch.randn(64, 128, generator=generator) * spread
    x[0, :32] = 0
    x[1, :32] = -6.0
    return x.to(dtype)


@pytest.mark.parametrize(("element", "rule"), CASES)
def test_the_fake_numbers_are_the_dequantised_codes_bit_for_bit(element, rule):
    x = sample()
    before = x.clone()
    q = mx.quantise(x, element, rule)
    fake = mx.fake_quantise(x, element, rule)
    assert q.scale.shape == (64, 4) and q.codes.shape == x.shape and fake.isfinite().all()
    assert torch.equal(bits(fake), bits(mx.dequantise(q)))
    assert torch.equal(x, before)


@pytest.mark.parametrize(("element", "rule"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_those_of_torchao(element, rule, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = "torchao has a reference of the MX formats"
        tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=reason)
    x = sample(1, dtype=dtype)
    kind = torch.float4_e2m1fn_x2 if element == "e2m1" else torch.float8_e4m3fn
    mode = (
        tensor.ScaleCalculationMode.FLOOR if rule == "floor" else tensor.ScaleCalculationMode.RCEIL
    )
    scale, codes = tensor.to_mx(x, kind, 32, mode)
    mine = mx.quantise(x, element, rule)
    packed = e2m1.pack(mine.codes) if element == "e2m1" else mine.codes
    assert torch.equal(mine.scale, scale.view(torch.uint8))
    assert torch.equal(bits(packed), bits(codes))


def test_the_bytes_of_scales_are_e8m0_and_multiply_as_such():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the reference for E8M0")
    q = mx.quantise(sample(2), "e2m1", "ceil")
    scale = q.scale.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    expected = e2m1.decode(q.codes).unflatten(-1, (-1, 32)) * torch.from_numpy(scale)[..., None]
    assert torch.equal(mx.dequantise(q), expected.flatten(-2))


@pytest.mark.parametrize(("element", "top"), [("e2m1", 6.0), ("e4m3", 448.0)])
def test_with_ceil_nothing_saturates_and_half_the_scale_would(element, top):
    x = sample(3)
    x[2, :32] = top * 2.0**-5  # exactly the largest value: no wider scale is needed
    exponent = mx.quantise(x, element, "ceil").scale.double() - 127
    largest = x.double().unflatten(-1, (-1, 32)).abs().amax(-1)
    needed = largest > 0
    assert (largest <= top * 2**exponent).all()
    assert (largest > top * 2 ** (exponent - 1))[needed].all()
    assert exponent[2, 0] == -5


def test_with_floor_the_largest_elements_may_saturate():
    x = torch.full((1, 32), 7.9)
    assert mx.fake_quantise(x, "e2m1", "floor").unique().tolist() == [6.0]
    assert mx.fake_quantise(x, "e2m1", "ceil").unique().tolist() == [8.0]


@pytest.mark.parametrize(("element", "rule"), CASES)
def test_numbers_of_the_format_stay_as_they_are(element, rule):
    once = mx.fake_quantise(sample(4), element, rule)
    assert torch.equal(mx.fake_quantise(once, element, rule), once)


@pytest.mark.parametrize(("element", "rule"), CASES)
def test_a_block_that_is_not_finite_is_nan_alone(element, rule):
    x = torch.ones(3, 64)
    x[0, 5], x[1, 40] = torch.nan, torch.inf
    q = mx.quantise(x, element, rule)
    for numbers in (mx.fake_quantise(x, element, rule), mx.dequantise(q)):
        assert numbers[0, :32].isnan().all() and numbers[1, 32:].isnan().all()
        assert numbers.isnan().sum() == 64
    assert q.scale[0, 0] == q.scale[1, 1] == 255


def test_a_row_that_is_not_whole_blocks_is_refused():
    with pytest.raises(ValueError, match="rows of 48: a multiple of 32"):
        mx.quantise(torch.zeros(2, 48), "e2m1")
