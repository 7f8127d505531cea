"""Products with packed weights: the numbers of each format, whoever computes them."""

import math
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from software_nvfp4 import randn, scaled_mm

from flowrl.config.rollout import Precision
from flowrl.errors import UserError
from flowrl.quantization.backends import (
    BACKENDS,
    LIMIT,
    FP8Rowwise,
    NVFP4Emulated,
    NVFP4Native,
    PerRow,
    check_kernels,
    native_formats,
    resolve,
)
from flowrl.quantization.formats import fp8, nvfp4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTISED = [NVFP4Emulated(), FP8Rowwise()]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 20), st.integers(0, 9))
def test_emulated_nvfp4_is_the_product_of_dequantised_operands(m, blocks, n, seed):
    x, weight = randn(m, 16 * blocks, seed=seed), randn(n, 16 * blocks, seed=seed + 10)
    backend = NVFP4Emulated()
    got = backend.matmul(x, backend.pack(weight))
    left, right = (nvfp4.dequantise(nvfp4.quantise(t)).double() for t in (x, weight))
    assert distance(got, left @ right.t()) < 1e-6


def test_fp8_rowwise_is_the_product_of_dequantised_operands():
    x, weight = randn(33, 64, seed=3) * torch.logspace(-3, 3, 33)[:, None], randn(48, 64, seed=4)
    parts = (fp8.quantise_rowwise(t) for t in (x, weight))
    left, right = (codes.double() * scale.double() for codes, scale in parts)
    got, expected = FP8Rowwise().matmul(x, FP8Rowwise().pack(weight)), left @ right.t()
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
    for backend in [*QUANTISED, PerRow(NVFP4Emulated())]:
        state = backend.pack(randn(48, 64, seed=4))
        # Rows of the identity are exact in every format.
        product = backend.matmul(torch.eye(64), state).T
        torch.testing.assert_close(backend.unpack(state), product, rtol=1e-6, atol=0)
    weight = randn(160, 96, seed=5)  # more rows than a tile of scales, fewer columns than two
    native = NVFP4Native()
    assert torch.equal(native.unpack(native.pack(weight)), nvfp4.dequantise(nvfp4.quantise(weight)))


@pytest.mark.gpu
def test_emulation_on_a_gpu_is_that_of_the_cpu():
    for dtype in DTYPES:
        x, weight = randn(130, 256).to(dtype), randn(64, 256, seed=1)
        backend, eps = NVFP4Emulated(), torch.finfo(dtype).eps
        here, there = backend.pack(weight), backend.pack(weight.cuda())
        assert all(torch.equal(there[name].cpu(), here[name]) for name in here)
        got = backend.matmul(x.cuda(), there).cpu()
        torch.testing.assert_close(got, backend.matmul(x, here), rtol=2 * eps, atol=1e-5)


def test_relative_errors_on_gaussian_data_are_those_of_the_formats():
    x, weight = randn(512, 512, seed=7), randn(512, 512, seed=8)
    exact = x @ weight.t()
    error = {b: distance(b.matmul(x, b.pack(weight)), exact) for b in QUANTISED}
    assert error[NVFP4Emulated()] == pytest.approx(0.134, abs=0.002)
    assert error[FP8Rowwise()] == pytest.approx(0.0265 * math.sqrt(2), abs=0.001)


CPU, SCALED_MM = torch.device("cpu"), F.scaled_mm
SHAPES = [(48, 64), (32, 96), (48, 64), (144, 32)]


def in_software(a, *args, **kwargs):
    """torch's scaled_mm, with a product in software for NVFP4, which a CPU lacks."""
    product = scaled_mm if a.dtype == torch.float4_e2m1fn_x2 else SCALED_MM
    return product(a, *args, **kwargs)


