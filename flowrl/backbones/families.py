"""What flowrl knows of a pipeline class beside what the class says itself: data, one entry each.

A class without an entry trains too: guidance is read from its signature, adapted layers and
low-bit layers from its network.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flowrl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRules:
    """Rules for the layers that stay exact where weights have few bits."""

    keep: tuple[str, ...]  # regular expressions searched in the dotted names of layers
    min_dim: int  # the longer side of a weight must be above it: small matmuls gain nothing
    in_multiple: int = 32
    out_multiple: int = 16
    pointwise: bool = False  # convolutions with 1x1 kernels count as linear layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One pipeline class, or several that share a network."""

    name: str  # short, as in names of recipes
    built_in: str = ""  # a tiny pipeline of the class that comes with flowrl
    lora_targets: tuple[str, ...] = ()  # name endings of adapted layers; () reads the network
    network: str = ""  # class of the network that `layer_rules` are for
    layer_rules: LayerRules | None = None  # None takes `general_layer_rules`
    guidance: str = "guidance_scale"  # parameter of the pipeline's call
    # Guidance "off", without a second forward; None where the number is an input of the network.
    unguided: float | None = 1.0
    call: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the call
    output: str = "images"  # where the images are in the result of the call, as Python
    # Components that are left out: their guidance depends on earlier steps.
    without: tuple[str, ...] = ()


# Parameters that change the prompt, the size or the number of frames, and the value that does not.
SWITCHES: dict[str, Any] = {
    "use_resolution_binning": False,
    "enable_prompt_rewrite": False,
    "use_pe": False,
    "prompt_upsampling": False,
    "num_frames": 1,
}

