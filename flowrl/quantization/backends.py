"""Matmuls with packed weights: native NVFP4 and FP8, and emulated NVFP4.

`resolve` turns a requested precision into a kernel that the device supports, and never falls back
silently. A `Backend` holds no weights: `pack` turns a weight into named tensors, which the layer
keeps and overwrites in place, and `matmul` uses them. Every scale is a tensor, so that a compiled
graph serves all later weights, and no value is read back from the device. Activations are scaled
per call: NVFP4 by the largest magnitude of the call, so that a row's result depends a little on the
other rows; FP8 row by row.

Native NVFP4 has not been run on a device that has it yet; `check_kernels` compares it with fp32
matmuls of the same numbers before a run uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.config.rollout import Precision
from flowrl.errors import UserError
from flowrl.quantization.formats import e2m1, fp8, nvfp4

# First NVIDIA generation whose tensor cores multiply the format: Blackwell, and Ada with Hopper.
FIRST: dict[Precision, tuple[int, int]] = {"nvfp4": (10, 0), "fp8": (8, 9)}


def resolve(requested: Precision, device: torch.device, *, where: str = "pipeline") -> Precision:
    """Return the precision that a device computes in; auto is the lowest that is native.

    bf16 is not quantised: the network's own dtype.

    Args:
        where: the option's section, for errors.

    Raises:
        UserError: a precision that the device lacks, with those that it has.
    """
    native = native_formats(device)
    if requested == "auto":
        return native[0]
    if requested != "nvfp4-emulated" and requested not in native:
        raise UserError(
            f"{where}.precision {requested} {_lack(requested, device)}: use "
            f"{' or '.join([*native, 'auto'])}, or nvfp4-emulated, which has nvfp4's numbers but "
            "is not faster than bf16"
        )
    return requested


def native_formats(device: torch.device) -> tuple[Precision, ...]:
    """Return the formats that a device multiplies natively, lowest first; bf16 always is one."""
    return (*(format for format in FIRST if not _lack(format, device)), "bf16")


def _lack(format: Precision, device: torch.device) -> str:
    """Return why a device cannot multiply a format, as the end of a sentence; "" if it can."""
    (major, minor), compute = FIRST[format], _compute(device)
    if compute is None or compute < (major, minor):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        capability = "" if compute is None else f" of {compute[0]}.{compute[1]}"
        return (
            f"needs an NVIDIA GPU of compute capability {major}.{minor} or higher, "
            f"this is {name}{capability}"
        )
    if not hasattr(F, "scaled_mm"):
        return "needs torch.nn.functional.scaled_mm, which only newer versions of torch have"
    return ""


def _compute(device: torch.device) -> tuple[int, int] | None:
    """Return NVIDIA's compute capability of a device; None for everything else."""
    # ROCm builds call their devices cuda too, and number other generations in the same way.
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


# --- backends -----------------------------------------------------------------------------------

State = Mapping[str, Tensor]


class Backend(Protocol):
    """A way to compute x weight^T + bias. Stateless, compared by value."""

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Pack a weight (out, in) fp32; names, shapes and dtypes depend on its shape alone."""
        ...

    def unpack(self, state: State) -> Tensor:
        """Return the weight that is really multiplied with, (out, in) fp32."""
        ...

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        """Return x weight^T + bias, (M, out) in x's dtype; x: (M, in), bias: (out,)."""
        ...

    def round(self, x: Tensor) -> Tensor:
        """Return the numbers (M, K) fp32 that x (M, K) has in the format."""
        return self.unpack(self.pack(x.float()))


@dataclass(frozen=True, slots=True)
class NVFP4Emulated(Backend):
    """NVFP4 from ordinary matmuls: the native numbers up to the order of sums, and not faster.

    Elements times block scales have at most 6 significant bits and are exact in bf16, products of
    two of them in fp32; the scales of whole tensors are applied after the sum.
    """

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        values, scale = nvfp4.fake_unscaled(weight)
        return {"values": values, "global_scale": scale}

    def unpack(self, state: State) -> Tensor:
        return state["values"].float() * state["global_scale"]

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        values, scale = nvfp4.fake_unscaled(x)
        product = _exact_product(values, state["values"]) * (scale * state["global_scale"])
        return _with_bias(product.to(x.dtype), bias)


