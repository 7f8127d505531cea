"""Copies between the host and a device."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; to a CUDA device without waiting for what that is doing.

    Such a copy is made from pinned memory, which torch keeps until it is done. On other devices a
    copy that does not wait may read memory that was already given to something else.
    """
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
