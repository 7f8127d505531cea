"""FLUX.1, as diffusers runs it."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.backbones import sd3
from flowrl.backbones.base import check_patches, in_fp32, shift_for
from flowrl.errors import UserError
from flowrl.trajectory import Conditioning

# Flow-GRPO's list for FLUX (2505.05470): attention and feed-forward of both streams. Of the
# single-stream blocks only the attention's inputs match these endings.
LORA_TARGETS = (
    *sd3.LORA_TARGETS,
    "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
)  # fmt: skip

TOKENS = 512  # of T5, at most


def pack_latents(z: Tensor) -> Tensor:
    """Pack latents (B, C, h, w) -> (B, h / 2 * w / 2, 4 C): a token holds 2 x 2 latents."""
    return torch.nn.functional.pixel_unshuffle(z, 2).flatten(2).transpose(1, 2)


def unpack_latents(x: Tensor, rows: int, columns: int) -> Tensor:
    """Unpack latents (B, rows * columns, 4 C) -> (B, C, 2 rows, 2 columns)."""
    return torch.nn.functional.pixel_shuffle(x.transpose(1, 2).unflatten(2, (rows, columns)), 2)


class Flux:
    """A `FluxPipeline` behind the `Backbone` protocol.

    Latents are packed, (B, tokens, 4 C), see `pack_latents`. The second forward of the pipeline's
    `true_cfg_scale` is not supported.

    Args:
        guidance: the pipeline's `guidance_scale`, an input of the distilled network; networks
            without this input (FLUX.1-schnell) ignore it.
        max_sequence_length: T5 tokens.
        height, width: pixels, or None for the autoencoder's size.

    Raises:
        UserError: a size that cannot be packed, too many tokens, or negative prompts.
    """

    lora_targets = LORA_TARGETS

    def __init__(
        self,
        pipeline,
        *,
        guidance: float = 3.5,
        max_sequence_length: int = 512,
        height: int | None = None,
        width: int | None = None,
    ):
        if max_sequence_length > TOKENS:
            raise UserError(
                f"pipeline.max_sequence_length is {max_sequence_length}, but FLUX.1 was trained "
                f"with {TOKENS} tokens and its pipeline takes no more: set it to {TOKENS} or less"
            )
        self.pipeline = pipeline
        pipeline.vae.requires_grad_(False)  # gradients go through it, and none is for its weights
        self.transformer = pipeline.transformer
        self.dtype: torch.dtype = pipeline.transformer.dtype
        self.device: torch.device = pipeline.transformer.device
        self.guidance = guidance
        self.max_sequence_length = max_sequence_length
        native = own_side(pipeline)
        self.height, self.width = height or native, width or native
        check_patches(self.height, self.width, 2 * pipeline.vae_scale_factor)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        check_negatives(negatives)
        embeds, pooled, _ = self.pipeline.encode_prompt(
            list(prompts), None, max_sequence_length=self.max_sequence_length, device=self.device
        )
        return Conditioning(tensors={"embeds": embeds, "pooled": pooled})

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        embeds = cond.tensors["embeds"]
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(x),), self.guidance, device=x.device, dtype=torch.float32)
        return self.transformer(
            hidden_states=x.to(self.dtype),
            # Rounded where the pipeline rounds it.
            timestep=(sigma * 1000).expand(len(x)).to(self.dtype) / 1000,
            guidance=guidance,
            encoder_hidden_states=embeds,
            pooled_projections=cond.tensors["pooled"],
            txt_ids=torch.zeros(embeds.shape[1], 3, device=x.device, dtype=self.dtype),
            img_ids=self._image_ids(x.device),
            return_dict=False,
        )[0]

    def _image_ids(self, device: torch.device) -> Tensor:
        """Return zero, row and column of each token: (tokens, 3)."""
        rows, columns = self._grid()
        places = torch.cartesian_prod(
            torch.arange(rows, device=device), torch.arange(columns, device=device)
        )
        return torch.nn.functional.pad(places, (1, 0)).to(self.dtype)

    def _grid(self) -> tuple[int, int]:
        unit = 2 * self.pipeline.vae_scale_factor
        return self.height // unit, self.width // unit

    def decode(self, x0: Tensor) -> Tensor:
        vae = self.pipeline.vae
        z = unpack_latents(x0, *self._grid()).to(vae.dtype)
        z = z / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(z, return_dict=False)[0] * 0.5 + 0.5).clamp(0, 1).float()

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        with in_fp32(self.pipeline.vae) as vae:
            pixels = images.to(self.device, torch.float32) * 2 - 1
            z = vae.encode(pixels).latent_dist.mode()
        return pack_latents((z - vae.config.shift_factor) * vae.config.scaling_factor)

    def image_size(self) -> tuple[int, int]:
        return self.height, self.width

    def latent_shape(self) -> tuple[int, ...]:
        rows, columns = self._grid()
        return rows * columns, self.transformer.config.in_channels

    def sigmas(self, steps: int) -> Tensor:
        """Return sigmas shifted by the number of image tokens if the scheduler says so (dev)."""
        # A private copy: the scheduler keeps state, and the pipeline may be used in between.
        scheduler: Any = copy.deepcopy(self.pipeline.scheduler)
        shift = shift_for(self.latent_shape()[0], scheduler.config, max_shift=1.15)
        if scheduler.config.get("use_flow_sigmas"):
            scheduler.set_timesteps(steps, mu=shift)
        else:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)
        return scheduler.sigmas.clone().to(self.device)


def check_negatives(negatives: Sequence[str]) -> None:
    if any(negatives):
        raise UserError(
            f"the negative prompt is {next(filter(None, negatives))!r}, but FLUX.1 takes none: "
            "leave rollout.negative_prompt and the prompts' own empty"
        )


def own_side(pipeline: Any) -> int:
    """Return the autoencoder's pixels of a side."""
    return pipeline.vae.config.sample_size
