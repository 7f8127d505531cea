"""The tiny SANA: diffusers' own classes at a width that a laptop trains."""

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.pretrain_tiny.encoders import GEMMA_WIDTH, GEMMA_WINDOW, gemma_encoder
from scripts.pretrain_tiny.text import TextStates
from scripts.pretrain_tiny.vocab import gemma_tokenizer

LATENT_CHANNELS = 16
WIDTH, LAYERS, HEADS = 128, 5, 4
SHORT, LONG = 12, 300  # Gemma tokens: the presets' length, diffusers' default
TAIL = 2 * GEMMA_WINDOW  # as far back as a state can depend on tokens
SHIFT = 3.0  # of the sigma schedule, as in SANA


def stock_instruction() -> list[str]:
    """Return the lines that `SanaPipeline` puts before every prompt by default."""
    from diffusers import SanaPipeline

    parameters = inspect.signature(SanaPipeline.__call__).parameters
    return parameters["complex_human_instruction"].default


def autoencoder():
    """A 16-channel AutoencoderDC: 64x64 pixels <-> 4x4 latents."""
    from diffusers import AutoencoderDC

    widths, blocks = (16, 32, 64, 64, 64), ("ResBlock",) * 4 + ("EfficientViTBlock",)
    return AutoencoderDC(
        latent_channels=LATENT_CHANNELS,
        attention_head_dim=16,
        encoder_block_types=blocks,  # type: ignore[arg-type]
        decoder_block_types=blocks,  # type: ignore[arg-type]
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        encoder_layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        encoder_qkv_multiscales=((),) * 5,
        decoder_qkv_multiscales=((),) * 5,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        scaling_factor=1.0,
    )


def transformer():
    """A SanaTransformer2DModel over 16 image tokens."""
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        num_layers=LAYERS,
        num_cross_attention_heads=HEADS,
        cross_attention_head_dim=WIDTH // HEADS,
        cross_attention_dim=WIDTH,
        caption_channels=GEMMA_WIDTH,
        mlp_ratio=2.5,
        sample_size=4,
        patch_size=1,
    )


class TinySana:
    """Transformer and text encoder of the tiny SANA.

    `condition` is what `SanaPipeline.encode_prompt` makes: the state of the first token, then
    those of the prompt after SANA's instruction, of which only the last `TAIL` tokens can reach
    it; "" comes without the instruction. What is padding is masked in the transformer.
    """

    short, long = SHORT, LONG
    text_widths = {"gemma": GEMMA_WIDTH}

    def __init__(self, folder: Path):
        """`folder` receives the tokenizer's files, under the pipeline's own name."""
        self.tokenizer = gemma_tokenizer(folder / "tokenizer", "\n".join(stock_instruction()))
        self.encoders = nn.ModuleDict({"text_encoder": gemma_encoder(self.tokenizer)})
        self.transformer: Any = transformer()

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        instruction = "\n".join(stock_instruction())
        before = len(self.tokenizer.encode(instruction)) - 1  # as the pipeline counts
        encoded = self.tokenizer(
            [instruction + p.lower().strip() for p in prompts],
            padding="max_length",
            padding_side="right",
            truncation=True,
            max_length=before + LONG - 1,
        )
        ids, mask = (
            torch.tensor(encoded[name])[:, before - TAIL :]
            for name in ("input_ids", "attention_mask")
        )
        empty = torch.tensor([not p for p in prompts])
        return {"ids": ids, "mask": mask.masked_fill(empty[:, None], 0)}

    def text_states(self, ids: dict[str, Tensor], length: int) -> dict[str, TextStates]:
        encoder, device = self.encoders["text_encoder"], ids["ids"].device
        start: Any = self.tokenizer.bos_token_id
        first = encoder(torch.full((1, 1), start, device=device))[0]
        text = encoder(ids["ids"][:, : TAIL + length - 1])[0][:, TAIL:]
        mask = ids["mask"][:, TAIL : TAIL + length - 1]
        states = torch.cat([first.expand(len(text), -1, -1), text], 1)
        return {"gemma": (states, nn.functional.pad(mask, (1, 0), value=1))}

    def condition(self, ids: dict[str, Tensor], length: int) -> dict[str, Tensor]:
        states, mask = self.text_states(ids, length)["gemma"]
        return {"encoder_hidden_states": states, "encoder_attention_mask": mask}

    def velocity(
        self, network: Any, x: Tensor, sigma: Tensor, cond: dict[str, Tensor],
        guidance: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return network(x, timestep=sigma * 1000, **cond, return_dict=False)[0]

    def pipeline(self, network: Any, vae: Any):
        """A SanaPipeline around a transformer (for example the EMA)."""
        from diffusers import DPMSolverMultistepScheduler, SanaPipeline

        encoders: dict[str, Any] = dict(copy.deepcopy(self.encoders).cpu().items())
        return SanaPipeline(
            scheduler=DPMSolverMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
            ),
            vae=vae,
            tokenizer=self.tokenizer,
            transformer=network,
            **encoders,
        )
