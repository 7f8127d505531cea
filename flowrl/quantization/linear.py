"""A linear layer for rollouts: packed weights that are overwritten in place after every update."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.quantization.backends import Backend, State

PACKED = "packed_"


class RolloutLinear(nn.Module):
    """y = Q(W) x + bias, and + strength B (A x) where there is a side path. No gradients.

    weight: (out, in), any float dtype, packed by `backend`; bias: (out,) or None. side: the LoRA
    factors A (r, in), B (out, r) and their strength, computed in A's dtype as PEFT does.
    pointwise: replaces a 1x1 convolution, weight (out, in, 1, 1).
    Everything is a buffer, scales and strength included, so that a compiled or captured graph
    follows `load` and `load_side`, which keep every address. shared: hold the weight as it was
    given where the backend only casts it, and never overwrite it; packed: what the backend has
    packed of it already, to be shared in place of packing it again.
    Raises ValueError for a weight of another shape, or one that the backend cannot pack.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        backend: Backend,
        *,
        side: tuple[Tensor, Tensor, float] | None = None,
        pointwise: bool = False,
        shared: bool = False,
        packed: State | None = None,
    ):
        super().__init__()
        self.backend, self.pointwise = backend, pointwise
        self.shared = shared or packed is not None
        self.out_features, self.in_features = _matrix(weight, pointwise).shape
        state = self._pack(weight) if packed is None else packed
        for name, value in state.items():
            self._hold(PACKED + name, value if self.shared else value.clone())
        self.names = tuple(state)
        self._hold("bias", None if bias is None else bias.detach())
        a, b, strength = side or (None, None, None)
        self._hold("side_a", None if a is None else a.detach().clone())
        self._hold("side_b", None if b is None else b.detach().clone())
        self._hold("strength", None if a is None else _scalar(strength, a.device))

    # --- updates ------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Pack another weight of the same shape over this one; fp32 loses no small update.

        Raises ValueError for another shape, and where the weight is shared.
        """
        if self.shared:
            raise ValueError("this layer shares its weight, which is not its own to overwrite")
        shape = tuple(_matrix(weight, self.pointwise).shape)
        if shape != (self.out_features, self.in_features):
            raise ValueError(
                f"a weight of {shape} does not fit the layer's "
                f"{(self.out_features, self.in_features)}"
            )
        for name, value in self._pack(weight).items():
            self.get_buffer(PACKED + name).copy_(value)

    @torch.no_grad()
    def load_side(self, a: Tensor, b: Tensor) -> None:
        """Copy other LoRA factors over those of the side path.

        Raises ValueError for other shapes, and where the layer has no side path.
        """
        if self.side_a is None or self.side_b is None:
            raise ValueError("this layer has no side path: give `side` when it is made")
        if a.shape != self.side_a.shape or b.shape != self.side_b.shape:
            raise ValueError(
                f"factors of {tuple(a.shape)} and {tuple(b.shape)} do not fit the side path's "
                f"{tuple(self.side_a.shape)} and {tuple(self.side_b.shape)}"
            )
        self.side_a.copy_(a)
        self.side_b.copy_(b)

    # --- product ------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out); pointwise: (B, in, H, W) -> (B, out, H, W). In x's dtype.

        Under autocast in its dtype, like the layer that it replaces, but computed without:
        autocast would round the fp32 parts.
        """
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
            with torch.autocast(kind, enabled=False):
                return self._forward(x)
        return self._forward(x)

    @torch.no_grad()
    def _forward(self, x: Tensor) -> Tensor:
        if not self.pointwise:
            return self._product(x)
        y = self._product(x.movedim(1, -1)).movedim(-1, 1)
        return y.contiguous() if x.is_contiguous() else y  # else channels last, as x

    def _product(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        y = self.backend.matmul(rows, self.state(), self.bias)
        if self.side_a is not None and self.side_b is not None:
            inner = F.linear(rows.to(self.side_a.dtype), self.side_a)
            y = (y + F.linear(inner, self.side_b) * self.strength).to(x.dtype)
        return y.reshape(*x.shape[:-1], self.out_features)

    # --- buffers ------------------------------------------------------------------------------

    bias: Tensor | None
    side_a: Tensor | None
    side_b: Tensor | None
    strength: Tensor

    def _hold(self, name: str, value: Tensor | None) -> None:
        self.register_buffer(name, value, persistent=False)

    def state(self) -> State:
        """The packed weight, as the backend knows it."""
        return {name: getattr(self, PACKED + name) for name in self.names}

    @torch.no_grad()
    def _pack(self, weight: Tensor) -> dict[str, Tensor]:
        return self.backend.pack(_matrix(weight, self.pointwise))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RolloutLinear":
        """Moves follow the network's; casts do not: codes and scales have one dtype only."""
        for name, value in self._buffers.items():
            if value is not None:
                self._buffers[name] = value.to(fn(value.new_empty(0)).device)
        return self

    def extra_repr(self) -> str:
        kind = type(self.backend).__name__
        return f"{self.in_features}, {self.out_features}, {kind}"


def _scalar(value: float | None, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def _matrix(weight: Tensor, pointwise: bool) -> Tensor:
    """(out, in) or, of a 1x1 convolution, (out, in, 1, 1) -> (out, in), detached."""
    if weight.ndim != 2 and not (pointwise and weight.shape[2:] == (1, 1)):
        raise ValueError(
            f"a weight of {tuple(weight.shape)} is not {'1x1' if pointwise else 'a matrix'}"
        )
    return weight.detach().flatten(1)
