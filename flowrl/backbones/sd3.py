"""Stable Diffusion 3 and 3.5, as diffusers runs them."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.backbones.base import check_patches, guided, in_fp32, shift_for
from flowrl.errors import UserError
from flowrl.trajectory import Conditioning

# Flow-GRPO's list (2505.05470): both streams of the joint attention. The second attention of
# SD3.5-medium's dual blocks (`attn2`) does not match these endings: see `dual_targets`.
LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in (
        "to_q", "to_k", "to_v", "to_out.0",
        "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    )
)  # fmt: skip

DUAL_TARGETS = tuple(f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))


def dual_targets(made: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return name endings of SD3.5-medium's second attention. Raises UserError without one."""
    if not config.get("dual_attention_layers"):
        raise UserError(
            f"lora.dual_attention is true, but this {made} has no block with a "
            "second attention, as SD3.5-medium's has: set it to false"
        )
    return DUAL_TARGETS


class SD3:
    """A `StableDiffusion3Pipeline` behind the `Backbone` protocol.

    Args:
        guidance: the pipeline's `guidance_scale`; no guidance, and half the work, up to 1.
        max_sequence_length: T5 tokens.
        height, width: pixels, or None for the pipeline's own size.

    Raises:
        UserError: a size that the network's patches do not divide.
    """

    lora_targets = LORA_TARGETS

    def __init__(
        self,
        pipeline,
        *,
        guidance: float = 1.0,
        max_sequence_length: int = 256,
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
        native = pipeline.default_sample_size * pipeline.vae_scale_factor
        self.height, self.width = height or native, width or native
        unit = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
        check_patches(self.height, self.width, unit)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        embeds, negative, pooled, negative_pooled = self.pipeline.encode_prompt(
            list(prompts),
            None,
            None,
            negative_prompt=list(negatives),
            do_classifier_free_guidance=self.guidance > 1,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        tensors = {"embeds": embeds, "pooled": pooled}
        if self.guidance > 1:
            tensors |= {"negative": negative, "negative_pooled": negative_pooled}
        return Conditioning(tensors=tensors)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        timestep = (sigma * 1000).expand(len(x))
        text = cond.tensors
        if self.guidance <= 1:
            return self._network(x, text["embeds"], text["pooled"], timestep)
        return guided(
            self._network,
            self.guidance,
            x,
            (text["embeds"], text["negative"]),
            (text["pooled"], text["negative_pooled"]),
            (timestep, timestep),
        )

    def _network(self, x: Tensor, embeds: Tensor, pooled: Tensor, timestep: Tensor) -> Tensor:
        return self.transformer(
            hidden_states=x.to(self.dtype),
            timestep=timestep,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]

    def decode(self, x0: Tensor) -> Tensor:
        vae = self.pipeline.vae
        z = x0.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        return (vae.decode(z, return_dict=False)[0] * 0.5 + 0.5).clamp(0, 1).float()

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        with in_fp32(self.pipeline.vae) as vae:
            pixels = images.to(self.device, torch.float32) * 2 - 1
            z = vae.encode(pixels).latent_dist.mode()
        return (z - vae.config.shift_factor) * vae.config.scaling_factor

    def image_size(self) -> tuple[int, int]:
        return self.height, self.width

    def latent_shape(self) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        return self.transformer.config.in_channels, self.height // factor, self.width // factor

    def sigmas(self, steps: int) -> Tensor:
        """Return sigmas shifted by the number of image tokens if the scheduler says so."""
        # A private copy: the scheduler keeps state, and the pipeline may be used in between.
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        given: dict[str, Any] = {}
        if scheduler.config.get("use_dynamic_shifting"):
            unit = self.pipeline.vae_scale_factor * self.transformer.config.patch_size
            tokens = (self.height // unit) * (self.width // unit)
            given["mu"] = shift_for(tokens, scheduler.config, max_shift=1.16)
        scheduler.set_timesteps(steps, **given)
        return scheduler.sigmas.clone().to(self.device)
