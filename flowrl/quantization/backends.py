"""Products of activations with a weight packed once: native NVFP4 and FP8, emulated, and plain.

A backend holds no weights. `pack` turns a weight into named tensors, which the layer keeps and
overwrites in place, and `matmul` uses them. Every scale is a tensor, so that a compiled graph
serves all later weights, and no value is read back from the device. Activations are scaled per
call: NVFP4 by the largest magnitude of the call, so that a row's result depends a little on the
rows beside it; FP8 row by row.

Native NVFP4 has not been run on a device that has it yet; `kernel_check` compares it with the
emulation before a run uses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.quantization.formats import e2m1, fp8, nvfp4
from flowrl.quantization.formats.swizzle import swizzle, unswizzle
from flowrl.quantization.precision import EMULATION, KERNELS, Resolved

State = Mapping[str, Tensor]


class Backend(Protocol):
    """One way to multiply. Stateless, compared by value."""

    @property
    def reference(self) -> "Backend | None":
        """The same numbers from ordinary products in fp32; None where that is all there is."""
        ...

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """weight: (out, in) fp32 -> tensors whose names, shapes and dtypes depend on it alone."""
        ...

    def unpack(self, state: State) -> Tensor:
        """What `pack` gave -> the weight that is really multiplied with, (out, in) fp32."""
        ...

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        """x: (M, in), bias: (out,) -> x weight^T + bias, (M, out) in x's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Not quantised: a linear layer in `dtype`. The weight is only cast, so it may be shared."""

    dtype: torch.dtype

    @property
    def reference(self) -> Backend | None:
        return None

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": weight.to(self.dtype)}

    def unpack(self, state: State) -> Tensor:
        return state["weight"].float()

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.to(self.dtype), state["weight"], bias).to(x.dtype)


@dataclass(frozen=True, slots=True)
class NVFP4Emulated:
    """NVFP4 from ordinary products: the native numbers up to the order of sums, and not faster.

    q s_b has 6 significant bits at most and is exact in bf16, products of two of them are exact
    in fp32; so the scales of whole tensors are left out until the sum is done.
    """

    four_over_six: bool = False

    @property
    def reference(self) -> Backend | None:
        return None

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        values, scale = nvfp4.fake_unscaled(weight, four_over_six=self.four_over_six)
        return {"values": values, "global_scale": scale}

    def unpack(self, state: State) -> Tensor:
        return state["values"].float() * state["global_scale"]

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        values, scale = nvfp4.fake_unscaled(x, four_over_six=self.four_over_six)
        product = _exact_product(values, state["values"]) * (scale * state["global_scale"])
        return _with_bias(product.to(x.dtype), bias)


@dataclass(frozen=True, slots=True)
class NVFP4Native:
    """NVFP4 on compute capability 10 and above, by torch's public scaled product.

    Raises ValueError where in is no multiple of 32 or out none of 16, as the kernel needs.
    """

    four_over_six: bool = False

    @property
    def reference(self) -> Backend | None:
        return NVFP4Emulated(self.four_over_six)

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        out_features, in_features = weight.shape
        if in_features % 32 or out_features % 16:
            raise ValueError(
                f"a weight of {out_features} x {in_features} cannot be multiplied in NVFP4: out "
                "is to be a multiple of 16 and in of 32; keep this layer exact"
            )
        return self._quantise(weight)

    def unpack(self, state: State) -> Tensor:
        codes = e2m1.unpack(state["codes"], "low_first")
        rows, columns = codes.shape
        scale = unswizzle(state["scale"], rows, columns // nvfp4.BLOCK)
        packed = nvfp4.Quantised(codes=codes, scale=scale, global_scale=state["global_scale"])
        return nvfp4.dequantise(packed)

    def _quantise(self, x: Tensor) -> dict[str, Tensor]:
        quantised = nvfp4.quantise(x, four_over_six=self.four_over_six)
        return {
            "codes": e2m1.pack(quantised.codes, "low_first"),
            "scale": swizzle(quantised.scale),
            "global_scale": quantised.global_scale,
        }

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        left, right = _operand(self._quantise(x)), _operand(state)
        recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
        layout = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
        product = F.scaled_mm(
            left[0], right[0].t(), left[1], recipe, right[1], recipe, layout, layout,
            output_dtype=x.dtype,
        )  # fmt: skip
        return _with_bias(product, bias)


@dataclass(frozen=True, slots=True)
class FP8Rowwise:
    """FP8 (E4M3) with a scale per row of x and of the weight: compute capability 8.9 and above.

    fast_accum: sum in the tensor cores' own, shorter accumulator, as inference on Hopper does;
    elsewhere it changes nothing.
    """

    fast_accum: bool = True

    @property
    def reference(self) -> Backend | None:
        return FP8Dequantised()

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
            output_dtype=torch.bfloat16 if short else x.dtype, use_fast_accum=self.fast_accum,
        )  # fmt: skip
        return _with_bias(product.to(x.dtype), bias)


@dataclass(frozen=True, slots=True)
class FP8Dequantised:
    """What FP8Rowwise should give, from an ordinary fp32 product of the same codes."""

    @property
    def reference(self) -> Backend | None:
        return None

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        return FP8Rowwise().pack(weight)

    def unpack(self, state: State) -> Tensor:
        return FP8Rowwise().unpack(state)

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        codes, scale = fp8.quantise_rowwise(x)
        product = _exact_product(codes, state["codes"]) * scale * state["scale"]
        return _with_bias(product.to(x.dtype), bias)


def backend_of(resolved: Resolved, *, dtype: torch.dtype, four_over_six: bool = False) -> Backend:
    """The product that a resolved precision names. dtype: the network's own, for bf16."""
    backends: dict[str, Backend] = {
        KERNELS["nvfp4"]: NVFP4Native(four_over_six),
        KERNELS["fp8"]: FP8Rowwise(),
        KERNELS["bf16"]: Plain(dtype),
        EMULATION: NVFP4Emulated(four_over_six),
    }
    return backends[resolved.backend]


def _exact_product(left: Tensor, right: Tensor) -> Tensor:
    """(M, K) and (N, K) of at most 8 significant bits -> (M, N) fp32, summed in fp32.

    On CUDA bf16 operands are multiplied as they are and leave the sum in fp32. Elsewhere they are
    cast: a bf16 product there would round the sum to bf16, and may round parts of it too.
    """
    if left.is_cuda and left.dtype == torch.bfloat16 and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return torch.mm(left.float(), right.float().t())


def _operand(state: State) -> tuple[Tensor, list[Tensor]]:
    """The packed matrix and its two scales as the kernel reads them, checked: it does not."""
    codes, scale, whole = state["codes"], state["scale"], state["global_scale"]
    rows, columns = codes.shape[0], codes.shape[1] // 8
    size = -(-rows // 128) * 128 * -(-columns // 4) * 4
    if codes.dtype != torch.uint8 or not codes.is_contiguous():
        raise ValueError(f"NVFP4 codes are two to a byte, row by row, got {codes.dtype}")
    if scale.dtype != torch.float8_e4m3fn or scale.shape != (size,):
        raise ValueError(
            f"the scales of {rows} x {columns} blocks are {size} swizzled E4M3 numbers, got "
            f"{tuple(scale.shape)} of {scale.dtype}"
        )
    if whole.dtype != torch.float32 or whole.ndim:
        raise ValueError(f"a tensor has one fp32 scale, got {tuple(whole.shape)} {whole.dtype}")
    return codes.view(torch.float4_e2m1fn_x2), [scale, whole]


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias.to(product.dtype)
