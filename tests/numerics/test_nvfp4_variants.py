"""Every named order of operations, code for code, against plain numpy and the libraries themselves.

The numpy reference rounds with ml_dtypes and follows the published order of each library line by
line; torchao and diffusers are asked themselves where they are installed.
"""

import warnings

import numpy as np
import pytest
import torch

from flowrl.quantization.formats import e2m1, nvfp4
from flowrl.quantization.formats.nvfp4_variants import packing

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the reference for E2M1 and E4M3")

VARIANTS = ("torchao", "te", "div", "bfl", "comfy")
DTYPES = [torch.float32, torch.bfloat16]
F = np.float32


def sample(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal, tiny, zero, constant and outlying blocks. (256, 128)"""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 128, generator=generator)
    x[:64] *= torch.exp2(torch.randint(-24, 1, (64, 1), generator=generator).float())
    x[3, :16], x[4, 16:32], x[5, 40], x[6] = 0, -0.75, 300.0, 1e-20
    return x.to(dtype)


def cast(x: np.ndarray, kind) -> np.ndarray:
    return x.astype(kind).astype(F)


def reference(x: torch.Tensor, variant: str, two_level: bool) -> tuple[torch.Tensor, ...]:
    """Codes, scales and global scale by the table of operations, in numpy float32."""
    blocks = x.float().numpy().reshape(x.shape[0], -1, 16)
    top, whole = np.abs(blocks).max(-1), np.abs(blocks).max()
    encode = F(448 * 6) / whole if two_level else F(1)
    g = whole / F(448 * 6) if two_level else F(1)
    ratio = {"te": top / F(6) * encode, "div": top / (F(6) * g)}.get(variant, top / F(6) / g)
    floor = {"torchao": F(2**-6), "div": F(2**-9)}.get(variant, F(0))
    s = cast(np.clip(ratio, floor, F(448)), ml_dtypes.float8_e4m3fn)
    if variant == "div":
        s[top == 0] = 1
    with np.errstate(divide="ignore", invalid="ignore"):
        if variant == "torchao":
            y = blocks * ((F(1) / g) / s)[..., None]
        elif variant == "te":
            inverse = np.minimum(F(1) / (s * (F(1) / encode)), np.finfo(F).max)
            y = blocks * inverse[..., None]
        else:
            y = np.where(s[..., None] == 0, F(0), blocks / (s * g)[..., None])
    codes = np.clip(y, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    g = F(1) / encode if variant == "te" else g
    return torch.from_numpy(codes.reshape(x.shape)), torch.from_numpy(s), torch.tensor(g)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("two_level", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_codes_and_scales_are_those_of_the_order_named(variant, dtype, two_level, seed):
    x = sample(dtype, seed) * (1 + seed / 7)
    q = nvfp4.quantise(x, variant=variant, two_level=two_level)
    codes, scale, g = reference(x, variant, two_level)
    assert torch.equal(q.global_scale, g)
    assert torch.equal(q.scale.float(), scale)
    assert torch.equal(q.codes, codes)


def test_the_orders_differ_but_in_few_codes():
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    base = nvfp4.quantise(x).codes
    for variant in ("te", "div", "bfl", "comfy"):
        other = nvfp4.quantise(x, variant=variant).codes
        assert 0 < (other != base).float().mean() < 0.001


@pytest.fixture(scope="module")
def torchao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = "torchao has the reference of its own order"
        return pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=reason)


@pytest.mark.parametrize("two_level", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tensor_of_torchao_is_equal_bit_for_bit(torchao, dtype, two_level):
    x = sample(dtype, seed=2)
    amax = x.abs().amax()
    g = torchao.per_tensor_amax_to_scale(amax) if two_level else None
    theirs = torchao.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=g)
    q = nvfp4.quantise(x, variant="torchao", two_level=two_level)
    assert q.global_scale == (1 if g is None else g)
    assert same_bits(e2m1.pack(q.codes, packing("torchao")), theirs.qdata)
    assert same_bits(q.scale, theirs.scale)
    assert same_bits(nvfp4.dequantise(q), theirs.dequantize(torch.float32))
    assert same_bits(nvfp4.fake_quantise(x, two_level=two_level), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("g", [1e-4, 3e-2, 7.0])
def test_a_global_scale_known_before_is_used_as_torchao_does(torchao, g):
    x, known = sample(seed=3), torch.tensor(g)
    scale, packed = torchao.nvfp4_quantize(x, per_tensor_scale=known)
    q = nvfp4.quantise(x, global_scale=known)
    assert q.global_scale == known
    assert same_bits(q.scale, scale) and same_bits(e2m1.pack(q.codes), packed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_quantiser_of_diffusers_is_equal_bit_for_bit(dtype):
    bfl = pytest.importorskip("diffusers.quantizers.bfl.utils", reason="newer diffusers only")
    x = sample(dtype, seed=4)
    packed, scale, g = bfl.quantize_nvfp4(x)
    q = nvfp4.quantise(x, variant="bfl")
    assert q.global_scale == g and same_bits(q.scale, scale)
    assert same_bits(e2m1.pack(q.codes, packing("bfl")), packed)
    assert torch.equal(nvfp4.dequantise(q), bfl.dequantize_nvfp4(packed, scale, g))


@pytest.mark.parametrize(
    ("variant", "scale"),
    [("torchao", 2**-6), ("te", 0), ("div", 1), ("bfl", 0), ("comfy", 0)],
)
def test_the_scale_of_a_zero_block_is_the_library_s_and_its_elements_are_zero(variant, scale):
    q = nvfp4.quantise(sample(), variant=variant)
    assert q.scale[3, 0].item() == scale
    assert not q.codes[3, :16].any() and not nvfp4.dequantise(q)[3, :16].any()


@pytest.mark.parametrize(("variant", "smallest"), [("torchao", 2**-6), ("div", 2**-9), ("te", 0)])
def test_block_scales_are_not_below_the_floor_of_the_library(variant, smallest):
    q = nvfp4.quantise(sample(), variant=variant)
    assert q.scale[6].float().max() == smallest  # a row of 1e-20 beside an outlier


def test_only_comfy_packs_the_first_element_into_the_high_bits():
    assert {v: packing(v) for v in VARIANTS} == {
        **dict.fromkeys(VARIANTS, "low_first"),
        "comfy": "high_first",
    }


def test_an_unknown_variant_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="'mslk': one of torchao, te, div, bfl, comfy"):
        nvfp4.quantise(torch.zeros(1, 16), variant="mslk")
