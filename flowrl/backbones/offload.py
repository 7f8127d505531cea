"""Offloading: text encoders and autoencoder are on the device only while they work."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ENCODER, AUTOENCODER = "text_encoder", "vae"  # how the names of diffusers' components begin


def encoders_of(pipeline: Any) -> list[nn.Module]:
    """Return the text encoders of a pipeline; none for an object that is no pipeline."""
    parts = getattr(pipeline, "components", {})
    return [part for name, part in parts.items() if name.startswith(ENCODER) and part is not None]


def are_freed(pipeline: Any) -> bool:
    """Whether a pipeline has places for text encoders, all of them empty."""
    names = [name for name in getattr(pipeline, "components", {}) if name.startswith(ENCODER)]
    return bool(names) and not encoders_of(pipeline)


def free_encoders(pipeline: Any) -> None:
    """Remove the text encoders from the pipeline and free their memory."""
    for name in [name for name in pipeline.components if name.startswith(ENCODER)]:
        setattr(pipeline, name, None)
    free_device_memory()


def free_device_memory() -> None:
    """Free what nothing holds any more, and give the GPU back what torch keeps of it."""
    gc.collect()  # modules point at each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def place_to_encode(backbone: Any) -> torch.device:
    """Return where text encoders are to work: never on a device that the transformer is on.

    That is the backbone's device while the transformer is not there yet, or where encoders that
    live there stay; later, the CPU.
    """
    network = getattr(backbone, "transformer", None)
    first = next(iter(network.parameters()), None) if isinstance(network, nn.Module) else None
    if first is None or _elsewhere(first, backbone.device):
        return backbone.device
    homes = [
        tensor.device for part in encoders_of(backbone.pipeline) for tensor in part.parameters()
    ]
    return homes[0] if homes else backbone.device


def place_pipeline(pipeline: Any, device: torch.device, away: Sequence[str]) -> Any:
    """Move a pipeline to the device, but components whose names begin as in `away` to the CPU."""
    if not away:
        return pipeline.to(device)
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module):
            target = torch.device("cpu") if name.startswith(tuple(away)) else device
            # What is there already is left alone: weights of 8 bits refuse to be moved.
            if any(_elsewhere(tensor, target) for tensor in part.parameters()):
                part.to(target)
    return pipeline


@contextmanager
def moved_to(parts: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Move the modules' tensors to `device` inside the block, and put the original ones back after.

    Nothing is copied back, hence only for frozen weights.
    """
    homes: list[tuple[nn.Module, str, Tensor]] = []
    copies: dict[int, Tensor] = {}  # one for weights that several layers share
    try:
        for module in (module for part in parts for module in part.modules()):
            parameters = module.named_parameters(recurse=False)
            for name, tensor in (*parameters, *module.named_buffers(recurse=False)):
                if not _elsewhere(tensor, device):
                    continue
                homes.append((module, name, tensor))
                if id(tensor) not in copies:
                    copy = tensor.detach().to(device)
                    if isinstance(tensor, nn.Parameter):
                        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    copies[id(tensor)] = copy
                setattr(module, name, copies[id(tensor)])
        yield
    finally:
        for module, name, tensor in homes:
            setattr(module, name, tensor)


MARGIN = 2 * 2**30  # bytes, for what encoders make of their texts


@contextmanager
def encoders_on_device(parts: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Move text encoders to `device` inside the block; if memory is short, each to its forwards.

    They are there together where they fit, which saves copies.
    """
    size = sum(tensor.nbytes for part in parts for tensor in part.parameters())
    free = size + MARGIN  # without a GPU there is always enough
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + cached
    if size + MARGIN <= free:
        with moved_to(parts, device):
            yield
        return
    visits: dict[nn.Module, AbstractContextManager[None]] = {}

    def arrive(part: nn.Module, _: Any) -> None:
        visits[part] = moved_to([part], device)
        visits[part].__enter__()

    def leave(part: nn.Module, *_: Any) -> None:
        visits.pop(part).__exit__(None, None, None)

    hooks = [part.register_forward_pre_hook(arrive) for part in parts]
    hooks += [part.register_forward_hook(leave, always_call=True) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _elsewhere(tensor: Tensor, device: torch.device) -> bool:
    # A device without a number is the process's own of its kind.
    return tensor.device.type != device.type or device.index not in (None, tensor.device.index)
