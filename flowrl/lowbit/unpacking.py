"""The weight that a backend really multiplies with, back from its packed tensors."""

from torch import Tensor

from flowrl.lowbit.backends import (
    Backend,
    FP8Dequantised,
    FP8Rowwise,
    NVFP4Emulated,
    NVFP4Native,
    Plain,
    State,
)
from flowrl.lowbit.per_row import PerRow
from flowrl.numerics import e2m1, nvfp4
from flowrl.numerics.swizzle import unswizzle


def unpack(backend: Backend, state: State) -> Tensor:
    """Q(W), (out, in) fp32, of what `backend.pack(W)` gave. Raises ValueError for a backend that
    is not one of flowrl's own."""
    if isinstance(backend, PerRow):
        return unpack(backend.backend, state)
    if isinstance(backend, Plain):
        return state["weight"].float()
    if isinstance(backend, FP8Rowwise | FP8Dequantised):
        return state["codes"].float() * state["scale"].reshape(-1, 1)
    if isinstance(backend, NVFP4Emulated):
        return state["values"].float() * state["global_scale"]
    if isinstance(backend, NVFP4Native):
        codes = e2m1.unpack(state["codes"], "low_first")
        rows, columns = codes.shape
        scale = unswizzle(state["scale"], rows, columns // nvfp4.BLOCK)
        packed = nvfp4.Quantised(codes=codes, scale=scale, global_scale=state["global_scale"])
        return nvfp4.dequantise(packed)
    raise ValueError(f"weights packed by {type(backend).__name__} cannot be unpacked")
