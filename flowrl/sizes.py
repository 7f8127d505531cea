"""The published sizes of four text-to-image networks, to be built with random weights.

What a step costs depends on shapes alone, so that speed and memory can be measured without any
weights. Configurations as diffusers' conversion scripts and the models' own pages give them.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A transformer and the autoencoder it works in, as configurations of diffusers' classes.

    family: its layer rules, and how it is called. factor: pixels of a latent's side. text_tokens,
    text_width: of the text the transformer attends to; pooled_width: of the text's one vector, or
    None where there is none. billions: numbers in the transformer as published, its table of
    positions included. pixels: a picture's side where Sol-RL (2604.06916) trained it.
    """

    family: str
    transformer: str
    config: Mapping[str, Any]
    autoencoder: str
    autoencoder_config: Mapping[str, Any]
    channels: int
    factor: int
    text_tokens: int
    text_width: int
    pooled_width: int | None
    billions: float
    pixels: int = 1024

    def latent_shape(self, pixels: int) -> tuple[int, int, int]:
        """(C, h, w) of a square picture. Raises UserError for a side it cannot be patched into."""
        unit = self.factor * (2 if self.family != "sana" else 1)
        if pixels < unit or pixels % unit:
            raise UserError(f"pictures of {pixels} pixels a side: expected a multiple of {unit}")
        return self.channels, pixels // self.factor, pixels // self.factor


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


def _sd35(layers: int, dual: tuple[int, ...], grid: int, billions: float) -> Size:
    """SD3.5 (2403.03206): as many heads of 64 as layers."""
    return Size(
        family="sd3",
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
        channels=16,
        factor=8,
        text_tokens=77 + 256,  # of CLIP, then of T5
        text_width=4096,
        pooled_width=2048,
        billions=billions,
    )


SIZES: dict[str, Size] = {
    "sd3.5-large": _sd35(38, (), 192, 8.1),
    "sd3.5-medium": _sd35(24, tuple(range(13)), 384, 2.5),
    "flux.1-dev": Size(
        family="flux",
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


def build_transformer(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    seed: int = 0,
) -> nn.Module:
    """The transformer of a size with random weights, made on the device; frozen, in eval mode.

    layers: blocks of each kind, to be quick where only the way is tested; None is all of them.
    Raises UserError for an unknown name.
    """
    size = size_of(name)
    return _build(size.transformer, shortened(size.config, layers), device, dtype, seed)


def build_decoder(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> nn.Module:
    """The autoencoder of a size without its encoder, random; `.decode` is what it is for.

    Raises UserError for an unknown name.
    """
    size = size_of(name)
    return _build(size.autoencoder, size.autoencoder_config, device, dtype, seed)


def shortened(config: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """A transformer's configuration with at most `layers` blocks of each kind, as wide as ever."""
    config = dict(config)
    if layers is None:
        return config
    if layers < 2:  # the last block of SD3 lacks layers that the others have
        raise UserError(f"layers is {layers}, expected 2 or more")
    for kind in ("num_layers", "num_single_layers"):
        if kind in config:
            config[kind] = min(config[kind], layers)
    if "dual_attention_layers" in config:
        config["dual_attention_layers"] = tuple(
            i for i in config["dual_attention_layers"] if i < config["num_layers"]
        )
    return config


def _build(
    name: str, config: Mapping[str, Any], device: str | torch.device, dtype: torch.dtype, seed: int
) -> nn.Module:
    import diffusers

    made = getattr(diffusers, name)
    unknown = set(config) - set(inspect.signature(made.__init__).parameters)
    assert not unknown, f"{name} of this diffusers does not know {sorted(unknown)}"
    with torch.device("meta"):
        module: nn.Module = made(**config)
    if hasattr(module, "encoder"):
        module.encoder = nn.Identity()  # pictures are only made here
    # Not diffusers' own `to`, which speaks up about layers that loading would leave in fp32.
    nn.Module.to(module, dtype).requires_grad_(False).eval()
    if torch.device(device).type != "meta":
        module.to_empty(device=device)
        randomise(module, seed)
    return module


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Weights that keep the scale of what goes through them, in place and where they lie.

    Matrices and kernels are normal with variance 1 / fan-in, factors of norms 1, biases 0.
    """
    tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
    device = next(iter(tensors.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.ndim < 2:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
