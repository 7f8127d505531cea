"""What flowrl asks of a text-to-image pipeline; everything model-specific stays behind this."""

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

    Latents are opaque (B, *latent): only the backbone knows what their axes mean. A backbone whose
    transformer is none of those in `lowbit/rules.py` may also have `layer_rules`, a `LayerRules`
    with what stays exact where a precision asks for few bits.
    """

    pipeline: Any
    transformer: nn.Module
    lora_targets: tuple[str, ...]  # name endings of the layers that are adapted by default
    dtype: torch.dtype  # latents are stored, and the network computes, in this
    device: torch.device

    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        """Texts, one negative per prompt -> conditioning of len(prompts) rows."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        """Velocity of the transformer as it stands, guidance included; like x."""
        ...

    def decode(self, x0: Tensor) -> Tensor:
        """Clean latents (B, *latent) -> images (B, 3, H, W) fp32 in [0, 1], with their graph."""
        ...

    def encode_images(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1] of the pipeline's size -> clean latents (B, *latent) fp32.

        The mode of the autoencoder's posterior, computed in fp32: `decode` gives the images back
        as well as the autoencoder can.
        """
        ...

    def image_size(self) -> tuple[int, int]:
        """Height and width of the images, in pixels."""
        ...

    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the batch axis."""
        ...

    def sigmas(self, steps: int) -> Tensor:
        """The pipeline's own schedule: (steps + 1,) fp32 from 1, or just below it, to 0."""
        ...


def members() -> list[str]:
    """The names of what a `Backbone` has to have."""
    methods = [name for name in vars(Backbone) if not name.startswith("_")]
    return [*Backbone.__annotations__, *methods]


def members_lacking(backbone: Any) -> list[str]:
    """What an object has not of a `Backbone`'s members, by name."""
    return [name for name in members() if not hasattr(backbone, name)]


def guided(
    network: Callable[..., Tensor], scale: float | Tensor, x: Tensor, *inputs: tuple[Tensor, Tensor]
) -> Tensor:
    """Classifier-free guidance (Ho and Salimans 2022) as diffusers computes it, in one forward.

    inputs: pairs (conditional, unconditional), each (B, ...); the unconditional half comes first
    in the batch. `network` takes the doubled latents and one doubled tensor per pair.
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
    """`mu` of a scheduler's dynamic shifting for so many image tokens, as in diffusers' pipelines.

    max_shift: where the scheduler's configuration has none.
    """
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )


@contextmanager
def to_fp32_and_back(vae: Any) -> Iterator[Any]:
    """An autoencoder that computes in fp32 for a while; latents to learn from are worth it."""
    own: torch.dtype = vae.dtype
    nn.Module.to(vae, torch.float32)  # diffusers' own warns of layers that are fp32 already
    try:
        with torch.autocast(vae.device.type, enabled=False):
            yield vae
    finally:
        nn.Module.to(vae, own)
