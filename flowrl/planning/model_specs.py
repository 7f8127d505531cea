"""What is published of four text-to-image pipelines: shapes, schedules and sizes, no weights.

What a step costs depends on shapes alone. Sources: the repositories' own `config.json` and
`scheduler_config.json`, diffusers' conversion scripts (convert_sd3_to_diffusers.py,
convert_flux_to_diffusers.py, convert_sana_to_diffusers.py), and the sizes of the files on the Hub.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.errors import UserError
from flowrl.planning.text_encoders import CLIP_G, CLIP_L, CLIP_L_BARE, GEMMA, T5_XXL, TextEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A pipeline as configurations of diffusers' classes.

    checkpoint: its repository on the Hub; also: others whose networks have the same shapes.
    family: its layer rules, and how it is called. factor: pixels of a latent's side. text_tokens,
    text_width: of the text the transformer attends to; pooled_width: of the text's one vector, or
    None where there is none. billions: numbers in the transformer as published, its table of
    positions included. autoencoder_params: of the autoencoder, its encoder included.
    pixels: a picture's side where Sol-RL (2604.06916) trained it, not the pipeline's own.
    """

    family: str
    pipeline: str
    checkpoint: str
    also: tuple[str, ...] = ()
    transformer: str
    config: Mapping[str, Any]
    autoencoder: str
    autoencoder_config: Mapping[str, Any]
    autoencoder_params: int
    scheduler: str
    scheduler_config: Mapping[str, Any]
    text_encoders: tuple[TextEncoder, ...]
    channels: int
    factor: int
    text_tokens: int
    text_width: int
    pooled_width: int | None
    billions: float
    pixels: int = 1024

    @property
    def text_encoder_params(self) -> int:
        """Numbers in all text encoders together."""
        return sum(encoder.parameters for encoder in self.text_encoders)

    def latent_shape(self, pixels: int) -> tuple[int, int, int]:
        """(C, h, w) of a square picture. Raises UserError for a side it cannot be patched into."""
        unit = self.factor * (2 if self.family != "sana" else 1)
        if pixels < unit or pixels % unit:
            raise UserError(f"pictures of {pixels} pixels a side: expected a multiple of {unit}")
        return self.channels, pixels // self.factor, pixels // self.factor


_EULER = "FlowMatchEulerDiscreteScheduler"


def _kl(scaling: float, shift: float) -> dict[str, Any]:
    """The 16-channel autoencoder of SD3 and FLUX.1, whose latents differ in scale alone."""
    return {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 16,
        "sample_size": 1024,
        "scaling_factor": scaling,
        "shift_factor": shift,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
    }


_KL_PARAMS = 83_819_683
_DC_PARAMS = 312_250_275
_DC_BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
_DC_AE = {
    "latent_channels": 32,
    "encoder_block_types": _DC_BLOCKS,
    "decoder_block_types": _DC_BLOCKS,
    "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
    "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
    "scaling_factor": 0.41407,
}


def _sd35(word: str, layers: int, dual: tuple[int, ...], grid: int, billions: float) -> Size:
    """SD3.5 (2403.03206): as many heads of 64 as layers."""
    return Size(
        family="sd3",
        pipeline="StableDiffusion3Pipeline",
        checkpoint=f"stabilityai/stable-diffusion-3.5-{word}",
        transformer="SD3Transformer2DModel",
        config={
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": layers,
            "num_attention_heads": layers,
            "attention_head_dim": 64,
            "caption_projection_dim": layers * 64,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": grid,
            "dual_attention_layers": dual,
            "qk_norm": "rms_norm",
        },
        autoencoder="AutoencoderKL",
        autoencoder_config=_kl(1.5305, 0.0609),
        autoencoder_params=_KL_PARAMS,
        scheduler=_EULER,
        scheduler_config={"num_train_timesteps": 1000, "shift": 3.0},
        text_encoders=(CLIP_L, CLIP_G, T5_XXL),
        channels=16,
        factor=8,
        text_tokens=77 + 256,  # of CLIP, then of T5
        text_width=4096,
        pooled_width=2048,
        billions=billions,
    )


SIZES: dict[str, Size] = {
    "sd3.5-large": _sd35("large", 38, (), 192, 8.1),
    "sd3.5-medium": _sd35("medium", 24, tuple(range(13)), 384, 2.5),
    "flux.1-dev": Size(
        family="flux",
        pipeline="FluxPipeline",
        checkpoint="black-forest-labs/FLUX.1-dev",
        transformer="FluxTransformer2DModel",
        config={
            "patch_size": 1,
            "in_channels": 64,
            "num_layers": 19,
            "num_single_layers": 38,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
            "axes_dims_rope": (16, 56, 56),
        },
        autoencoder="AutoencoderKL",
        autoencoder_config=_kl(0.3611, 0.1159),
        autoencoder_params=_KL_PARAMS,
        scheduler=_EULER,
        scheduler_config={
            "num_train_timesteps": 1000,
            "shift": 3.0,  # unused: what is used depends on the picture's size
            "use_dynamic_shifting": True,
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 4096,
            "max_shift": 1.15,
        },
        text_encoders=(CLIP_L_BARE, T5_XXL),
        channels=16,
        factor=8,
        text_tokens=512,
        text_width=4096,
        pooled_width=768,
        billions=11.9,
        pixels=512,
    ),
    "sana-1.6b": Size(
        family="sana",
        pipeline="SanaPipeline",
        checkpoint="Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        also=(
            "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
            "Efficient-Large-Model/Sana_1600M_1024px_MultiLing_diffusers",
        ),
        transformer="SanaTransformer2DModel",
        config={
            "in_channels": 32,
            "out_channels": 32,
            "num_attention_heads": 70,
            "attention_head_dim": 32,
            "num_layers": 20,
            "num_cross_attention_heads": 20,
            "cross_attention_head_dim": 112,
            "cross_attention_dim": 2240,
            "caption_channels": 2304,
            "mlp_ratio": 2.5,
            "sample_size": 32,
            "patch_size": 1,
            "interpolation_scale": None,
        },
        autoencoder="AutoencoderDC",
        autoencoder_config=_DC_AE,
        autoencoder_params=_DC_PARAMS,
        scheduler="DPMSolverMultistepScheduler",
        scheduler_config={
            "flow_shift": 3.0,
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
        },
        text_encoders=(GEMMA,),
        channels=32,
        factor=32,
        text_tokens=300,
        text_width=2304,
        pooled_width=None,
        billions=1.6,
    ),
}


def size_of(name: str) -> Size:
    """Raises UserError for a name that is not in SIZES."""
    if name not in SIZES:
        raise UserError(f"there is no size {name!r}, expected one of {', '.join(SIZES)}")
    return SIZES[name]


def size_of_checkpoint(name: str) -> str | None:
    """Of a repository on the Hub: the name in SIZES of what has its shapes, or None."""
    for size, published in SIZES.items():
        if name in (published.checkpoint, *published.also):
            return size
    return None
