"""Linear layers with packed weights: `RolloutLinear` samples, `SamePrecisionLinear` also trains."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.quantization.backends import Backend, State
from flowrl.quantization.layer_rules import LayerChoice

PACKED = "packed_"


class RolloutLinear(nn.Module):
    """y = Q(W) x + bias. No gradients.

    Everything is a buffer, scales included, so that a compiled or captured graph follows `load`,
    which overwrites in place.

    Args:
        weight: (out, in), any float dtype; of a pointwise convolution (out, in, 1, 1).
        pointwise: the layer replaces a 1x1 convolution.

    Raises:
        ValueError: a weight that the backend cannot pack.
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
        self.out_features, self.in_features = weight.shape[:2]
        state = self._pack(weight)
        for name, value in state.items():
            # A plain weight is only cast.
            self.register_buffer(PACKED + name, value.clone(), persistent=False)
        self.names = tuple(state)
        bias = None if bias is None else bias.detach()
        self.register_buffer("bias", bias, persistent=False)

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Overwrite the packed weight by another one of its shape; fp32 loses no small update."""
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

    def state(self) -> State:
        """Return the packed weight, as the backend knows it."""
        return {name: getattr(self, PACKED + name) for name in self.names}

    @torch.no_grad()
    def _pack(self, weight: Tensor) -> dict[str, Tensor]:
        return self.backend.pack(weight.detach().flatten(1))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RolloutLinear":
        """Follow the network to another device, not dtype: codes and scales have only one."""
        for name, value in self._buffers.items():
            if value is not None:
                self._buffers[name] = value.to(fn(value.new_empty(0)).device)
        return self


# --- training in the precision of the rollout ---------------------------------------------------


class SamePrecisionLinear(nn.Linear):
    """y = Q(W) Q(x) + bias of a frozen linear layer, and dx = dy Q(W): straight-through.

    With `quantize_gradients` dx = Q(dy) Q(W), emulated: dy is rounded in groups along out, the
    weight stays rounded along in, and the product is an ordinary one.

    weight and bias are those of `linear` itself, exact and without gradients. With `exact` set it
    is that layer again, bit for bit. The packed weights are in no state dict.
    """

    def __init__(self, linear: nn.Linear, backend: Backend, quantize_gradients: bool = False):
        bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = RolloutLinear(linear.weight, linear.bias, backend)
        self.exact, self.quantize_gradients = False, quantize_gradients

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) -> (..., out), under autocast in its dtype."""
        if self.exact:
            return F.linear(input, self.weight, self.bias)
        return _StraightThrough.apply(input, self)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SamePrecisionLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return layer.packed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy,), packed = grads, ctx.layer.packed
        if ctx.layer.quantize_gradients:
            dy = packed.backend.round(dy.flatten(0, -2)).view(dy.shape).to(dy.dtype)
        weight = packed.backend.unpack(packed.state())  # anew: nothing is kept for this
        return (dy @ weight.to(dy.dtype)).to(ctx.dtype), None


def quantise_base(
    network: nn.Module,
    choices: Sequence[LayerChoice],
    backend: Backend,
    quantize_gradients: bool = False,
) -> None:
    """Replace the layers that are quantised, in place, before adapters are added.

    Packed layers are packed again, from their exact weights. Raises UserError for a layer that is
    not an ordinary linear layer, such as one with an adapter.
    """
    for choice in choices:
        if not choice.quantised:
            continue
        layer = network.get_submodule(choice.name)
        if not isinstance(layer, nn.Linear) or type(layer) not in (nn.Linear, SamePrecisionLinear):
            raise UserError(
                f"layer {choice.name} is a {type(layer).__name__}, and only linear layers without "
                "adapters are trained in low precision: load the pipeline anew, or keep the layer"
            )
        network.set_submodule(choice.name, SamePrecisionLinear(layer, backend, quantize_gradients))


@contextmanager
def exact_weights(network: nn.Module) -> Iterator[None]:
    """Compute with the network's exact weights inside the block."""
    layers = [module for module in network.modules() if isinstance(module, SamePrecisionLinear)]
    for layer in layers:
        layer.exact = True
    try:
        yield
    finally:
        for layer in layers:
            layer.exact = False