def test_a_right_kernel_passes_with_its_error_by_distinct_shape(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", in_software)
    for dtype in DTYPES:
        for backend in [NVFP4Native(), FP8Rowwise()]:
            errors = check_kernels(backend, SHAPES, CPU, dtype)
            assert errors.keys() == {(48, 64), (32, 96), (144, 32)}
            assert max(errors.values()) <= max(torch.finfo(dtype).eps, 1e-6)


FAULTS = {  # in how a kernel reads a packed weight
    "high nibble first": (NVFP4Native, "codes", lambda codes: (codes >> 4) | (codes << 4)),
    "scales in another order": (NVFP4Native, "scale", lambda scale: scale.view(-1, 16).T.flatten()),
    "no global scale": (NVFP4Native, "global_scale", torch.ones_like),
    "no signs": (NVFP4Native, "codes", lambda codes: codes & 0x77),
    "scales reversed": (FP8Rowwise, "scale", lambda scale: scale.flip(1)),
    "NaN": (FP8Rowwise, "scale", lambda scale: scale * torch.nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_refused_with_its_shape_and_an_error_far_above_the_limit(
    monkeypatch, fault
):
    monkeypatch.setattr(F, "scaled_mm", in_software)
    kind, part, change = FAULTS[fault]

    class Wrong(kind):
        def matmul(self, x, state, bias=None):
            return kind.matmul(self, x, {**state, part: change(state[part])}, bias)

    with pytest.raises(UserError, match="48 x 64 .*emulation by ") as refusal:
        check_kernels(Wrong(), [(48, 64)], CPU, torch.bfloat16)
    error = str(refusal.value).partition("emulation by ")[2].partition(",")[0]
    assert not float(error) < 10 * LIMIT  # also NaN


def test_a_kernel_that_does_not_run_or_cannot_have_a_shape_is_refused_with_the_shape():
    for shape in ((48, 64), (40, 48)):
        with pytest.raises(UserError, match="{} x {} .*".format(*shape)):
            check_kernels(NVFP4Native(), [shape], CPU, torch.bfloat16)


@pytest.mark.gpu
def test_this_gpus_kernels_agree_with_their_emulation():
    for dtype in DTYPES:
        for precision in ["nvfp4", "fp8"]:
            device = torch.device("cuda")
            if precision not in native_formats(device):
                pytest.skip(f"this GPU does not multiply {precision} itself")
            backend = BACKENDS[precision]
            shapes = [(16, 32), (2432, 9728), (9728, 2432), (3072, 3072), (320, 160)]
            assert check_kernels(backend, shapes, device, dtype).keys() == set(shapes)


# Name and compute capability of NVIDIA's devices.
GPUS = {
    "ampere": ("NVIDIA A100", (8, 0)),
    "ada": ("NVIDIA GeForce RTX 4090", (8, 9)),
    "blackwell": ("NVIDIA B200", (10, 0)),
    "blackwell, old torch": ("NVIDIA B200", (10, 0)),
}
DEVICES = ("cpu", "mps", *GPUS)
NATIVE = dict.fromkeys(DEVICES, ("bf16",)) | {
    "ada": ("fp8", "bf16"),
    "blackwell": ("nvfp4", "fp8", "bf16"),
}


@pytest.mark.parametrize("device", DEVICES)
def test_every_cell_is_the_documented_format_or_an_error_that_names_the_others(device, monkeypatch):
    name, compute = GPUS.get(device, (device, None))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: compute)
    if "old torch" in device:
        monkeypatch.delattr(F, "scaled_mm")
    place, native = torch.device("cuda" if device in GPUS else device), NATIVE[device]
    for requested in get_args(Precision):
        assert native_formats(place) == native
        if requested in ("nvfp4", "fp8") and requested not in native:
            with pytest.raises(UserError) as error:
                resolve(requested, place)
            lack, _, alternatives = str(error.value).partition(": use ")
            named = alternatives.partition(", or nvfp4-emulated")[0].split(" or ")
            assert set(named) == {*native, "auto"}, (device, requested)
            assert name in lack or "torch" in lack, (device, requested)
            continue
        expected = native[0] if requested == "auto" else requested
        assert resolve(requested, place) == expected, (device, requested)


def test_a_rocm_device_is_not_taken_for_an_nvidia_generation(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert native_formats(torch.device("cuda")) == ("bf16",)
