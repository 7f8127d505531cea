"""The `Backbone` protocol: everything that flowrl needs of a text-to-image pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.trajectory import Conditioning

# (x (B, *latent), sigma () or (B,), conditioning of B rows) -> velocity like x
VelocityField = Callable[[Tensor, Tensor, Conditioning], Tensor]


class Backbone(Protocol):
    """One diffusers pipeline with its text encoders, transformer and autoencoder.

    Latents are (B, *latent): only the backbone knows what their axes mean.
    """

    pipeline: Any
    transformer: nn.Module
    lora_targets: tuple[str, ...]  # name endings of the layers that are adapted by default
    dtype: torch.dtype  # latents are stored, and the network computes, in this
    device: torch.device

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


def missing_members(backbone: Any) -> list[str]:
    """Return the names of `Backbone` members that an object lacks."""
    methods = [name for name in vars(Backbone) if not name.startswith("_")]
    return [name for name in (*Backbone.__annotations__, *methods) if not hasattr(backbone, name)]


def guided(
    network: Callable[..., Tensor], scale: float | Tensor, x: Tensor, *inputs: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the velocity with classifier-free guidance (2207.12598), in one forward.

    Args:
        network: takes the doubled latents and one doubled tensor per pair, unconditional first.
        inputs: pairs (conditional, unconditional), each (B, ...).
    """
    doubled = [torch.cat([uncond, cond]) for cond, uncond in inputs]
    uncond, cond = network(torch.cat([x, x]), *doubled).chunk(2)
    return uncond + scale * (cond - uncond)


def check_patches(height: int, width: int, unit: int) -> None:
    """Raises UserError for an image whose sides are no multiples of `unit` pixels."""
    for name, size in (("height", height), ("width", width)):
        if size % unit:
            raise UserError(f"pipeline.{name} is {size}, expected a multiple of {unit}")


def shift_for(tokens: int, config: Mapping[str, Any], *, max_shift: float) -> float:
    """Return `mu` of a scheduler's dynamic shifting; `max_shift` if its configuration has none."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )


@contextmanager
def in_fp32(vae: Any) -> Iterator[Any]:
    """Let an autoencoder compute in fp32 inside the block."""
    own: torch.dtype = vae.dtype
    nn.Module.to(vae, torch.float32)  # diffusers' own warns of layers that are fp32 already
    try:
        with torch.autocast(vae.device.type, enabled=False):
            yield vae
    finally:
        nn.Module.to(vae, own)
