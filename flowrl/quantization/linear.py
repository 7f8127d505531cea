"""Linear layers with packed weights, which sample and do not train."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flowrl.quantization.backends import Backend, State

PACKED = "packed_"


class RolloutLinear(nn.Module):
    """y = Q(W) x + bias. No gradients.

    Everything is a buffer, scales included, so that a compiled or captured graph follows `load`,
    which overwrites in place.

    Args:
        weight: (out, in), any float dtype; of a pointwise convolution (out, in, 1, 1).
        pointwise: the layer replaces a 1x1 convolution.

    Raises:
        ValueError: a weight of another shape, or one that the backend cannot pack.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        backend: Backend,
        *,
        pointwise: bool = False,
    ):
        super().__init__()
        self.backend, self.pointwise = backend, pointwise
        self.out_features, self.in_features = _matrix(weight, pointwise).shape
        state = self._pack(weight)
        for name, value in state.items():
            self._hold(PACKED + name, value.clone())
        self.names = tuple(state)
        self._hold("bias", None if bias is None else bias.detach())

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Overwrite the packed weight by another one; fp32 loses no small update.

        Raises ValueError for another shape.
        """
        shape = tuple(_matrix(weight, self.pointwise).shape)
        if shape != (self.out_features, self.in_features):
            raise ValueError(
                f"a weight of {shape} does not fit the layer's "
                f"{(self.out_features, self.in_features)}"
            )
        for name, value in self._pack(weight).items():
            self.get_buffer(PACKED + name).copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) -> (..., out), or pointwise (B, in, H, W) -> (B, out, H, W), in x's dtype.

        Under autocast in autocast's dtype, like the layer that it replaces; but autocast is off
        inside, as it would round the fp32 parts.
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
        return y.reshape(*x.shape[:-1], self.out_features)

    bias: Tensor | None

    def _hold(self, name: str, value: Tensor | None) -> None:
        self.register_buffer(name, value, persistent=False)

    def state(self) -> State:
        """Return the packed weight, as the backend knows it."""
        return {name: getattr(self, PACKED + name) for name in self.names}

    @torch.no_grad()
    def _pack(self, weight: Tensor) -> dict[str, Tensor]:
        return self.backend.pack(_matrix(weight, self.pointwise))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RolloutLinear":
        """Follow the network to another device, not dtype: codes and scales have only one."""
        for name, value in self._buffers.items():
            if value is not None:
                self._buffers[name] = value.to(fn(value.new_empty(0)).device)
        return self


def _matrix(weight: Tensor, pointwise: bool) -> Tensor:
    """Return a weight (out, in) or, of a 1x1 convolution, (out, in, 1, 1) as a matrix, detached."""
    if weight.ndim != 2 and not (pointwise and weight.shape[2:] == (1, 1)):
        raise ValueError(
            f"a weight of {tuple(weight.shape)} is not {'1x1' if pointwise else 'a matrix'}"
        )
    return weight.detach().flatten(1)
