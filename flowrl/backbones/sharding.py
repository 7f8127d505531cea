"""Split the frozen transformer over processes with FSDP2, so that each holds a part of it.

Each block is gathered while it computes. Adapters are added later and stay whole on every process:
their optimiser, average, gradients and files know nothing of this.
"""

import json
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowrl.utils.distributed import Runtime

NETWORK = "transformer"  # diffusers' name of the component


def shard_network(network: nn.Module, runtime: Runtime, over: Literal["node", "all"]) -> None:
    """Replace a network's weights by this process's shard of the main process's weights.

    It goes block by block, so that only the main process ever holds the whole network. All
    processes call it together; in all but the main one the network may be on the meta device.

    Args:
        over: "all" shards over all processes; "node" over those of one machine, which then gather
            only among themselves.
    """
    from torch.distributed.fsdp import fully_shard

    _take_dtypes(network, runtime)
    mesh = _mesh(runtime, over)
    lists = [child for child in network.children() if isinstance(child, nn.ModuleList)]
    for module in [*(block for blocks in lists for block in blocks), network]:
        _materialise(module, runtime)
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    network.requires_grad_(False)
    runtime.in_lockstep = True


def _mesh(runtime: Runtime, over: Literal["node", "all"]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    size, kind = runtime.world_size, runtime.device.type
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if over == "all" or local == size:
        return init_device_mesh(kind, (size,))
    # What is frozen has no gradient to share with the other machines: each is a mesh of its own.
    # PEFT takes a layer in parts for one of tensor parallelism unless the mesh has this name.
    machines = init_device_mesh(kind, (size // local, local), mesh_dim_names=("machine", "fsdp"))
    return machines["fsdp"]


def _take_dtypes(network: nn.Module, runtime: Runtime) -> None:
    """Give a network on the meta device the number formats that the main process has loaded."""
    here = {name: str(tensor.dtype)[6:] for name, tensor in _tensors(network)}
    formats = json.loads(runtime.from_main(lambda: json.dumps(here).encode()))
    for name, tensor in _tensors(network):
        if tensor.is_meta and name in formats:
            tensor.data = tensor.data.to(getattr(torch, formats[name]))


def _materialise(module: nn.Module, runtime: Runtime) -> None:
    """Give a module's own tensors the main process's values, on the device.

    What is sharded already is left alone.
    """
    from torch.distributed.tensor import DTensor

    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, tensor in store.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                shared = runtime.same_as_main(tensor)
                if isinstance(tensor, nn.Parameter):
                    shared = nn.Parameter(shared, requires_grad=False)
                store[name] = shared  # pyright: ignore[reportArgumentType]


def _tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters()
    yield from network.named_buffers()
