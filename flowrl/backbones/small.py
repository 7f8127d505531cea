"""Build a small random pipeline of any diffusers text-to-image class, without a network.

The components and their classes are read from the pipeline's `__init__`; each component's
configuration is its own, with the sizes below in place of the published ones. The result is a
complete folder, so that a dry run and the contract test run the user's own class.
"""

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.errors import UserError

# Width of a text encoder's hidden states, except CLIP's: two CLIP encoders side by side have it.
TEXT_WIDTH = 32
CLIP_WIDTH = 16
SPECIAL_TOKENS = (
    "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
VOCABULARY = 320
NEEDED = ("vae", "transformer")  # components, also of classes that load without them

# Sizes of networks by the names that diffusers' classes give them.
NETWORK_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("num_layers", "num_single_layers", "n_layers", "depth", "num_visual_blocks"), 2
    ),
    **dict.fromkeys(
        ("num_mmdit_layers", "num_single_dit_layers", "num_refiner_layers", "n_refiner_layers",
         "num_text_blocks", "num_layerwise_text_blocks", "num_refiner_text_blocks",
         "approximator_layers"), 1
    ),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "n_heads", "n_kv_heads", "num_kv_heads",
         "num_key_value_heads", "num_cross_attention_heads", "text_num_attention_heads",
         "text_num_key_value_heads", "num_text_layers"), 2
    ),
    **dict.fromkeys(("attention_head_dim", "cross_attention_head_dim"), 16),
    **dict.fromkeys(
        ("hidden_size", "dim", "model_dim", "cross_attention_dim", "caption_projection_dim",
         "time_dim", "time_embed_dim", "condition_dim", "adaln_dim", "approximator_hidden_dim"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "ff_dim", "text_intermediate_size"), 64
    ),
    **dict.fromkeys(
        ("joint_attention_dim", "context_in_dim", "cap_feat_dim", "text_hidden_dim",
         "text_embed_dim", "text_in_dim", "in_text_dim", "llm_features_dim", "caption_channels",
         "text_encoder_dim", "pooled_projection_dim"), TEXT_WIDTH
    ),
    "in_text_dim2": CLIP_WIDTH, "multiple_of": 16, "sample_size": 16,
    "pos_embed_max_size": 64, "timestep_embed_dim": 32, "approximator_num_channels": 16,
    "axes_lens": (1024, 64, 64),
}  # fmt: skip
# Rotary axes of a head of 16, by their number.
ROTARY_AXES = {2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}

# Sizes of text encoders by the names that transformers' configurations give them.
TEXT_SIZES: dict[str, Any] = {
    "hidden_size": TEXT_WIDTH, "d_model": TEXT_WIDTH, "num_hidden_layers": 2, "num_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "d_kv": 16, "intermediate_size": 64, "d_ff": 64, "vocab_size": VOCABULARY,
    "depth": 1, "out_hidden_size": TEXT_WIDTH, "projection_dim": TEXT_WIDTH, "image_size": 28,
    "max_position_embeddings": 2048, "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16, "fullatt_block_indexes": [0],
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3,
}  # fmt: skip
CLIP_SIZES = {"hidden_size": CLIP_WIDTH, "projection_dim": CLIP_WIDTH, "head_dim": 8,
              "max_position_embeddings": 248, "intermediate_size": 32}  # fmt: skip

