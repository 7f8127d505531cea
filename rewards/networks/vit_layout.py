"""Vision transformers under timm's names, as BLIP, DINO and others publish them.

They become transformers' BlipVisionModel, the same network under other names: queries, keys and
values in one matrix, norms before, and one at the end.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

TOPS = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
BLOCK = {
    "norm1": "layer_norm1", "norm2": "layer_norm2", "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
}  # fmt: skip
HEAD_WIDTH = 64  # of attention, in all of them


def vision_size(state: Mapping[str, Tensor], *, eps: float, act: str = "gelu") -> dict[str, Any]:
    """Return arguments of a BlipVisionConfig, told from shapes. Raises KeyError for another layout.

    eps: of layer norms, which no shape tells.
    """
    patches = state["patch_embed.proj.weight"]  # (D, 3, patch, patch)
    width, patch = patches.shape[0], patches.shape[-1]
    blocks = {name.split(".")[1] for name in state if name.startswith("blocks.")}
    return {
        "hidden_size": width, "num_attention_heads": max(1, width // HEAD_WIDTH),
        "num_hidden_layers": len(blocks),
        "intermediate_size": state["blocks.0.mlp.fc1.weight"].shape[0],
        "image_size": round((state["pos_embed"].shape[1] - 1) ** 0.5) * patch,
        "patch_size": patch, "layer_norm_eps": eps, "hidden_act": act,
    }  # fmt: skip


def to_blip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the names of BlipVisionModel; unknown names stay as they are."""
    return {_renamed(name): value for name, value in state.items()}


def under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries that begin with a prefix, without it."""
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}


def _renamed(name: str) -> str:
    if name in TOPS:
        return TOPS[name]
    module, _, part = name.rpartition(".")
    if not module.startswith("blocks."):
        return f"{TOPS.get(module, module)}.{part}"
    _, number, rest = module.split(".", 2)
    return f"encoder.layers.{number}.{BLOCK.get(rest, rest)}.{part}"
