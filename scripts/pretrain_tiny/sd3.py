"""The tiny SD3: diffusers' own classes at a width that a laptop trains."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.pretrain_tiny.encoders import CLIP_WIDTH, T5_WIDTH, projecting_clip_encoder, t5_encoder
from scripts.pretrain_tiny.text import TextStates
from scripts.pretrain_tiny.vocab import CLIP_TOKENS, clip_tokenizer, t5_tokenizer

LATENT_CHANNELS = 16
WIDTH, LAYERS, HEADS = 128, 5, 4
SHORT, LONG = 12, 256  # T5 tokens: the presets' length, diffusers' default
SHIFT = 3.0  # of the sigma schedule, as in SD3


def autoencoder():
    """A 16-channel AutoencoderKL: 64x64 pixels <-> 8x8 latents."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,  # type: ignore[arg-type]
        up_block_types=("UpDecoderBlock2D",) * 4,  # type: ignore[arg-type]
        block_out_channels=(16, 32, 48, 64),  # type: ignore[arg-type]
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def transformer():
    """An SD3Transformer2DModel over 16 image tokens."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        caption_projection_dim=WIDTH,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )


class TinySD3:
    """Transformer and text encoders of the tiny SD3.

    `condition` is exactly what `StableDiffusion3Pipeline.encode_prompt` makes: the penultimate
    CLIP states side by side, then the T5 states; the pooled CLIP vectors.
    """

    short, long = SHORT, LONG
    text_widths = {"clip": 2 * CLIP_WIDTH, "t5": T5_WIDTH, "pooled": 2 * CLIP_WIDTH}

    def __init__(self, folder: Path):
        """`folder` receives the tokenizers' files, under the pipeline's own names."""
        self.tokenizers = {
            "tokenizer": clip_tokenizer(folder / "tokenizer"),
            "tokenizer_2": clip_tokenizer(folder / "tokenizer_2"),
            "tokenizer_3": t5_tokenizer(folder / "tokenizer_3", LONG),
        }
        self.encoders = nn.ModuleDict(
            {
                "text_encoder": projecting_clip_encoder(self.tokenizers["tokenizer"]),
                "text_encoder_2": projecting_clip_encoder(self.tokenizers["tokenizer_2"]),
                "text_encoder_3": t5_encoder(self.tokenizers["tokenizer_3"]),
            }
        )
        self.transformer: Any = transformer()

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        def ids(name: str, length: int) -> Tensor:
            encoded = self.tokenizers[name](
                prompts, padding="max_length", truncation=True, max_length=length
            )
            return torch.tensor(encoded.input_ids)

        return {"clip": ids("tokenizer", CLIP_TOKENS), "t5": ids("tokenizer_3", LONG)}

    def text_states(self, ids: dict[str, Tensor], length: int) -> dict[str, TextStates]:
        clips = [
            self.encoders[name](ids["clip"], output_hidden_states=True)
            for name in ("text_encoder", "text_encoder_2")
        ]
        return {
            "clip": (torch.cat([c.hidden_states[-2] for c in clips], -1), None),
            "t5": (self.encoders["text_encoder_3"](ids["t5"][:, :length])[0], None),
            "pooled": (torch.cat([c[0] for c in clips], -1)[:, None], None),
        }

    def condition(self, ids: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        states = {name: state for name, (state, _) in self.text_states(ids, length).items()}
        return {
            "encoder_hidden_states": torch.cat([states["clip"], states["t5"]], 1),
            "pooled_projections": states["pooled"][:, 0],
        }

    def velocity(
        self, network: Any, x: Tensor, sigma: Tensor, cond: dict[str, Tensor],
        guidance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return network(x, timestep=sigma * 1000, **cond, return_dict=False)[0]

    def pipeline(self, network: Any, vae: Any):
        """A StableDiffusion3Pipeline around a transformer (for example the EMA)."""
        from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

        encoders: dict[str, Any] = dict(copy.deepcopy(self.encoders).cpu().items())
        return StableDiffusion3Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            vae=vae,
            transformer=network,
            **self.tokenizers,
            **encoders,
        )