_JOINT = tuple(
    f"attn.{name}"
    for name in (
        "to_q", "to_k", "to_v", "to_out.0",
        "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    )
)  # fmt: skip

# Flow-GRPO's list (2505.05470): both streams of the joint attention. The second attention of
# SD3.5-Medium's dual blocks (`attn2`) does not match these endings. Low-bit rules here and below
# are those of Sol-RL's released code (2604.06916), put into diffusers' names.
SD3 = Family(
    name="sd3",
    built_in="tiny-sd3",
    network="SD3Transformer2DModel",
    lora_targets=_JOINT,
    layer_rules=LayerRules(
        keep=(
            "pos_embed", "context_embedder", "time_text_embed", "norm_out", "norm1", "ff_context",
        ),
        min_dim=2432,
    ),
)  # fmt: skip

# Flow-GRPO's list for FLUX.1: attention and feed-forward of both streams. Of the single-stream
# blocks only the attention's inputs match these endings.
FLUX = Family(
    name="flux",
    built_in="tiny-flux",
    network="FluxTransformer2DModel",
    lora_targets=(
        *_JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    ),
    # The last projection, `^proj_out`, is quantised.
    layer_rules=LayerRules(
        keep=("x_embedder", "context_embedder", "time_text_embed", "norm_out"), min_dim=1000
    ),
    unguided=None,
)  # fmt: skip

# Sol-RL adapts all attention, as is read off the network. SANA's self-attention is one layer,
# attn.qkv, there and three here; its cross-attention's keys and values, one layer of twice the
# width there, are two here, and both too small for min_dim.
SANA = Family(
    name="sana",
    built_in="tiny-sana",
    network="SanaTransformer2DModel",
    layer_rules=LayerRules(
        keep=(
            "time_embed", "caption_projection", "patch_embed", "^proj_out",
            r"attn1\.to_[qkv]$",
        ),
        min_dim=2240,
        pointwise=True,
    ),
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "StableDiffusion3Pipeline": SD3,
    "FluxPipeline": FLUX,
    "SanaPipeline": SANA,
    "Flux2Pipeline": Family(name="flux2", unguided=None),
    "Flux2KleinPipeline": Family(name="flux2-klein"),
    "QwenImagePipeline": Family(name="qwen-image", guidance="true_cfg_scale"),
    "QwenImage21Pipeline": Family(name="qwen-image-2.1", guidance="true_cfg_scale"),
    "ZImagePipeline": Family(name="z-image", unguided=0.0),
    "Krea2Pipeline": Family(name="krea2", unguided=0.0),
    "Kandinsky5T2IPipeline": Family(name="kandinsky5", output="image"),
    "WanPipeline": Family(name="wan", output="frames[0]"),
    # The default schedule is a list as long as the steps.
    "Ideogram4Pipeline": Family(name="ideogram4", call={"guidance_schedule": None}),
    # Its guider begins at a step and carries momentum.
    "HunyuanImagePipeline": Family(
        name="hunyuan-image", guidance="distilled_guidance_scale", unguided=None,
        without=("guider",),
    ),
}  # fmt: skip

# What a pipeline class is by a word of its name, where flowrl cannot train it.
REFUSED = {
    "Kontext|Edit|Img2Img|ImageToImage|I2I|Inpaint|Fill|Redux|Control|Upscal|Upsampl|Refiner|SRPipe|"
    "Layered|OmniPipe|Cloze": "edits images",
    "Video|LTX|Mochi|Allegro|Latte|Animat|I2V|T2V|V2V|VACE|SkyReels|World|WM|Helios": (
        "makes videos"
    ),
    "Modular|Prior": "is a part of a pipeline",
    "PAG": "has a guidance of its own, by perturbed attention",
    "Cosmos": "has a schedule that is no straight line from noise to image",
    "Sprint|LCM|LatentConsistency": "samples in a few steps by another rule than a flow",
    "Audio|Music|AceStep": "makes sound",
    "PRXPixel": "makes images without an autoencoder",
    "DreamLite": "takes one prompt a call",
    "Nucleus": "encodes longer texts into other parts, which cannot be kept row by row",
    "OmniGen": "has no encode_prompt, so that texts cannot be kept apart from it",
    "GlmImage": "draws tokens of the image by a language model in each call",
    "StableDiffusionXL|StableDiffusionPipeline|PixArt|Kolors|HunyuanDiT|Kandinsky3|StableCascade|"
    "Wuerstchen|^IF": "removes noise, where flowrl trains pipelines that sample a flow",
}

# How names on the Hub begin, the licence, and its file, as the cards of these repositories say;
# without a file it is an identifier of the Hub. SANA's card has none and says "NSCL v2-custom".
LICENCES = (
    ("stabilityai/stable-diffusion-3.5-", "stabilityai-ai-community", "LICENSE.md"),
    ("black-forest-labs/FLUX.1-dev", "flux-1-dev-non-commercial-license", "LICENSE.md"),
    ("black-forest-labs/FLUX.1-schnell", "apache-2.0", ""),
    ("Efficient-Large-Model/Sana_", "nscl-v2-custom", "LICENSE.txt"),
)


def family_of(pipeline_class: str) -> Family:
    """Return what is known of a pipeline class (`_class_name` of model_index.json)."""
    return FAMILIES.get(pipeline_class) or Family(name=pipeline_class.removesuffix("Pipeline"))


def check_trainable(pipeline_class: str) -> None:
    """Raise UserError for a class that makes something else than images by a flow."""
    for words, what in REFUSED.items():
        if re.search(words, pipeline_class):
            raise UserError(
                f"{pipeline_class} {what}: flowrl trains text-to-image pipelines that sample a "
                "flow; flowrl recipes names some"
            )


def lora_targets(family: Family, network: nn.Module) -> tuple[str, ...]:
    """Return name endings of the layers that are adapted by default.

    Raises:
        UserError: The family has no list, and the network no layer that looks like attention.
    """
    targets = family.lora_targets or attention_projections(network)
    if not targets:
        raise UserError(
            f"{type(network).__name__} has no linear layers below a module named like attention: "
            "set lora.targets to name endings of the layers to adapt"
        )
    return targets


def attention_projections(network: nn.Module) -> tuple[str, ...]:
    """Return name endings of the linear layers of attention in repeated blocks, norms left out."""
    endings: dict[str, None] = {}
    for name, module in network.named_modules():
        parts = name.split(".")
        attention = [i for i, part in enumerate(parts) if "att" in part.lower()]
        repeated = any(part.isdigit() for part in parts[: attention[0]]) if attention else False
        if isinstance(module, nn.Linear) and repeated and not re.search("norm|gate", name):
            endings[".".join(parts[attention[-1] :])] = None
    # "to_out" of one kind of block may be a list of layers in another, which has no adapter.
    other = [n for n, m in network.named_modules() if not isinstance(m, nn.Linear)]
    return tuple(e for e in endings if not any(n.endswith(f".{e}") for n in other))


def layer_rules_of(network: nn.Module) -> LayerRules:
    """Return a network's published low-bit rules, else general ones.

    In general, attention and feed-forward projections of the repeated blocks get few bits;
    embeddings, norms, modulation, routers and the last layer stay exact. A gate of a feed-forward
    network or of attention is one of its projections.
    """
    for family in FAMILIES.values():
        if family.layer_rules is not None and family.network == type(network).__name__:
            return family.layer_rules
    lists = [name for name, m in network.named_modules() if isinstance(m, nn.ModuleList)]
    blocks = [n for n in lists if not any(n.startswith(f"{other}.") for other in lists)]
    outside = [rf"^(?!(?:{'|'.join(map(re.escape, blocks))})\.)"] if blocks else []
    routers = [
        rf"^{re.escape(name)}$"
        for name, module in network.named_modules()
        if name.endswith("gate")
        and isinstance(module, nn.Linear)
        and module.in_features > 10 * module.out_features  # one output for each expert
    ]
    return LayerRules(keep=(*outside, "norm|mod|embed|ada|router", *routers), min_dim=1000)