# Autoencoders: `channels` of a latent, and the arguments that make the class small.
_BLOCKS = (8, 8, 8, 8)
AUTOENCODERS: dict[str, tuple[int, dict[str, Any]]] = {
    "AutoencoderKL": (4, {
        "block_out_channels": _BLOCKS, "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4, "latent_channels": 4, "norm_num_groups": 4,
        "shift_factor": 0.1, "scaling_factor": 0.5,
    }),
    "AutoencoderKLFlux2": (16, {
        "block_out_channels": _BLOCKS, "layers_per_block": 1, "latent_channels": 4,
        "norm_num_groups": 4, "sample_size": 64,
    }),
    "AutoencoderKLQwenImage": (16, {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}),
    "AutoencoderKLQwenImage21": (64, {
        "base_dim": 4, "decoder_base_dim": 4, "num_res_blocks": 1,
    }),
    "AutoencoderKLWan": (16, {"base_dim": 4, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}),
    "AutoencoderKLHunyuanImage": (4, {
        "in_channels": 3, "out_channels": 3, "latent_channels": 4,
        "block_out_channels": (32, 32, 32, 32), "layers_per_block": 1,
        "spatial_compression_ratio": 8, "sample_size": 64, "scaling_factor": 0.5,
    }),
    "AutoencoderDC": (4, {
        # Of narrower heads ReLU attention divides zeros by zeros: no finite difference converges.
        "latent_channels": 4, "attention_head_dim": 32,
        "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
        "encoder_block_out_channels": (8, 32), "decoder_block_out_channels": (8, 32),
        "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)),
        "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1),
        "downsample_block_type": "conv", "upsample_block_type": "interpolate",
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Override:
    """What one pipeline class needs beside the general sizes.

    Args:
        network: Arguments of the transformer.
        texts: Arguments of each text encoder's configuration, by the component's name.
        pipeline: Arguments of the pipeline itself.
        packed: The pipeline folds 2 x 2 latents into channels (4 times the autoencoder's).
        vae: Arguments of the autoencoder.
    """

    network: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    vae: dict[str, Any] = field(default_factory=dict)


_KLEIN = Override(
    {"joint_attention_dim": 96, "guidance_embeds": False},
    {"text_encoder": {"num_hidden_layers": 28}},
)
OVERRIDES: dict[str, Override] = {
    "FluxPipeline": Override({"pooled_projection_dim": CLIP_WIDTH}, packed=True),
    "Flux2Pipeline": Override(
        {"joint_attention_dim": 96},
        {"text_encoder": {"num_hidden_layers": 31, "intermediate_size": 16}},
    ),
    "Flux2KleinPipeline": _KLEIN,
    "Flux2KleinKVPipeline": _KLEIN,
    "QwenImagePipeline": Override({"out_channels": 16, "in_channels": 64}),
    "Krea2Pipeline": Override(pipeline={"text_encoder_select_layers": (1, 2)}, packed=True),
    "ChromaPipeline": Override(packed=True),
    "LongCatImagePipeline": Override({"in_channels": 64}, vae={"latent_channels": 16}),
    "OvisImagePipeline": Override({"out_channels": 16}, packed=True),
    "BriaPipeline": Override({"pooled_projection_dim": None}, packed=True),
    # An empty prompt is the token 128000, so that its vocabulary stays large.
    "BriaFiboPipeline": Override(
        {"text_encoder_dim": 4, "joint_attention_dim": 8},
        {"text_encoder": {"vocab_size": 128_001, "hidden_size": 4}},
    ),
    "BriaFibo2Pipeline": Override(
        {
            "cap_feat_dim": 3 * TEXT_WIDTH,
            "injection_layer_ids": (1,),
            "min_num_gist_tokens": 4,
            "max_num_gist_tokens": 8,
            "gist_step": 2,
            "in_channels": 4,
        },
        {"text_encoder": {"num_hidden_layers": 36}},
    ),
    "PRXPipeline": Override({"axes_dim": (8, 8)}),
    "WanPipeline": Override({"text_dim": TEXT_WIDTH}),
    "CogView4Pipeline": Override({"rope_axes_dim": (16, 16)}),
    "HunyuanImagePipeline": Override({"rope_axes_dim": (8, 8), "text_embed_2_dim": TEXT_WIDTH}),
    "Kandinsky5T2IPipeline": Override({"patch_size": (1, 2, 2)}),
    "Ideogram4Pipeline": Override(
        {"llm_features_dim": 13 * TEXT_WIDTH, "mrope_section": (4, 2, 2)},
        {"text_encoder": {"num_hidden_layers": 36}},
    ),
}

# The classes that stand for an abstract annotation.
TEXT_CLASSES = {
    "ZImagePipeline": "Qwen3Model",
    "Ideogram4Pipeline": "Qwen3VLModel",
    "Gemma2PreTrainedModel": "Gemma2Model",
    "GemmaPreTrainedModel": "GemmaModel",
    "T5GemmaEncoder": "T5GemmaEncoderModel",
}


def small_pipeline(pipeline_class: type, seed: int = 0) -> Any:
    """Build a small pipeline of a class, with random weights.

    Args:
        pipeline_class: A text-to-image class of diffusers whose scheduler steps a flow.
        seed: Of the weights; the process's generator is left as it was.

    Raises:
        UserError: A component of the class cannot be built small.
    """
    import torch

    override = OVERRIDES.get(pipeline_class.__name__, Override())
    components: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, classes in component_classes(pipeline_class).items():
            try:
                components[name] = _component(name, classes, pipeline_class.__name__, override)
            except Exception as error:
                raise UserError(
                    f"{pipeline_class.__name__}: no small {name} ({type(error).__name__}: {error})"
                ) from error
    return pipeline_class(**components, **override.pipeline)


def small_folder(pipeline_class: type, folder: Path, seed: int = 0) -> Path:
    """Write a small pipeline of a class to a folder that `from_pretrained` loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # of each component that is written
    small_pipeline(pipeline_class, seed).save_pretrained(folder)
    return folder


def component_classes(pipeline_class: Any) -> dict[str, list[type]]:
    """Read components from a pipeline's signature; optional ones that are left out have none."""
    types = pipeline_class._get_signature_types()
    optional = set(pipeline_class._optional_components)
    components: dict[str, list[type]] = {}
    for name, parameter in inspect.signature(pipeline_class.__init__).parameters.items():
        if name == "self" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        classes = [c for c in types.get(name, ()) if inspect.isclass(c) and c is not type(None)]
        builtin = all(c.__module__ == "builtins" for c in classes)
        default = parameter.default is not parameter.empty
        if default and name not in NEEDED and (builtin or name in optional):
            # Switches keep their defaults; image encoders and enhancers are not needed for text.
            if name in optional and not builtin:
                components[name] = []
            continue
        components[name] = classes
    return components


def small_tokenizer(max_length: int = 512) -> Any:
    """Build a tokenizer of bytes with a chat template; it reads every text.

    Args:
        max_length: Tokens that a prompt is cut to.
    """
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(
        extra_ids=0, model_max_length=max_length, bos_token="<s>",
        additional_special_tokens=list(SPECIAL_TOKENS), chat_template=(
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
            "{{ m['content'] }}{% else %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}"
            "{% endif %}<|im_end|>\n{% endfor %}"
        ),
    )  # fmt: skip


def _component(name: str, classes: list[type], pipeline: str, override: Override) -> Any:
    """Build one component of a pipeline; None where it is left out."""
    import diffusers

    if not classes:
        return None
    kind = classes[0]
    if kind.__name__ == "Qwen3VLProcessor":
        return _vision_processor()
    if "tokenizer" in name or "processor" in name:
        return small_tokenizer(77 if "CLIP" in kind.__name__ else 512)
    if name == "vae":
        return kind(**{**AUTOENCODERS[kind.__name__][1], **override.vae})
    if name == "scheduler":
        if kind.__name__ == "DPMSolverMultistepScheduler":
            return kind(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
        # A scheduler that steps a flow: annotations of pipelines may be more general.
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    if "encoder" in name:
        return _text_encoder(kind, pipeline, override.texts.get(name, {}))
    return _network(kind, pipeline, override)


def _vision_processor() -> Any:
    """Build a processor of texts and images around the tokenizer of bytes."""
    import transformers

    tokenizer = small_tokenizer()
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )


def _text_encoder(kind: Any, pipeline: str, sizes: dict[str, Any]) -> Any:
    """Build a text encoder of few and narrow layers."""
    import transformers

    concrete = TEXT_CLASSES.get(pipeline) or TEXT_CLASSES.get(kind.__name__)
    kind = getattr(transformers, concrete) if concrete else kind
    clip = CLIP_SIZES if kind.__name__.startswith("CLIP") else {}
    config = kind.config_class()
    if kind.__name__ == "T5GemmaEncoderModel":
        config.is_encoder_decoder = False
    _shrink(config, {**TEXT_SIZES, **clip, **sizes})
    return kind(config).eval()


def _shrink(config: Any, sizes: dict[str, Any]) -> None:
    """Set the sizes that a configuration and its parts have."""
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    # Lists with one entry a layer, and rotary sections, follow the new sizes.
    layers = getattr(config, "num_hidden_layers", None)
    if getattr(config, "layer_types", None) and layers:
        config.layer_types = (config.layer_types * layers)[:layers]
    for rope in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if isinstance(rope, dict) and "vl" in getattr(config, "model_type", ""):
            rope["mrope_section"] = [2, 3, 3]
    for part in getattr(config, "sub_configs", None) or {}:
        if getattr(config, part, None) is not None:
            _shrink(getattr(config, part), sizes)


def _network(kind: Any, pipeline: str, override: Override) -> Any:
    """Build the network of few and narrow layers whose channels are the autoencoder's."""
    import diffusers
    import torch

    vae = component_classes(getattr(diffusers, pipeline)).get("vae") or []
    channels = AUTOENCODERS[vae[0].__name__][0] if vae else 4
    channels *= 4 if override.packed else 1
    parameters = inspect.signature(kind.__init__).parameters
    arguments = {name: size for name, size in NETWORK_SIZES.items() if name in parameters}
    for name, parameter in parameters.items():
        if name in ("in_channels", "out_channels", "in_visual_dim", "out_visual_dim"):
            if parameter.default is not None:
                arguments[name] = channels
        elif "axes" in name and "dim" in name and parameter.default:
            arguments[name] = ROTARY_AXES[len(parameter.default)]
    network = kind(**{**arguments, **override.network}).eval()
    # Of the scale that keeps activations: a class's own, or zeros, would hide most layers behind
    # gates that are nearly shut.
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=max(module.in_features, 1) ** -0.5)
    for weights in network.parameters():
        if weights.ndim > 1 and not weights.any():
            torch.nn.init.normal_(weights, std=0.1)
    return network
