"""Which layers of a network are quantised; `backbones.families` has the published rules."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from flowrl.backbones.families import LayerRules
from flowrl.errors import UserError

Matrix = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """What becomes of a layer's weight."""

    name: str  # without PEFT's parts
    shape: tuple[int, int]  # (out, in), a kernel being part of the input
    quantised: bool  # else exact

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


def choose_layers(
    network: nn.Module, rules: LayerRules, *, min_dim: int | None = None
) -> tuple[LayerChoice, ...]:
    """Choose for every linear layer and convolution of the network, adapted or not, in order.

    Args:
        min_dim: in place of that of the rules; sides must be divisible in any case.

    Raises:
        UserError: nothing is to be quantised.
    """
    least = rules.min_dim if min_dim is None else min_dim
    choices, longest = [], 0
    for name, layer in matrices(network):
        rows, columns = shape = matrix_shape(layer)
        linear = isinstance(layer, nn.Linear) or (rules.pointwise and is_pointwise(layer))
        may = linear and not any(re.search(pattern, name) for pattern in rules.keep)
        may = may and columns % rules.in_multiple == rows % rules.out_multiple == 0
        longest = max(longest, *shape) if may else longest
        quantised = may and max(shape) > least
        choices.append(LayerChoice(name=name, shape=shape, quantised=quantised))
    if not any(choice.quantised for choice in choices):
        raise UserError(
            f"no layer of {type(network).__name__} is left to be quantised: the longest side of "
            f"those that could be is {longest}, and pipeline.min_dim is {least}: set that "
            "lower, or use bf16"
        )
    return tuple(choices)


def matrices(network: nn.Module) -> Iterator[tuple[str, Matrix]]:
    """Yield linear layers and convolutions by name; of an adapted one the layer below."""
    from peft.tuners.lora import LoraLayer

    inside: set[nn.Module] = set()
    for name, module in network.named_modules():
        if module in inside:
            continue
        if isinstance(module, LoraLayer):
            inside.update(network.get_submodule(name).modules())
            module = module.get_base_layer()
        if isinstance(module, Matrix):
            yield name, module


def matrix_shape(layer: Matrix) -> tuple[int, int]:
    """Return (out, in) of the weight; the input of a convolution is what its kernel sees."""
    weight = layer.weight
    return weight.shape[0], weight[0].numel()


def is_pointwise(layer: nn.Module) -> bool:
    """Whether a layer is a 1x1 convolution, not a depthwise one: linear at every pixel."""
    return (
        isinstance(layer, nn.Conv2d)
        and layer.groups == 1
        and layer.kernel_size == layer.stride == (1, 1)
        and not any(layer.padding)
    )


def quantised_share(choices: Sequence[LayerChoice]) -> float:
    """Return the share of all linear layers' and convolutions' weights that is quantised."""
    return sum(c.size for c in choices if c.quantised) / sum(c.size for c in choices)
