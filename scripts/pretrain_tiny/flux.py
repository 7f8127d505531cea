"""The tiny FLUX: diffusers' own classes at a width that a laptop trains."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.pretrain_tiny.encoders import CLIP_WIDTH, T5_WIDTH, clip_encoder, t5_encoder
from scripts.pretrain_tiny.sd3 import LATENT_CHANNELS
from scripts.pretrain_tiny.vocab import CLIP_TOKENS, clip_tokenizer, t5_tokenizer

WIDTH, DOUBLE, SINGLE, HEADS = 128, 2, 6, 4
SHORT, LONG = 12, 512  # T5 tokens: the presets' length, diffusers' default
GRID = 4  # packed latents a side
FLUX_DEV = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}


def transformer():
    """A FluxTransformer2DModel over 16 image tokens of 2 x 2 latents, with guidance as an input."""
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=DOUBLE,
        num_single_layers=SINGLE,
        attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


class TinyFlux:
    """Transformer and text encoders of the tiny FLUX, trained together.

    `velocity` builds the conditioning exactly as `FluxPipeline.encode_prompt` does: the T5 states,
    and CLIP's one vector.
    """

    short, long = SHORT, LONG

    def __init__(self, folder: Path, *, compile: bool = False):
        """`folder` receives the tokenizers' files, under the pipeline's own names.

        `compile` compiles the transformer at the short length, where training spends its time.
        """
        self.tokenizers = {
            "tokenizer": clip_tokenizer(folder / "tokenizer"),
            "tokenizer_2": t5_tokenizer(folder / "tokenizer_2", LONG),
        }
        self.module = nn.ModuleDict(
            {
                "transformer": transformer(),
                "text_encoder": clip_encoder(self.tokenizers["tokenizer"]),
                "text_encoder_2": t5_encoder(self.tokenizers["tokenizer_2"]),
            }
        )
        plain = self.module["transformer"]
        self.networks: dict[int, Any] = {SHORT: torch.compile(plain) if compile else plain}

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        def ids(name: str, length: int) -> Tensor:
            encoded = self.tokenizers[name](
                prompts, padding="max_length", truncation=True, max_length=length
            )
            return torch.tensor(encoded.input_ids)

        return {"clip": ids("tokenizer", CLIP_TOKENS), "t5": ids("tokenizer_2", LONG)}

    def velocity(
        self, x: Tensor, sigma: Tensor, ids: dict[str, Tensor], length: int,
        guidance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        m: Any = self.module
        network = self.networks.get(length, m["transformer"])
        places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID))
        v = network(
            nn.functional.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2),
            timestep=sigma,
            guidance=torch.ones_like(sigma) if guidance is None else guidance,
            encoder_hidden_states=m["text_encoder_2"](ids["t5"][:, :length])[0],
            pooled_projections=m["text_encoder"](ids["clip"]).pooler_output,
            txt_ids=torch.zeros(length, 3, device=x.device),
            img_ids=nn.functional.pad(places, (1, 0)).to(x),
        ).sample
        return nn.functional.pixel_shuffle(v.transpose(1, 2).unflatten(2, (GRID, GRID)), 2)

    def pipeline(self, module: nn.ModuleDict, vae: Any):
        """A FluxPipeline around the trained parts of `module` (for example the EMA)."""
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        trained: dict[str, Any] = dict(module.items())
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**FLUX_DEV),
            vae=vae,
            **self.tokenizers,
            **trained,
        )
