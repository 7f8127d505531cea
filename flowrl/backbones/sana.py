"""SANA, as diffusers runs it."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.backbones.base import check_patches, guided, in_fp32
from flowrl.trajectory import Conditioning

# Sol-RL's list (2604.06916) in diffusers' names: self-attention, then attention to the text.
LORA_TARGETS = tuple(
    f"{attention}.{name}"
    for attention in ("attn1", "attn2")
    for name in ("to_q", "to_k", "to_v", "to_out.0")
)


def stock_instruction() -> list[str]:
    """Return the lines that `SanaPipeline` puts before every prompt by default."""
    from diffusers import SanaPipeline

    parameters = inspect.signature(SanaPipeline.__call__).parameters
    return parameters["complex_human_instruction"].default


class Sana:
    """A `SanaPipeline` behind the `Backbone` protocol.

    Args:
        guidance: the pipeline's `guidance_scale`; no guidance, and half the work, up to 1.
        max_sequence_length: Gemma tokens of the prompt, without the pipeline's instruction.
        height, width: pixels, or None for the pipeline's own size; generated at this very size, as
            by the pipeline with `use_resolution_binning=False`.

    Raises:
        UserError: a size that the autoencoder does not divide.
    """

    lora_targets = LORA_TARGETS

    def __init__(
        self,
        pipeline,
        *,
        guidance: float = 4.5,
        max_sequence_length: int = 300,
        height: int | None = None,
        width: int | None = None,
    ):
        self.pipeline = pipeline
        pipeline.vae.requires_grad_(False)  # gradients go through it, and none is for its weights
        self.transformer = pipeline.transformer
        self.dtype: torch.dtype = pipeline.transformer.dtype
        self.device: torch.device = pipeline.transformer.device
        self.guidance = guidance
        self.max_sequence_length = max_sequence_length
        native = own_side(pipeline)
        self.height, self.width = height or native, width or native
        unit = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
        check_patches(self.height, self.width, unit)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        embeds, mask, negative, negative_mask = self.pipeline.encode_prompt(
            list(prompts),
            self.guidance > 1,
            negative_prompt=list(negatives),
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            complex_human_instruction=stock_instruction(),
        )
        tensors = {"embeds": embeds, "mask": mask}
        if self.guidance > 1:
            tensors |= {"negative": negative, "negative_mask": negative_mask}
        return Conditioning(tensors=tensors)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        timestep = (sigma * 1000).expand(len(x))
        text = cond.tensors
        if self.guidance <= 1:
            return self._network(x, text["embeds"], text["mask"], timestep)
        return guided(
            self._network,
            self.guidance,
            x,
            (text["embeds"], text["negative"]),
            (text["mask"], text["negative_mask"]),
            (timestep, timestep),
        )

    def _network(self, x: Tensor, embeds: Tensor, mask: Tensor, timestep: Tensor) -> Tensor:
        return self.transformer(
            x.to(self.dtype),
            encoder_hidden_states=embeds.to(self.dtype),
            encoder_attention_mask=mask,
            timestep=timestep * self.transformer.config.timestep_scale,
            return_dict=False,
        )[0].float()

    def decode(self, x0: Tensor) -> Tensor:
        vae = self.pipeline.vae
        z = x0.to(vae.dtype) / vae.config.scaling_factor
        return (vae.decode(z, return_dict=False)[0] * 0.5 + 0.5).clamp(0, 1).float()

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        with in_fp32(self.pipeline.vae) as vae:
            pixels = images.to(self.device, torch.float32) * 2 - 1
            return vae.encode(pixels).latent * vae.config.scaling_factor

    def image_size(self) -> tuple[int, int]:
        return self.height, self.width

    def latent_shape(self) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return self.transformer.config.in_channels, self.height // factor, self.width // factor

    def sigmas(self, steps: int) -> Tensor:
        """Return the scheduler's sigmas; the stock one starts at 0.9997, and not at 1."""
        # A private copy: the scheduler keeps state, and the pipeline may be used in between.
        scheduler: Any = copy.deepcopy(self.pipeline.scheduler)
        scheduler.set_timesteps(steps)
        return scheduler.sigmas.clone().to(self.device)


def own_side(pipeline: Any) -> int:
    """Return the pixels of a side that the network was made for."""
    return pipeline.transformer.config.sample_size * pipeline.vae_scale_factor
