"""Z-Image as a backbone: one file, and nothing of flowrl changed.

From this repository's root, or wherever `examples/z_image.py` lies:

    flowrl train sd3.5-medium-nft-24gb pipeline.backbone=examples.z_image:ZImage \\
      pipeline.path=Tongyi-MAI/Z-Image pipeline.dtype=bf16 pipeline.max_sequence_length=512 \\
      pipeline.height=1024 pipeline.width=1024 prompts.train=my_prompts.txt \\
      rollout.guidance_scale=5 evaluation.guidance_scale=5

Z-Image-Turbo draws without guidance, which is guidance=0 here. Tested on tiny networks with random
weights; not run with the real ones yet.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.backbones.base import check_patches, in_fp32
from flowrl.errors import UserError
from flowrl.quantization.layer_rules import LayerRules
from flowrl.trajectory import Conditioning


class ZImage:
    """A `ZImagePipeline` behind the `Backbone` protocol.

    guidance: the pipeline's `guidance_scale`, by which the difference is added to the conditional
    velocity: 0 is none, and half the work; 5 is what elsewhere is called 6.
    max_sequence_length: Qwen3 tokens, those of the chat around the prompt among them.
    height, width: pixels, or None for the pipeline's 1024.
    The network sees texts at their own lengths: rollout.compile would compile it for each it meets.
    Raises UserError for a size that the network's patches do not divide, and for guidance above 0
    and up to 1, which is none in flowrl and some in the pipeline.
    """

    # Attention, as on the page of diffusers' own training script for Z-Image.
    lora_targets = tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
    # Optional: what stays exact where a precision asks for few bits. The embedders are what
    # diffusers keeps exact, the rest and the size FLUX.1's in Sol-RL (2604.06916).
    layer_rules = LayerRules(
        keep=("t_embedder", "cap_embedder", "all_x_embedder", "all_final_layer"), min_dim=1000
    )

    def __init__(
        self,
        pipeline,
        *,
        guidance: float = 5.0,
        max_sequence_length: int = 512,
        height: int | None = None,
        width: int | None = None,
    ):
        if 0 < guidance <= 1:
            raise UserError(
                f"guidance is {guidance:g}, but Z-Image without guidance has 0, and flowrl none up "
                "to 1: set rollout.guidance_scale and evaluation.guidance_scale to 0, or above 1"
            )
        self.pipeline = pipeline
        pipeline.vae.requires_grad_(False)  # gradients go through it, and none is for its weights
        self.transformer = pipeline.transformer
        self.dtype: torch.dtype = pipeline.transformer.dtype
        self.device: torch.device = pipeline.transformer.device
        self.guidance = guidance
        self.max_sequence_length = max_sequence_length
        self.height, self.width = height or 1024, width or 1024
        check_patches(self.height, self.width, 2 * pipeline.vae_scale_factor)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negatives: Sequence[str]) -> Conditioning:
        """The pipeline gives each text at its own length: here all are padded to the longest."""
        texts, negative = self.pipeline.encode_prompt(
            list(prompts),
            negative_prompt=list(negatives),
            do_classifier_free_guidance=self.guidance > 1,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        tensors = self._padded(texts, "")
        if self.guidance > 1:
            tensors |= self._padded(negative, "negative_")
        return Conditioning(tensors=tensors)

    def _padded(self, texts: list[Tensor], prefix: str) -> dict[str, Tensor]:
        embeds = texts[0].new_zeros(len(texts), self.max_sequence_length, texts[0].shape[1])
        for row, text in zip(embeds, texts, strict=True):
            row[: len(text)] = text
        lengths = torch.tensor([len(text) for text in texts], device=embeds.device)
        return {f"{prefix}embeds": embeds, f"{prefix}length": lengths}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
        if self.guidance <= 1:
            return self._network(x, sigma.expand(len(x)), _texts(cond, ""))
        texts = _texts(cond, "") + _texts(cond, "negative_")
        both = self._network(torch.cat([x, x]), sigma.expand(len(x)).repeat(2), texts)
        v, negative = both.chunk(2)
        return v + self.guidance * (v - negative)

    def _network(self, x: Tensor, sigma: Tensor, texts: list[Tensor]) -> Tensor:
        """Its time runs from noise, 0, to data, 1, and its output points there."""
        frames = x.to(self.dtype).unsqueeze(2)  # (B, C, 1, h, w): one frame of a film
        found = self.transformer(
            list(frames.unbind()), (1000 - sigma * 1000) / 1000, texts, return_dict=False
        )[0]
        return -torch.stack(found).squeeze(2).float()

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
        """Shifted by the number of image tokens where the scheduler asks for that."""
        from diffusers.pipelines.z_image.pipeline_z_image import (
            calculate_shift,
            get_default_z_image_sigmas,
        )

        # A private copy: the scheduler keeps state, and the pipeline may be used in between.
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        _, rows, columns = self.latent_shape()
        given = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        shift = calculate_shift(rows * columns // 4, *(scheduler.config[key] for key in given))
        scheduler.set_timesteps(sigmas=get_default_z_image_sigmas(steps), mu=shift)
        return scheduler.sigmas.clone().to(self.device)


def _texts(cond: Conditioning, prefix: str) -> list[Tensor]:
    """As the transformer takes them: a text of its own length for each row."""
    embeds, lengths = (cond.tensors[prefix + name] for name in ("embeds", "length"))
    return [text[:length] for text, length in zip(embeds, lengths.tolist(), strict=True)]