@dataclass(frozen=True, slots=True)
class NVFP4Native(Backend):
    """NVFP4 on compute capability 10 and above, by torch's scaled_mm.

    The kernel needs multiples of 32 in and 16 out, as `LayerRules` choose.
    """

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        quantised = nvfp4.quantise(weight)
        return {
            "codes": e2m1.pack(quantised.codes),
            "scale": nvfp4.swizzle(quantised.scale),
            "global_scale": quantised.global_scale,
        }

    def unpack(self, state: State) -> Tensor:
        codes = e2m1.unpack(state["codes"])
        rows, columns = codes.shape
        scale = nvfp4.unswizzle(state["scale"], rows, columns // nvfp4.BLOCK)
        packed = nvfp4.Quantised(codes=codes, scale=scale, global_scale=state["global_scale"])
        return nvfp4.dequantise(packed)

    def round(self, x: Tensor) -> Tensor:
        return NVFP4Emulated().round(x)  # of any number of rows

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        left, right = (
            (part["codes"].view(torch.float4_e2m1fn_x2), [part["scale"], part["global_scale"]])
            for part in (self.pack(x), state)
        )
        recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        layout = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        product = F.scaled_mm(
            left[0], right[0].t(), left[1], recipe, right[1], recipe, layout, layout,
            output_dtype=x.dtype,
        )  # fmt: skip
        return _with_bias(product, bias)


@dataclass(frozen=True, slots=True)
class FP8Rowwise(Backend):
    """FP8 (E4M3) with a scale per row of x and of the weight: compute capability 8.9 and above.

    It sums in the tensor cores' own, shorter accumulator, as inference on Hopper does.
    """

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        codes, scale = fp8.quantise_rowwise(weight)
        return {"codes": codes, "scale": scale.reshape(1, -1)}

    def unpack(self, state: State) -> Tensor:
        return state["codes"].float() * state["scale"].reshape(-1, 1)

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        codes, scale = fp8.quantise_rowwise(x)
        # Only some devices, and some versions of torch, have other results than bf16.
        short = x.is_cuda and x.dtype != torch.bfloat16
        rowwise = F.ScalingType.RowWise
        product = F.scaled_mm(
            codes, state["codes"].t(), scale, rowwise, state["scale"], rowwise,
            output_dtype=torch.bfloat16 if short else x.dtype, use_fast_accum=True,
        )  # fmt: skip
        return _with_bias(product.to(x.dtype), bias)


@dataclass(frozen=True, slots=True)
class PerRow(Backend):
    """Another backend on rows that are divided by their largest magnitude before, and undone after.

    A backend that scales a whole call by its largest magnitude then finds 1 in every call: a row's
    result does not depend on other rows. It costs one more pass over the activations, and rounds
    the result once more in x's dtype.
    """

    backend: Backend

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        return self.backend.pack(weight)

    def unpack(self, state: State) -> Tensor:
        return self.backend.unpack(state)

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        rows, largest = self._scaled(x)
        product = self.backend.matmul(rows.to(x.dtype), state).float() * largest
        return (product if bias is None else product + bias.float()).to(x.dtype)

    def round(self, x: Tensor) -> Tensor:
        rows, largest = self._scaled(x)
        return self.backend.round(rows) * largest

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows (M, K) fp32 of magnitude 1, and what they were divided by (M, 1)."""
        rows = x.float()
        # A row of zeros stays one: the smallest normal number divides it.
        largest = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return rows / largest, largest


BACKENDS: dict[str, Backend] = {  # by precision
    "nvfp4": NVFP4Native(),
    "nvfp4-emulated": NVFP4Emulated(),
    "fp8": FP8Rowwise(),
}


def _exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply (M, K) and (N, K) of at most 8 significant bits -> (M, N), summed in fp32.

    Outside CUDA operands are cast first: a bf16 matmul there rounds the sum, or parts of it.
    """
    if left.is_cuda and left.dtype == torch.bfloat16 and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return torch.mm(left.float(), right.float().t())


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias.to(product.dtype)


# --- the check of a kernel against fp32 matmuls ------------------------------------------------

ROWS = 208  # neither a multiple of a tile's 128 rows nor fewer
# Rounding the result to bf16 leaves 0.004 at most. Tensor cores that sum FP8 in about 14 bits
# (2412.19437) may leave 0.02 in rows of 15000. A wrong nibble, scale or layout leaves 0.5 and more.
LIMIT = 0.05


def check_kernels(
    backend: Backend, shapes: Iterable[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> dict[tuple[int, int], float]:
    """Compare one matmul per distinct (out, in) with an fp32 matmul of the same numbers.

    Returns the worst relative error of any row or column, by shape; nothing for a backend without
    a kernel of its own. dtype: of the activations. Raises UserError when a kernel does not run or
    disagrees.
    """
    if not isinstance(backend, NVFP4Native | FP8Rowwise):
        return {}
    errors = {}
    for shape in sorted(set(shapes)):
        errors[shape] = _error(backend, shape, device, dtype)
        if not errors[shape] <= LIMIT:  # NaN too
            raise UserError(
                f"{_title(backend, shape)} differs from its emulation by {errors[shape]:.3g}, "
                f"more than {LIMIT}: this device or torch computes something else; ask for "
                "another precision, or keep layers of that shape exact"
            )
    return errors


@torch.no_grad()
def _error(
    backend: Backend, shape: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> float:
    generator = torch.Generator(device).manual_seed(0)
    weight = _uneven(*shape, generator)
    x = _uneven(ROWS, shape[1], generator).to(dtype)
    try:
        state = backend.pack(weight)
        expected = _exact_product(backend.unpack(backend.pack(x.float())), backend.unpack(state))
        got = backend.matmul(x, state).float()
        difference, whole = (got - expected).square(), expected.square()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"{_title(backend, shape)} does not run here ({error}): ask for another precision, "
            "or keep layers of that shape exact"
        ) from error
    worst = [(difference.sum(dim) / whole.sum(dim)).sqrt().max() for dim in (0, 1)]
    return torch.stack(worst).max().item()


def _uneven(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return Gaussians whose rows and blocks of 16 differ in size: scales cannot be confused."""
    device = generator.device
    values = torch.randn(rows, columns, generator=generator, device=device)
    shape = (rows, -(-columns // 16) + 1)
    power = torch.randint(-2, 3, shape, generator=generator, device=device).float()
    of_row, of_block = power[:, :1], power[:, 1:].repeat_interleave(16, 1)[:, :columns]
    return values * torch.exp2(of_row + of_block)


def _title(backend: Backend, shape: tuple[int, int]) -> str:
    return f"the {type(backend).__name__} product of a layer with {shape[0]} x {shape[1]} weights"
