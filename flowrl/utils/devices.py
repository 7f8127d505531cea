"""Copies between the host and a device."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without waiting for what the device is doing.

    From pinned memory, which torch keeps until the copy is made; from elsewhere a copy waits.
    """
    from_host = tensor.device.type == "cpu"
    if from_host and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=from_host)  # to the host it has to wait
