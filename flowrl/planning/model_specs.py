"""What is published of four text-to-image pipelines: shapes, schedules and sizes, no weights.

What a step costs depends on shapes alone. Sources: the repositories' own `config.json` and
`scheduler_config.json`, diffusers' conversion scripts (convert_sd3_to_diffusers.py,
convert_flux_to_diffusers.py, convert_sana_to_diffusers.py), and the sizes of the files on the Hub.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import UserError

# --- The text encoders of the published pipelines: configurations of transformers' classes -----


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoder:
    """A text encoder as a class of transformers, its configuration's class, and its values.

    parameters: numbers in it, of the part that the pipeline loads. wide: of them, those that
    transformers keeps in fp32 where the rest is loaded in fp16 (`_keep_in_fp32_modules`).
    """

    name: str
    model: str
    config_class: str
    config: Mapping[str, Any]
    parameters: int
    wide: int = 0

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of its weights, loaded in a dtype."""
        wide = self.wide if dtype == torch.float16 else 0
        return self.parameters * dtype.itemsize + wide * (4 - dtype.itemsize)


def _clip(name: str, model: str, width: int, layers: int, act: str, parameters: int) -> TextEncoder:
    """CLIP's text part (2103.00020): heads of 64, 77 tokens of 49,408."""
    config = {
        "vocab_size": 49_408,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "projection_dim": width,
        "max_position_embeddings": 77,
        "hidden_act": act,
    }
    return TextEncoder(
        name=name, model=model, config_class="CLIPTextConfig", config=config, parameters=parameters
    )


_PROJECTED = "CLIPTextModelWithProjection"
CLIP_L = _clip("CLIP ViT-L", _PROJECTED, 768, 12, "quick_gelu", 123_650_304)
CLIP_L_BARE = _clip("CLIP ViT-L", "CLIPTextModel", 768, 12, "quick_gelu", 123_060_480)
CLIP_G = _clip("OpenCLIP ViT-bigG", _PROJECTED, 1280, 32, "gelu", 694_659_840)
T5_XXL = TextEncoder(
    name="T5 v1.1 XXL",
    model="T5EncoderModel",
    config_class="T5Config",
    config={
        "vocab_size": 32_128,
        "d_model": 4096,
        "d_ff": 10_240,
        "d_kv": 64,
        "num_heads": 64,
        "num_layers": 24,
        "feed_forward_proj": "gated-gelu",
    },
    parameters=4_762_310_656,
    wide=24 * 4096 * 10_240,  # `wo` of every layer, whose products leave fp16's range
)
GEMMA = TextEncoder(
    name="Gemma 2 2B",
    model="Gemma2Model",
    config_class="Gemma2Config",
    config={
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    parameters=2_614_341_888,
)


# --- What is published of four text-to-image pipelines -----------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A pipeline as configurations of diffusers' classes.

    checkpoint: its repository on the Hub; also: others whose networks have the same shapes.
    family: its layer rules, and how it is called. factor: pixels of a latent's side. text_tokens,
    text_width: of the text the transformer attends to; pooled_width: of the text's one vector, or
    None where there is none. billions: numbers in the transformer as published, its table of
    positions included. autoencoder_params: of the autoencoder, its encoder included.
    pixels: an image's side where Sol-RL (2604.06916) trained it, not the pipeline's own.
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
        """(C, h, w) of a square image. Raises UserError for a side it cannot be patched into."""
        unit = self.factor * (2 if self.family != "sana" else 1)
        if pixels < unit or pixels % unit:
            raise UserError(f"images of {pixels} pixels a side: expected a multiple of {unit}")
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
            "shift": 3.0,  # unused: what is used depends on the image's size
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


# --- Networks of published sizes, without weights on the meta device or with random ones -------

__all__ = [
    "SIZES",
    "Size",
    "build_autoencoder",
    "build_decoder",
    "build_pipeline",
    "build_scheduler",
    "build_text_encoders",
    "build_transformer",
    "randomise",
    "shortened",
    "size_of",
    "size_of_checkpoint",
]


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


def build_autoencoder(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    encoder: bool = True,
    seed: int = 0,
) -> nn.Module:
    """The autoencoder of a size; without its encoder where images are only made.

    Raises UserError for an unknown name.
    """
    size = size_of(name)
    return _build(size.autoencoder, size.autoencoder_config, device, dtype, seed, encoder=encoder)


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
    return build_autoencoder(name, device=device, dtype=dtype, encoder=False, seed=seed)


def build_text_encoders(name: str, *, dtype: torch.dtype = torch.bfloat16) -> list[nn.Module]:
    """All text encoders of a size, on the meta device. Raises UserError for an unknown name."""
    import transformers

    modules: list[nn.Module] = []
    for encoder in size_of(name).text_encoders:
        config = getattr(transformers, encoder.config_class)(**encoder.config)
        with torch.device("meta"):
            module = getattr(transformers, encoder.model)(config)
        modules.append(nn.Module.to(module, dtype).requires_grad_(False).eval())
    return modules


def build_scheduler(name: str) -> Any:
    """The scheduler that the size's repository names, as configured there.

    Raises UserError for an unknown name.
    """
    import diffusers

    size = size_of(name)
    return getattr(diffusers, size.scheduler)(**size.scheduler_config)


def build_pipeline(
    name: str,
    *,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    encoder: bool = False,
    seed: int = 0,
) -> Any:
    """The size's own pipeline of diffusers around random networks, without text encoders.

    layers: as `build_transformer` has it; encoder: as `build_autoencoder` has it. Raises UserError
    for an unknown name.
    """
    import diffusers

    made = getattr(diffusers, size_of(name).pipeline)
    parts = dict.fromkeys(inspect.signature(made.__init__).parameters)
    del parts["self"]
    return made(
        **parts
        | {
            "transformer": build_transformer(
                name, device=device, dtype=dtype, layers=layers, seed=seed
            ),
            "vae": build_autoencoder(name, device=device, dtype=dtype, encoder=encoder, seed=seed),
            "scheduler": build_scheduler(name),
        }
    )


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
    name: str,
    config: Mapping[str, Any],
    device: str | torch.device,
    dtype: torch.dtype,
    seed: int,
    *,
    encoder: bool = True,
) -> nn.Module:
    import diffusers

    made = getattr(diffusers, name)
    unknown = set(config) - set(inspect.signature(made.__init__).parameters)
    assert not unknown, f"{name} of this diffusers does not know {sorted(unknown)}"
    with torch.device("meta"):
        module: nn.Module = made(**config)
    if not encoder:
        module.encoder = nn.Identity()
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
