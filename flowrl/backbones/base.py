"""The `Backbone` protocol: everything that flowrl needs of a text-to-image pipeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.trajectory import Conditioning

# (x (B, *latent), sigma () or (B,), conditioning of B rows) -> velocity like x
VelocityField = Callable[[Tensor, Tensor, Conditioning], Tensor]


@dataclass(slots=True)
class Rows:
    """Counts the rows of the network's calls, for a backbone and its copies together."""

    computed: int = 0


class Backbone(Protocol):
    """One diffusers pipeline with its text encoders, transformer and autoencoder.

    Latents are (B, *latent): only the backbone knows what their axes mean.
    """

    pipeline: Any
    transformer: nn.Module
    device: torch.device
    rows: Rows  # of the network's calls

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Return name endings of the layers that are adapted by default."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which latents are stored and the network computes."""
        ...

    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        """Return the conditioning of the prompts, one negative prompt each."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Return the velocity of the transformer, guidance included; like x."""
        ...

    def decode(self, x0: Tensor) -> Tensor:
        """Decode latents (B, *latent) to images (B, 3, H, W) fp32 in [0, 1], differentiably."""
        ...

    def encode_images(self, images: Tensor) -> Tensor:
        """Return the latents (B, *latent) fp32 of images (B, 3, H, W) in [0, 1].

        The mode of the autoencoder's posterior, computed in fp32.
        """
        ...

    def image_size(self) -> tuple[int, int]:
        """Return height and width of the images, in pixels."""
        ...

    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of one latent, without the batch axis."""
        ...

    def sigmas(self, steps: int) -> Tensor:
        """Return the pipeline's own schedule: (steps + 1,) fp32 from 1, or just below, to 0."""
        ...


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
