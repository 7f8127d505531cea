"""Codes and rounding of E2M1, bit for bit those of ml_dtypes, and the packing of two a byte."""

import numpy as np
import pytest
import torch

from flowrl.quantization.formats import e2m1

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is the reference for E2M1")

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
