"""The tiny SD3: diffusers' own classes at a width that a laptop trains."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.pretrain_tiny.encoders import CLIP_WIDTH, T5_WIDTH, projecting_clip_encoder, t5_encoder
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
    """Transformer and text encoders of the tiny SD3, trained together.

    `velocity` builds the conditioning exactly as `StableDiffusion3Pipeline.encode_prompt` does:
    the penultimate CLIP states side by side, then the T5 states; the pooled CLIP vectors.
    """

    short, long = SHORT, LONG

    def __init__(self, folder: Path, *, compile: bool = False):
        """`folder` receives the tokenizers' files, under the pipeline's own names.

        `compile` compiles the transformer at the short length, where training spends its time.
        """
        self.tokenizers = {
            "tokenizer": clip_tokenizer(folder / "tokenizer"),
            "tokenizer_2": clip_tokenizer(folder / "tokenizer_2"),
            "tokenizer_3": t5_tokenizer(folder / "tokenizer_3", LONG),
        }
        self.module = nn.ModuleDict(
            {
                "transformer": transformer(),
                "text_encoder": projecting_clip_encoder(self.tokenizers["tokenizer"]),
                "text_encoder_2": projecting_clip_encoder(self.tokenizers["tokenizer_2"]),
                "text_encoder_3": t5_encoder(self.tokenizers["tokenizer_3"]),
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

        return {"clip": ids("tokenizer", CLIP_TOKENS), "t5": ids("tokenizer_3", LONG)}

    def velocity(
        self, x: Tensor, sigma: Tensor, ids: dict[str, Tensor], length: int,
        guidance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        m: Any = self.module
        clips = [
            m[name](ids["clip"], output_hidden_states=True)
            for name in ("text_encoder", "text_encoder_2")
        ]
        t5 = m["text_encoder_3"](ids["t5"][:, :length])[0]
        clip = torch.cat([c.hidden_states[-2] for c in clips], -1)
        network = self.networks.get(length, m["transformer"])
        return network(
            x,
            timestep=sigma * 1000,
            encoder_hidden_states=torch.cat([clip, t5], 1),
            pooled_projections=torch.cat([c[0] for c in clips], -1),
        ).sample

    def pipeline(self, module: nn.ModuleDict, vae: Any):
        """A StableDiffusion3Pipeline around the trained parts of `module` (for example the EMA)."""
        from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

        trained: dict[str, Any] = dict(module.items())
        return StableDiffusion3Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
            vae=vae,
            **self.tokenizers,
            **trained,
        )
