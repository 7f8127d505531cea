"""Products with packed weights: the numbers of each format, whoever computes them."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from software_nvfp4 import block_scales, scaled_mm, values
from torch._subclasses.fake_tensor import FakeTensorMode

from flowrl.quantization.backends import (
    Capability,
    FP8Dequantised,
    FP8Rowwise,
    NVFP4Emulated,
    NVFP4Native,
    Plain,
    backend_of,
    capability_of,
    native_formats,
    resolve,
)
from flowrl.quantization.formats import fp8, nvfp4
from flowrl.quantization.linear import PerRow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED = [NVFP4Emulated(), NVFP4Emulated(True), FP8Rowwise(), FP8Dequantised()]
PACKING = [*QUANTISED, NVFP4Native(), NVFP4Native(True), Plain(torch.bfloat16)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def nvfp4_product(x: torch.Tensor, weight: torch.Tensor, four_over_six: bool = False):
    """Of the dequantised operands, in float64."""
    parts = (nvfp4.quantise(t, four_over_six=four_over_six) for t in (x, weight))
    left, right = (nvfp4.dequantise(q).double() for q in parts)
    return left @ right.t()


def fp8_product(x: torch.Tensor, weight: torch.Tensor):
    parts = (fp8.quantise_rowwise(t) for t in (x, weight))
    left, right = (codes.double() * scale.double() for codes, scale in parts)
    return left @ right.t()


# --- the numbers -------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 20), st.booleans(), st.integers(0, 9))
def test_emulated_nvfp4_is_the_product_of_dequantised_operands(m, blocks, n, four_over_six, seed):
    x, weight = randn(m, 16 * blocks, seed=seed), randn(n, 16 * blocks, seed=seed + 10)
    backend = NVFP4Emulated(four_over_six)
    got = backend.matmul(x, backend.pack(weight))
    assert distance(got, nvfp4_product(x, weight, four_over_six)) < 1e-6


def test_an_emulated_product_is_exact_before_the_global_scales():
    state = NVFP4Emulated().pack(randn(16, 32, seed=2))
    x = torch.diag(randn(32, seed=1))  # one term a sum: no order in which to round
    values, scale = nvfp4.fake_unscaled(x)
    exact = values.double() @ state["values"].double().t()
    assert torch.equal(exact, exact.float().double())
    expected = exact.float() * (scale * state["global_scale"])
    assert torch.equal(NVFP4Emulated().matmul(x, state), expected)


@pytest.mark.parametrize("backend", [FP8Rowwise(), FP8Rowwise(fast_accum=False), FP8Dequantised()])
def test_fp8_rowwise_is_the_product_of_dequantised_operands(backend):
    x, weight = randn(33, 64, seed=3) * torch.logspace(-3, 3, 33)[:, None], randn(48, 64, seed=4)
    got = backend.matmul(x, backend.pack(weight))
    assert distance(got, fp8_product(x, weight)) < 1e-6
    worst = (got - fp8_product(x, weight)).norm(dim=1) / fp8_product(x, weight).norm(dim=1)
    assert worst.max() < 1e-6, "small rows as exact as large ones"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [*QUANTISED, Plain(torch.float32)])
def test_results_have_the_activations_dtype_and_are_rounded_once(backend, dtype):
    x, state = randn(24, 64, seed=5).to(dtype), backend.pack(randn(32, 64, seed=6))
    got, exact = backend.matmul(x, state), backend.matmul(x.float(), state)
    assert got.dtype == dtype and exact.dtype == torch.float32
    half_a_step = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.float(), exact, rtol=half_a_step * 1.001, atol=1e-6)


def test_relative_errors_on_gaussian_data_are_those_of_the_formats():
    x, weight = randn(512, 512, seed=7), randn(512, 512, seed=8)
    exact = x @ weight.t()
    error = {b: distance(b.matmul(x, b.pack(weight)), exact) for b in QUANTISED}
    assert error[NVFP4Emulated()] == pytest.approx(0.134, abs=0.002)
    assert error[NVFP4Emulated(True)] == pytest.approx(0.0869 * math.sqrt(2), abs=0.002)
    assert error[FP8Rowwise()] == pytest.approx(0.0265 * math.sqrt(2), abs=0.001)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_is_the_linear_layer_bit_for_bit(dtype):
    x, weight, bias = (t.to(dtype) for t in (randn(9, 20), randn(12, 20, seed=1), randn(12)))
    backend = Plain(dtype)
    assert torch.equal(backend.matmul(x, backend.pack(weight), bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", QUANTISED)
def test_the_bias_is_added_and_a_zero_input_gives_it_alone(backend, dtype):
    state, bias = backend.pack(randn(32, 64)), randn(32, seed=1).to(dtype)
    x = randn(5, 64, seed=2).to(dtype)
    assert torch.equal(backend.matmul(x, state, bias), backend.matmul(x, state) + bias)
    assert torch.equal(backend.matmul(torch.zeros_like(x), state, bias), bias.expand(5, -1))
    zero = backend.pack(torch.zeros(32, 64))
    assert torch.equal(backend.matmul(x, zero, bias), bias.expand(5, -1))


# --- what is kept of a weight ------------------------------------------------------------------


@pytest.mark.parametrize("backend", PACKING)
def test_what_a_weight_becomes_has_one_layout_whatever_its_values(backend):
    def layout(weight):
        packed = backend.pack(weight)
        assert all(t.is_contiguous() for t in packed.values())
        return {name: (tuple(t.shape), t.dtype) for name, t in packed.items()}

    of_gaussian = layout(randn(48, 64))
    assert layout(torch.zeros(48, 64)) == layout(randn(48, 64) * 1e20) == of_gaussian


@pytest.mark.parametrize("backend", [NVFP4Native(), FP8Rowwise()])
def test_native_weights_are_as_small_as_their_format(backend):
    bits = 8 * sum(t.nbytes for t in backend.pack(randn(256, 1024)).values()) / (256 * 1024)
    assert bits == pytest.approx({NVFP4Native: 4.5, FP8Rowwise: 8.03}[type(backend)], abs=0.01)


@pytest.mark.parametrize("backend", [*QUANTISED, PerRow(NVFP4Emulated()), Plain(torch.float32)])
def test_unpacking_gives_what_the_backend_multiplies_with(backend):
    state = backend.pack(randn(48, 64, seed=4))
    # Rows of the identity are exact in every format.
    product = backend.matmul(torch.eye(64), state).T
    torch.testing.assert_close(backend.unpack(state), product, rtol=1e-6, atol=0)


def test_native_codes_unpack_to_what_they_stand_for():
    weight = randn(160, 96, seed=5)  # more rows than a tile of scales, fewer columns than two
    native = NVFP4Native()
    assert torch.equal(native.unpack(native.pack(weight)), nvfp4.fake_quantise(weight))


def test_emulated_weights_are_the_block_scaled_numbers_exactly():
    weight = randn(32, 64)
    state, q = NVFP4Emulated().pack(weight), nvfp4.quantise(weight)
    assert state["values"].dtype == torch.bfloat16
    assert torch.equal(state["values"], nvfp4.unscaled(q))
    assert torch.equal(state["global_scale"], q.global_scale)


# --- native NVFP4, by what it hands to the kernel -------------------------------------------------


def test_packed_weights_read_by_the_layout_are_the_dequantised_ones():
    weight = randn(144, 96)
    state = NVFP4Native().pack(weight)
    scale = block_scales(state["scale"], 144, 6).repeat_interleave(16, 1)
    read = values(state["codes"].view(torch.float4_e2m1fn_x2)) * scale * state["global_scale"]
    torch.testing.assert_close(
        read.float(), nvfp4.dequantise(nvfp4.quantise(weight)), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("four_over_six", [False, True])
@pytest.mark.parametrize("shape", [(1, 32, 16), (7, 64, 48), (130, 160, 144), (257, 32, 272)])
def test_a_kernel_that_follows_the_layout_gives_the_emulations_numbers(
    monkeypatch, shape, four_over_six, dtype
):
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    m, k, n = shape
    x, weight, bias = randn(m, k).to(dtype), randn(n, k, seed=1), randn(n, seed=2)
    native = NVFP4Native(four_over_six)
    emulated = native.reference
    assert emulated == NVFP4Emulated(four_over_six)
    got = native.matmul(x, native.pack(weight), bias)
    expected = emulated.matmul(x, emulated.pack(weight), bias)
    assert got.dtype == dtype
    steps = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
    torch.testing.assert_close(got, expected, rtol=steps[dtype], atol=steps[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_takes_the_operands_without_a_look_at_their_values(dtype):
    with FakeTensorMode():
        x = torch.empty(33, 64, device="cuda", dtype=dtype)
        for backend in (NVFP4Native(), NVFP4Native(True), FP8Rowwise(), NVFP4Emulated()):
            state = backend.pack(torch.empty(48, 64, device="cuda"))
            y = backend.matmul(x, state)
            assert (y.shape, y.dtype, y.device.type) == ((33, 48), dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_fp8_asks_the_kernel_for_bf16_which_all_of_them_have(monkeypatch, dtype):
    asked, product = [], F.scaled_mm

    def scaled(*args, output_dtype, **options):
        asked.append(output_dtype)
        return product(*args, output_dtype=output_dtype, **options)

    monkeypatch.setattr(F, "scaled_mm", scaled)
    with FakeTensorMode():
        x, weight = (torch.empty(n, 64, device="cuda") for n in (33, 48))
        FP8Rowwise().matmul(x.to(dtype), FP8Rowwise().pack(weight))
    assert asked == [torch.bfloat16]


def test_native_nvfp4_refuses_sizes_that_its_kernel_lacks():
    for shape in ((16, 48), (24, 32)):
        with pytest.raises(ValueError, match="keep this layer exact"):
            NVFP4Native().pack(randn(*shape))


def test_operands_of_another_type_or_layout_are_refused_before_the_kernel():
    good = NVFP4Native().pack(randn(16, 64))
    wrong = {
        "codes": good["codes"].float(),
        "scale": good["scale"].view(-1, 16),
        "global_scale": good["global_scale"].bfloat16(),
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=str(value.dtype)):
            NVFP4Native().matmul(randn(4, 64), {**good, name: value})


# --- which one -----------------------------------------------------------------------------------


def test_a_resolved_precision_names_its_backend():
    blackwell = Capability(device="cuda", name="B200", compute=(10, 0), scaled_mm=True)

    def backend(precision, **options):
        return backend_of(resolve(precision, blackwell), dtype=torch.float16, **options)

    assert backend("auto") == backend("nvfp4") == NVFP4Native()
    assert backend("nvfp4", four_over_six=True) == NVFP4Native(True)
    assert backend("nvfp4-emulated", four_over_six=True) == NVFP4Emulated(True)
    assert backend("fp8") == FP8Rowwise()
    assert backend("bf16") == Plain(torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_emulation_on_a_gpu_is_that_of_the_cpu(dtype):
    x, weight = randn(130, 256).to(dtype), randn(64, 256, seed=1)
    for backend in (NVFP4Emulated(), NVFP4Emulated(True), FP8Dequantised()):
        here, there = backend.pack(weight), backend.pack(weight.cuda())
        assert all(torch.equal(there[name].cpu(), here[name]) for name in here)
        got = backend.matmul(x.cuda(), there).cpu()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, backend.matmul(x, here), rtol=2 * eps, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", ["nvfp4", "fp8"])
@pytest.mark.parametrize("rows", [1, 77, 130, 4096])
def test_a_native_product_is_that_of_its_reference(precision, dtype, rows):
    capability = capability_of(torch.device("cuda"))
    if precision not in native_formats(capability):
        pytest.skip(f"{capability.name} does not multiply {precision} itself")
    backend = backend_of(resolve(precision, capability), dtype=dtype)
    x, weight = randn(rows, 2432).to("cuda", dtype), randn(320, 2432, seed=1).cuda()
    got = backend.matmul(x, backend.pack(weight))
    assert backend.reference is not None
    expected = backend.reference.matmul(x.float(), backend.reference.pack(weight))
    assert distance(got, expected) < (0.005 if precision == "nvfp4" else 0.02)
