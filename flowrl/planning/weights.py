"""Bytes of what lies in memory whatever is computed: weights, adapters, optimiser, copies."""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from flowrl.planning.network import Module, as_module, build, ends_in
from flowrl.planning.setup import Copy, Setup
from flowrl.planning.sizes import Size
from flowrl.planning.tracking import nbytes, on_meta
from flowrl.quantization.backends import Backend, FP8Rowwise, NVFP4Emulated, NVFP4Native
from flowrl.quantization.layer_rules import choose_layers, matrices, matrix_shape, rules_of

FP32 = 4
MOMENTS = 2  # of AdamW, each in the adapter's fp32

# Bytes beside the codes of a base in few bits.
NF4_GROUP, NF4_SCALE = 64, 4  # an fp32 maximum for 64 weights (2305.14314), not quantised itself
INT8_SCALE = {"bitsandbytes": 4, "torchao": 2}  # for an output, fp32 or in the weights' dtype

BACKENDS: dict[str, Backend] = {
    "nvfp4": NVFP4Native(),
    "nvfp4-emulated": NVFP4Emulated(),
    "fp8": FP8Rowwise(),
}

AUTO: tuple[Literal["fp8", "bf16"], ...] = ("fp8", "bf16")


@lru_cache(maxsize=8)
def full_network(module: Module, dtype: torch.dtype) -> nn.Module:
    """All blocks, on the meta device, without an adapter: to be looked at only."""
    return build(module, dtype)


def network_of(size: Size, setup: Setup) -> nn.Module:
    return full_network(as_module(size.transformer, size.config), setup.torch_dtype)


def transformer_bytes(network: nn.Module, setup: Setup) -> int:
    """The frozen weights and tables; with `base_bits` the linear layers' weights in few bits."""
    whole = nbytes([*network.parameters(), *network.buffers()])
    if setup.base_bits is None:
        return whole
    itemsize = setup.torch_dtype.itemsize
    for layer in linear_layers(network):
        rows, columns = layer.weight.shape
        few = few_bits_bytes(rows, columns, setup.base_bits, setup.base_library)
        whole += few - rows * columns * itemsize
    return whole


def few_bits_bytes(rows: int, columns: int, bits: int, library: str) -> int:
    """A weight (rows, columns) with its scales, in a library's format."""
    codes = rows * columns * bits // 8
    if bits == 8:
        return codes + rows * INT8_SCALE[library]
    return codes + -(-rows * columns // NF4_GROUP) * NF4_SCALE


def linear_layers(network: nn.Module) -> list[nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Linear)]


def widest_bytes(network: nn.Module, setup: Setup) -> int:
    """Few bits are turned back layer by layer to be multiplied: the largest in the dtype."""
    if setup.base_bits is None and setup.training_copy is None:
        return 0
    largest = max(layer.weight.numel() for layer in linear_layers(network))
    # Training in few bits makes its straight-through weight in fp32 and casts it.
    more = 0 if setup.training_copy is None else FP32
    return largest * (setup.torch_dtype.itemsize + more)


def copy_bytes(network: nn.Module, made: Copy, setup: Setup) -> int:
    """What a twin holds beside the policy's own tensors, see `rollout_model.Twin`."""
    if made.format == "auto":
        either = (replace(made, format=format) for format in AUTO)
        return max(copy_bytes(network, one, setup) for one in either)
    packed = packed_layers(network, made)
    found = sum(packed.values())
    for name, layer in matrices(network):
        if ends_in(name, setup.targets):
            rows, columns = matrix_shape(layer)
            if not made.merge:
                found += setup.rank * (rows + columns) * FP32
            elif name not in packed:
                found += rows * columns * setup.torch_dtype.itemsize
    return found


def packed_layers(network: nn.Module, made: Copy) -> dict[str, int]:
    """Bytes of each layer that is packed, as its backend packs a weight of that shape."""
    if made.format == "bf16":
        return {}
    backend = BACKENDS[made.format]
    choices = choose_layers(
        network, rules_of(network), made.format, min_dim=made.min_dim, keep=made.keep
    )
    by_shape = {
        shape: nbytes(backend.pack(on_meta(*shape, dtype=torch.float32)).values())
        for shape in {c.shape for c in choices if c.format}
    }
    return {c.name: by_shape[c.shape] for c in choices if c.format}


def adapted_bytes(network: nn.Module, setup: Setup) -> int:
    """The weights below the adapter, once more in the dtype: folded ones lie beside the frozen."""
    return sum(
        layer.weight.numel() * setup.torch_dtype.itemsize
        for name, layer in matrices(network)
        if ends_in(name, setup.targets)
    )
