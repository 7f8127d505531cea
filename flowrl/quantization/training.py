"""Training in the precision of the rollout: both compute with the same packed weights.

Jet-RL (2601.14243): when pictures are drawn in few bits and learned from in many, the policy that
learns is not the one that drew, and its ratio to itself is not 1. Here the frozen weights are
packed once, before adapters are added, and the adapters stay beside them in full precision.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.quantization.backends import Backend
from flowrl.quantization.layer_rules import LayerChoice
from flowrl.quantization.linear import RolloutLinear


class SamePrecisionLinear(nn.Linear):
    """y = Q(W) Q(x) + bias of a frozen linear layer, and dx = dy Q(W): straight-through.

    weight, bias: those of `linear` themselves, exact; no gradient reaches them. With `exact` set
    it is that layer again, bit for bit. The packed weights are in no state dict.
    """

    def __init__(self, linear: nn.Linear, backend: Backend):
        bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = RolloutLinear(linear.weight, linear.bias, backend)
        self.exact = False

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), under autocast in its dtype."""
        if self.exact:
            return F.linear(input, self.weight, self.bias)
        return _StraightThrough.apply(input, self)  # type: ignore[no-any-return]

    def quantised_weight(self) -> Tensor:
        """Q(W), (out, in) fp32, made anew: nothing is kept for the backward pass."""
        return self.packed.backend.unpack(self.packed.state())

    def plain(self) -> nn.Linear:
        """A linear layer with the exact weight and bias themselves."""
        bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, bias, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SamePrecisionLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return layer.packed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (dy,) = grads
        return (dy @ ctx.layer.quantised_weight().to(dy.dtype)).to(ctx.dtype), None


def quantise_base(network: nn.Module, choices: Sequence[LayerChoice], backend: Backend) -> None:
    """Replace the layers that have a format, in place, before adapters are added.

    Layers that are packed already are packed anew, from their exact weights. Raises UserError for
    a layer that is no plain linear layer, such as one with an adapter.
    """
    for choice in choices:
        if choice.format is None:
            continue
        layer = network.get_submodule(choice.name)
        if not isinstance(layer, nn.Linear) or type(layer) not in (nn.Linear, SamePrecisionLinear):
            raise UserError(
                f"layer {choice.name} is a {type(layer).__name__}, and only linear layers without "
                "adapters are trained in low precision: load the pipeline anew, or keep the layer"
            )
        network.set_submodule(choice.name, SamePrecisionLinear(layer, backend))


@contextmanager
def exact(network: nn.Module) -> Iterator[None]:
    """Inside, the network computes with its exact weights; nothing changes without packed ones."""
    layers = [layer for _, layer in same_precision_layers(network)]
    before = [layer.exact for layer in layers]
    for layer in layers:
        layer.exact = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.exact = was


def put_back(network: nn.Module) -> None:
    """Plain linear layers again, below adapters too: the packed weights are dropped."""
    for name, layer in list(same_precision_layers(network)):
        network.set_submodule(name, layer.plain())


@contextmanager
def packed_within(network: nn.Module) -> Iterator[None]:
    """Outside, however the block ends, the network has plain linear layers."""
    try:
        yield
    finally:
        put_back(network)


def same_precision_layers(network: nn.Module) -> Iterator[tuple[str, SamePrecisionLinear]]:
    """With their names, in which an adapter leaves its marks."""
    for name, module in network.named_modules():
        if isinstance(module, SamePrecisionLinear):
            yield name, module
