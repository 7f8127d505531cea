"""Offloading: text encoders and autoencoder are on the device only while they work."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    gc.collect()  # modules point at each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for name, tensor in own:
                if not _elsewhere(tensor, device):
                    continue
                homes.append((module, name, tensor))
                if id(tensor) not in copies:
                    copies[id(tensor)] = _copy(tensor, device)
                setattr(module, name, copies[id(tensor)])
        yield
    finally:
        for module, name, tensor in homes:
            setattr(module, name, tensor)


@contextmanager
def autoencoder_on_device(backbone: Any) -> Iterator[None]:
    """Move the backbone's autoencoder, if its pipeline has one, to its device inside the block."""
    vae = getattr(backbone.pipeline, AUTOENCODER, None)
    with moved_to([] if vae is None else [vae], backbone.device):
        yield


def _elsewhere(tensor: Tensor, device: torch.device) -> bool:
    # A device without a number is the process's own of its kind.
    return tensor.device.type != device.type or device.index not in (None, tensor.device.index)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved
