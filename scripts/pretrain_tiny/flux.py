"""The tiny FLUX: diffusers' own classes at a width that a laptop trains."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.pretrain_tiny.encoders import CLIP_WIDTH, T5_WIDTH, clip_encoder, t5_encoder
from scripts.pretrain_tiny.sd3 import LATENT_CHANNELS
from scripts.pretrain_tiny.text import TextStates
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
    """Transformer and text encoders of the tiny FLUX.

    `condition` is exactly what `FluxPipeline.encode_prompt` makes: the T5 states, and CLIP's one
    vector.
    """

    short, long = SHORT, LONG
    text_widths = {"t5": T5_WIDTH, "pooled": CLIP_WIDTH}

    def __init__(self, folder: Path):
        """`folder` receives the tokenizers' files, under the pipeline's own names."""
        self.tokenizers = {
            "tokenizer": clip_tokenizer(folder / "tokenizer"),
            "tokenizer_2": t5_tokenizer(folder / "tokenizer_2", LONG),
        }
        self.encoders = nn.ModuleDict(
            {
                "text_encoder": clip_encoder(self.tokenizers["tokenizer"]),
                "text_encoder_2": t5_encoder(self.tokenizers["tokenizer_2"]),
            }
        )
        self.transformer: Any = transformer()

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        def ids(name: str, length: int) -> Tensor:
            encoded = self.tokenizers[name](
                prompts, padding="max_length", truncation=True, max_length=length
            )
            return torch.tensor(encoded.input_ids)

        return {"clip": ids("tokenizer", CLIP_TOKENS), "t5": ids("tokenizer_2", LONG)}

    def text_states(self, ids: dict[str, Tensor], length: int) -> dict[str, TextStates]:
        pooled = self.encoders["text_encoder"](ids["clip"]).pooler_output
        t5 = self.encoders["text_encoder_2"](ids["t5"][:, :length])[0]
        return {"t5": (t5, None), "pooled": (pooled[:, None], None)}

    def condition(self, ids: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        states = {name: state for name, (state, _) in self.text_states(ids, length).items()}
        return {
            "encoder_hidden_states": states["t5"],
            "pooled_projections": states["pooled"][:, 0],
        }

    def velocity(
        self, network: Any, x: Tensor, sigma: Tensor, cond: dict[str, Tensor],
        guidance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID))
        v = network(
            nn.functional.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2),
            timestep=sigma,
            guidance=torch.ones_like(sigma) if guidance is None else guidance,
            **cond,
            txt_ids=torch.zeros(cond["encoder_hidden_states"].shape[1], 3, device=x.device),
            img_ids=nn.functional.pad(places, (1, 0)).to(x),
            return_dict=False,
        )[0]
        return nn.functional.pixel_shuffle(v.transpose(1, 2).unflatten(2, (GRID, GRID)), 2)

    def pipeline(self, network: Any, vae: Any):
        """A FluxPipeline around a transformer (for example the EMA)."""
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        encoders: dict[str, Any] = dict(copy.deepcopy(self.encoders).cpu().items())
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**FLUX_DEV),
            vae=vae,
            transformer=network,
            **self.tokenizers,
            **encoders,
        )
