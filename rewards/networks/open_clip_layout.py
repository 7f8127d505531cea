"""CLIPs that open_clip wrote, such as DFN's, as transformers' CLIPModel.

The folder holds open_clip_config.json, and open_clip_model.safetensors or
open_clip_pytorch_model.bin. Names and meaning are those of open_clip 3.3 (MIT):
src/open_clip/{model,transformer,factory}.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .loading import building, first_file, fit, imported, read_weights, weights_file
from .preprocess import MEAN, STD, Preprocess

PREFIXES = ("hf-hub:", "local-dir:")  # as open_clip itself tells a repository and a folder
CONFIG = "open_clip_config.json"
FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
END = 49407  # the end of a text, the highest number of CLIP's vocabulary
KNOWN = {  # options that this reads; another one means another network
    "model_cfg": {"embed_dim", "quick_gelu", "vision_cfg", "text_cfg"},
    "vision_cfg": {"image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"},
    "text_cfg": {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"},
}
HARMLESS = {  # by default, or of no meaning to a vision transformer and CLIP's own text network
    "custom_text": (False, None), "init_logit_scale": None, "init_logit_bias": (None,),
    "hf_tokenizer_name": (None, ""), "ls_init_value": (None,),
}  # fmt: skip
BLOCK = {
    "ln_1": "layer_norm1", "ln_2": "layer_norm2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}  # fmt: skip
TOPS = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "logit_scale": "logit_scale",
} | {
    f"{theirs}.{part}": f"{ours}.{part}"
    for theirs, ours in {
        "visual.ln_pre": "vision_model.pre_layrnorm",  # spelled so in transformers
        "visual.ln_post": "vision_model.post_layernorm",
        "ln_final": "text_model.final_layer_norm",
    }.items()
    for part in ("weight", "bias")
}
PROJECTIONS = {
    "visual.proj": "visual_projection.weight",
    "text_projection": "text_projection.weight",
}
TOWERS = {"visual.transformer.resblocks.": "vision_model", "transformer.resblocks.": "text_model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenClip:
    """A network in transformers' form, and what its images go through."""

    network: Any
    preprocess: Preprocess


def load_open_clip(model: str, revision: str | None, reward: str) -> OpenClip:
    """Read "hf-hub:owner/name" or "local-dir:folder", float32 on the CPU.

    Raises FileNotFoundError for what is not there, ValueError for another kind of network.
    """
    name = model.partition(":")[2]
    config_file = weights_file(name, CONFIG, revision)
    try:
        whole = json.loads(config_file.read_text(encoding="utf-8"))
        config = transformers_config(whole["model_cfg"])
        preprocess = preprocessing(whole.get("preprocess_cfg") or {})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{config_file} describes no CLIP that can be read ({type(error).__name__}: {error}); "
            "expected a vision transformer and CLIP's own text network"
        ) from error
    path = first_file(name, FILES, revision)
    kind, make = (imported(f"transformers:{n}", reward) for n in ("CLIPModel", "CLIPConfig"))
    with building():
        network = kind(make(**config))
    fit(network, to_transformers(read_weights(path)), path, f"the CLIP that {CONFIG} describes")
    return OpenClip(network=network, preprocess=preprocess)


def transformers_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a CLIPConfig for open_clip's `model_cfg`. Raises ValueError, KeyError."""
    vision, text = model["vision_cfg"], model["text_cfg"]
    for name, part in (("model_cfg", model), ("vision_cfg", vision), ("text_cfg", text)):
        for key, value in part.items():
            allowed = HARMLESS.get(key, ())
            if key not in KNOWN[name] and allowed is not None and value not in allowed:
                raise ValueError(f"{name}.{key} is {value!r}, which is not known here")
    act = {"hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu"}
    return {
        "projection_dim": model["embed_dim"],
        "vision_config": _tower(vision) | act | {
            "num_attention_heads": vision["width"] // vision.get("head_width", 64),
            "image_size": _whole(vision["image_size"], "image_size"),
            "patch_size": _whole(vision["patch_size"], "patch_size"),
            "projection_dim": model["embed_dim"],
        },
        "text_config": _tower(text) | act | {
            "num_attention_heads": text["heads"],
            "vocab_size": text.get("vocab_size", END + 1),
            "max_position_embeddings": text.get("context_length", 77),
            "projection_dim": model["embed_dim"],
            "bos_token_id": END - 1, "eos_token_id": END, "pad_token_id": 0,
        },
    }  # fmt: skip


def _tower(part: Mapping[str, Any]) -> dict[str, Any]:
    width = _whole(part["width"], "width")
    return {
        "hidden_size": width,
        "num_hidden_layers": _whole(part["layers"], "layers"),
        "intermediate_size": int(width * part.get("mlp_ratio", 4.0)),
    }


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected a whole number")
    return value


def preprocessing(found: Mapping[str, Any]) -> Preprocess:
    """What open_clip's `preprocess_cfg` says; raises ValueError for what is not done here.

    Without an entry it is open_clip's default: the shortest side is resized, bicubic.
    """
    mode, filter = found.get("resize_mode", "shortest"), found.get("interpolation", "bicubic")
    if mode not in ("shortest", "squash") or filter != "bicubic":
        raise ValueError(f"images are resized by {mode!r}, {filter!r}")
    mean, std = (tuple(found.get(key, default)) for key, default in (("mean", MEAN), ("std", STD)))
    return Preprocess(mean=mean, std=std, squash=mode == "squash")


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of open_clip's CLIP under the names of transformers' CLIPModel.

    Queries, keys and values are one matrix there, (3 D, D); projections are transposed. Unknown
    names stay as they are, for the message that refuses them.
    """
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if name in PROJECTIONS:
            found[PROJECTIONS[name]] = value.T.contiguous()
        elif tower := next((t for t in TOWERS if name.startswith(t)), None):
            number, _, rest = name[len(tower) :].partition(".")
            found |= _block(f"{TOWERS[tower]}.encoder.layers.{number}", rest, value)
        else:
            found[TOPS.get(name, name)] = value
    return found


def _block(layer: str, name: str, value: Tensor) -> dict[str, Tensor]:
    if name in ("attn.in_proj_weight", "attn.in_proj_bias"):
        part = name.removeprefix("attn.in_proj_")
        return {
            f"{layer}.self_attn.{letter}_proj.{part}": piece.clone()
            for letter, piece in zip("qkv", value.tensor_split(3), strict=True)
        }
    module, _, part = name.rpartition(".")
    return {f"{layer}.{BLOCK.get(module, module)}.{part}": value}
