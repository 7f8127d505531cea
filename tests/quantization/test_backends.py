"""Products with packed weights: the numbers of each format, whoever computes them."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from software_nvfp4 import scaled_mm

from flowrl.quantization.backends import (
    Capability,
    FP8Rowwise,
    NVFP4Emulated,
    NVFP4Native,
    PerRow,
    Plain,
    backend_of,
    resolve,
)
from flowrl.quantization.formats import fp8, nvfp4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED = [NVFP4Emulated(), FP8Rowwise()]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def nvfp4_product(x: torch.Tensor, weight: torch.Tensor):
    """Of the dequantised operands, in float64."""
    parts = (nvfp4.quantise(t) for t in (x, weight))
    left, right = (nvfp4.dequantise(q).double() for q in parts)
    return left @ right.t()


def fp8_product(x: torch.Tensor, weight: torch.Tensor):
    parts = (fp8.quantise_rowwise(t) for t in (x, weight))
    left, right = (codes.double() * scale.double() for codes, scale in parts)
    return left @ right.t()


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 20), st.integers(0, 9))
def test_emulated_nvfp4_is_the_product_of_dequantised_operands(m, blocks, n, seed):
    x, weight = randn(m, 16 * blocks, seed=seed), randn(n, 16 * blocks, seed=seed + 10)
    backend = NVFP4Emulated()
    got = backend.matmul(x, backend.pack(weight))
    assert distance(got, nvfp4_product(x, weight)) < 1e-6


def test_fp8_rowwise_is_the_product_of_dequantised_operands():
    x, weight = randn(33, 64, seed=3) * torch.logspace(-3, 3, 33)[:, None], randn(48, 64, seed=4)
    got, expected = FP8Rowwise().matmul(x, FP8Rowwise().pack(weight)), fp8_product(x, weight)
    worst = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert worst.max() < 1e-6, "small rows as exact as large ones"


def test_a_row_does_not_depend_on_the_rows_beside_it():
    for dtype in [torch.float32, torch.bfloat16]:
        rows, plain = randn(12, 64) * torch.logspace(-3, 3, 12)[:, None], NVFP4Emulated()
        rows, backend = rows.to(dtype), PerRow(plain)
        state = backend.pack(randn(48, 64, seed=1))
        for start in (0, 3):
            part, whole = rows[start : start + 6], backend.matmul(rows, state)[start : start + 6]
            assert torch.equal(backend.matmul(part, state), whole)
            beside = plain.matmul(rows, state)[start : start + 6]
            assert not torch.equal(plain.matmul(part, state), beside)


def test_the_bias_is_added_and_a_zero_input_gives_it_alone():
    for dtype in DTYPES:
        for backend in QUANTISED:
            state, bias = backend.pack(randn(32, 64)), randn(32, seed=1).to(dtype)
            x = randn(5, 64, seed=2).to(dtype)
            assert torch.equal(backend.matmul(x, state, bias), backend.matmul(x, state) + bias)
            assert torch.equal(backend.matmul(torch.zeros_like(x), state, bias), bias.expand(5, -1))
            zero = backend.pack(torch.zeros(32, 64))
            assert torch.equal(backend.matmul(x, zero, bias), bias.expand(5, -1))


def test_unpacking_gives_what_the_backend_multiplies_with():
    for backend in [*QUANTISED, PerRow(NVFP4Emulated()), Plain(torch.float32)]:
        state = backend.pack(randn(48, 64, seed=4))
        # Rows of the identity are exact in every format.
        product = backend.matmul(torch.eye(64), state).T
        torch.testing.assert_close(backend.unpack(state), product, rtol=1e-6, atol=0)
    weight = randn(160, 96, seed=5)  # more rows than a tile of scales, fewer columns than two
    native = NVFP4Native()
    assert torch.equal(native.unpack(native.pack(weight)), nvfp4.dequantise(nvfp4.quantise(weight)))


def test_a_kernel_that_follows_the_layout_gives_the_emulations_numbers(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    for (m, k, n), (dtype, step) in (
        ((1, 32, 16), (torch.float32, 1e-6)),
        ((7, 64, 48), (torch.float32, 1e-6)),
        ((130, 160, 144), (torch.bfloat16, 2**-7)),
        ((257, 32, 272), (torch.float16, 2**-10)),
    ):
        x, weight, bias = randn(m, k).to(dtype), randn(n, k, seed=1), randn(n, seed=2)
        native, emulated = NVFP4Native(), NVFP4Emulated()
        got = native.matmul(x, native.pack(weight), bias)
        expected = emulated.matmul(x, emulated.pack(weight), bias)
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=step, atol=step)


def test_a_resolved_precision_names_its_backend():
    blackwell = Capability(device="cuda", name="B200", compute=(10, 0), scaled_mm=True)

    def backend(precision):
        return backend_of(resolve(precision, blackwell), dtype=torch.float16)

    assert backend("auto") == backend("nvfp4") == NVFP4Native()
    assert backend("nvfp4-emulated") == NVFP4Emulated()
    assert backend("fp8") == FP8Rowwise()
    assert backend("bf16") == Plain(torch.float16)


@pytest.mark.gpu
def test_emulation_on_a_gpu_is_that_of_the_cpu():
    for dtype in DTYPES:
        x, weight = randn(130, 256).to(dtype), randn(64, 256, seed=1)
        for backend in (NVFP4Emulated(),):
            here, there = backend.pack(weight), backend.pack(weight.cuda())
            assert all(torch.equal(there[name].cpu(), here[name]) for name in here)
            got = backend.matmul(x.cuda(), there).cpu()
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(got, backend.matmul(x, here), rtol=2 * eps, atol=1e-5)


def test_relative_errors_on_gaussian_data_are_those_of_the_formats():
    x, weight = randn(512, 512, seed=7), randn(512, 512, seed=8)
    exact = x @ weight.t()
    error = {b: distance(b.matmul(x, b.pack(weight)), exact) for b in QUANTISED}
    assert error[NVFP4Emulated()] == pytest.approx(0.134, abs=0.002)
    assert error[FP8Rowwise()] == pytest.approx(0.0265 * math.sqrt(2), abs=0.001)
