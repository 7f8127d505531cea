"""Activations scaled row by row, so that a row's result does not depend on the rows beside it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.quantization.backends import Backend, State


@dataclass(frozen=True, slots=True)
class PerRow:
    """Another backend on rows that are divided by their largest magnitude, undone afterwards.

    A backend that scales a whole call by its largest magnitude then finds 1 in every call. It
    costs one more pass over the activations, and rounds the result once more in x's dtype.
    """

    backend: Backend

    @property
    def reference(self) -> Backend | None:
        reference = self.backend.reference
        return None if reference is None else PerRow(reference)

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        return self.backend.pack(weight)

    def unpack(self, state: State) -> Tensor:
        return self.backend.unpack(state)

    def matmul(self, x: Tensor, state: State, bias: Tensor | None = None) -> Tensor:
        rows = x.float()
        # A row of zeros stays one: the smallest normal number divides it.
        largest = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        product = self.backend.matmul((rows / largest).to(x.dtype), state).float() * largest
        return (product if bias is None else product + bias.float()).to(x.dtype)
