"""A kernel that computes something else is refused before a run uses it."""

import pytest
import torch
import torch.nn.functional as F
from software_nvfp4 import scaled_mm

from flowrl.errors import UserError
from flowrl.quantization.backends import (
    LIMIT,
    FP8Rowwise,
    NVFP4Native,
    backend_of,
    capability_of,
    check_kernels,
    native_formats,
    resolve,
)

CPU, SCALED_MM = torch.device("cpu"), F.scaled_mm
SHAPES = [(48, 64), (32, 96), (48, 64), (144, 32)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
            capability = capability_of(device)
            if precision not in native_formats(capability):
                pytest.skip(f"{capability.name} does not multiply {precision} itself")
            backend = backend_of(resolve(precision, capability), dtype=dtype)
            shapes = [(16, 32), (2432, 9728), (9728, 2432), (3072, 3072), (320, 160)]
            assert check_kernels(backend, shapes, device, dtype).keys() == set(shapes)
