"""A kernel that computes something else is refused before a run uses it."""

import pytest
import torch
from software_nvfp4 import SoftwareNVFP4

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

CPU = torch.device("cpu")
SHAPES = [(48, 64), (32, 96), (48, 64), (144, 32)]
FAULTS = (
    "reads the weight's high nibble first",
    "takes scales row by row",
    "forgets the global scale",
    "ignores signs",
    "forgets the last rows",
    "overflows",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_a_right_kernel_passes_with_its_error_by_distinct_shape():
    for dtype in DTYPES:
        for backend in [SoftwareNVFP4(), FP8Rowwise()]:
            errors = check_kernels(backend, SHAPES, CPU, dtype)
            assert errors.keys() == {(48, 64), (32, 96), (144, 32)}
            assert max(errors.values()) <= max(torch.finfo(dtype).eps, 1e-6)


class ScalesReversed(FP8Rowwise):
    def matmul(self, x, state, bias=None):
        return FP8Rowwise.matmul(self, x, {**state, "scale": state["scale"].flip(1)}, bias)


class ScalesOfOneRow(FP8Rowwise):
    def matmul(self, x, state, bias=None):
        scale = state["scale"][:, :1].expand_as(state["scale"]).contiguous()
        return FP8Rowwise.matmul(self, x, {**state, "scale": scale}, bias)


class ReturnsNaN(FP8Rowwise):
    def matmul(self, x, state, bias=None):
        return FP8Rowwise.matmul(self, x, state, bias) * torch.nan


def test_a_wrong_kernel_is_refused_with_its_shape_and_an_error_far_above_the_limit():
    wrong = (ScalesReversed(), ScalesOfOneRow(), ReturnsNaN(), *map(SoftwareNVFP4, FAULTS))
    for kernel in wrong:
        with pytest.raises(UserError, match="48 x 64 .*emulation by ") as refusal:
            check_kernels(kernel, [(48, 64)], CPU, torch.bfloat16)
        found = str(refusal.value).partition("emulation by ")[2].partition(",")[0]
        assert not float(found) < 10 * LIMIT, kernel  # infinite, or no number at all


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
