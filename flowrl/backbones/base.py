"""What backbones share: the type of a velocity, the count of rows, and decoding in fp32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.trajectory import Conditioning

# (x (B, *latent), sigma () or (B,), conditioning of B rows) -> velocity like x
VelocityField = Callable[[Tensor, Tensor, Conditioning], Tensor]


@dataclass(slots=True)
class Rows:
    """Counts the rows of the network's calls, for a backbone and its copies together."""

    computed: int = 0


@contextmanager
def in_fp32(vae: Any) -> Iterator[Any]:
    """Let an autoencoder compute in fp32 inside the block."""
    dtype: torch.dtype = vae.dtype
    nn.Module.to(vae, torch.float32)  # diffusers' own warns of layers that are fp32 already
    try:
        with torch.autocast(vae.device.type, enabled=False):
            yield vae
    finally:
        nn.Module.to(vae, dtype)
