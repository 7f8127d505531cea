"""A LoRA under ComfyUI's keys: the layers as the original checkpoints name and fuse them.

diffusers splits what the original SD3 and FLUX.1 keep as one layer: queries, keys and values, in
FLUX's single blocks the feed-forward's input too; and it exchanges the halves, shift and scale, of
the last normalisation. ComfyUI's loader takes `diffusion_model.LAYER` with `.lora_A.weight`
(r, in), `.lora_B.weight` (out, r) and `.alpha` (), and adds alpha / r lora_B lora_A to the layer.
Its names are facts of its `comfy/lora.py` and `comfy/utils.py`, and of diffusers'
`loaders/single_file_utils.py`, which the tests convert back with.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.backbones.fused_lora import Factors, stack_outputs, swap_halves
from flowrl.backbones.lora_files import layers_of
from flowrl.errors import UserError

PREFIX = "diffusion_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer of diffusers is in the original: part `part` of `layer`.

    shares: how many equal widths of outputs each part has; (1,) for a layer that is kept whole.
    swapped: the halves of its outputs change places.
    """

    layer: str
    part: int = 0
    shares: tuple[int, ...] = (1,)
    swapped: bool = False


QKV = (1, 1, 1)
QKV_MLP = (1, 1, 1, 4)  # FLUX.1's feed-forward is four times as wide

# Of a block: diffusers' name -> the original's, its part and how that is made up.
SD3_BLOCK = {
    "attn.to_q": ("x_block.attn.qkv", 0, QKV),
    "attn.to_k": ("x_block.attn.qkv", 1, QKV),
    "attn.to_v": ("x_block.attn.qkv", 2, QKV),
    "attn.to_out.0": ("x_block.attn.proj", 0, (1,)),
    "attn.add_q_proj": ("context_block.attn.qkv", 0, QKV),
    "attn.add_k_proj": ("context_block.attn.qkv", 1, QKV),
    "attn.add_v_proj": ("context_block.attn.qkv", 2, QKV),
    "attn.to_add_out": ("context_block.attn.proj", 0, (1,)),
    "attn2.to_q": ("x_block.attn2.qkv", 0, QKV),
    "attn2.to_k": ("x_block.attn2.qkv", 1, QKV),
    "attn2.to_v": ("x_block.attn2.qkv", 2, QKV),
    "attn2.to_out.0": ("x_block.attn2.proj", 0, (1,)),
    "norm1.linear": ("x_block.adaLN_modulation.1", 0, (1,)),
    "norm1_context.linear": ("context_block.adaLN_modulation.1", 0, (1,)),
    "ff.net.0.proj": ("x_block.mlp.fc1", 0, (1,)),
    "ff.net.2": ("x_block.mlp.fc2", 0, (1,)),
    "ff_context.net.0.proj": ("context_block.mlp.fc1", 0, (1,)),
    "ff_context.net.2": ("context_block.mlp.fc2", 0, (1,)),
}
FLUX_BLOCK = {
    "attn.to_q": ("img_attn.qkv", 0, QKV),
    "attn.to_k": ("img_attn.qkv", 1, QKV),
    "attn.to_v": ("img_attn.qkv", 2, QKV),
    "attn.to_out.0": ("img_attn.proj", 0, (1,)),
    "attn.add_q_proj": ("txt_attn.qkv", 0, QKV),
    "attn.add_k_proj": ("txt_attn.qkv", 1, QKV),
    "attn.add_v_proj": ("txt_attn.qkv", 2, QKV),
    "attn.to_add_out": ("txt_attn.proj", 0, (1,)),
    "norm1.linear": ("img_mod.lin", 0, (1,)),
    "norm1_context.linear": ("txt_mod.lin", 0, (1,)),
    "ff.net.0.proj": ("img_mlp.0", 0, (1,)),
    "ff.net.2": ("img_mlp.2", 0, (1,)),
    "ff_context.net.0.proj": ("txt_mlp.0", 0, (1,)),
    "ff_context.net.2": ("txt_mlp.2", 0, (1,)),
}
FLUX_SINGLE = {
    "attn.to_q": ("linear1", 0, QKV_MLP),
    "attn.to_k": ("linear1", 1, QKV_MLP),
    "attn.to_v": ("linear1", 2, QKV_MLP),
    "proj_mlp": ("linear1", 3, QKV_MLP),
    "proj_out": ("linear2", 0, (1,)),
    "norm.linear": ("modulation.lin", 0, (1,)),
}
BLOCKS = {  # family -> diffusers' list of blocks -> the original's, and what a block holds
    "sd3": {"transformer_blocks": ("joint_blocks", SD3_BLOCK)},
    "flux": {
        "transformer_blocks": ("double_blocks", FLUX_BLOCK),
        "single_transformer_blocks": ("single_blocks", FLUX_SINGLE),
    },
}
TIME, TEXT = "time_text_embed.timestep_embedder", "time_text_embed.text_embedder"
GUIDANCE = "time_text_embed.guidance_embedder"
OUTSIDE = {  # the blocks
    "sd3": {
        "context_embedder": "context_embedder",
        f"{TIME}.linear_1": "t_embedder.mlp.0",
        f"{TIME}.linear_2": "t_embedder.mlp.2",
        f"{TEXT}.linear_1": "y_embedder.mlp.0",
        f"{TEXT}.linear_2": "y_embedder.mlp.2",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
    },
    "flux": {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        f"{TIME}.linear_1": "time_in.in_layer",
        f"{TIME}.linear_2": "time_in.out_layer",
        f"{TEXT}.linear_1": "vector_in.in_layer",
        f"{TEXT}.linear_2": "vector_in.out_layer",
        f"{GUIDANCE}.linear_1": "guidance_in.in_layer",
        f"{GUIDANCE}.linear_2": "guidance_in.out_layer",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
    },
}
SWAPPED = "norm_out.linear"


def check_family(family: str) -> None:
    """Raises UserError unless ComfyUI loads LoRAs of the family."""
    if family == "sana":
        raise UserError(
            "ComfyUI has no LoRA path for SANA: load the LoRA with diffusers "
            "(pipe.load_lora_weights), or export with --format merged"
        )
    if family not in BLOCKS:
        raise UserError(
            f"the backbone is {family!r}, but ComfyUI's names are known for {', '.join(BLOCKS)}: "
            "export with --format diffusers or merged"
        )


def place(name: str, family: str) -> Place:
    """Where the original keeps diffusers' layer `name`. Raises UserError for an unknown one."""
    if name in OUTSIDE[family]:
        return Place(layer=OUTSIDE[family][name], swapped=name == SWAPPED)
    match = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", name)
    blocks, layers = BLOCKS[family].get(match[1], ("", {})) if match else ("", {})
    if match is None or match[3] not in layers:
        raise UserError(
            f"the LoRA adapts {name}, which has no place in ComfyUI's {family}: export with "
            "--format diffusers or merged"
        )
    layer, part, shares = layers[match[3]]
    return Place(layer=f"{blocks}.{match[2]}.{layer}", part=part, shares=shares)


def comfyui_state(state: Mapping[str, Tensor], strength: float, family: str) -> dict[str, Tensor]:
    """A diffusers LoRA of a transformer, PEFT's names -> the tensors of ComfyUI's file.

    strength: alpha / rank, of all layers. The change of each original layer is exactly that of
    its parts below each other; a part without LoRA does not change.
    Raises UserError for a family or a layer that has no place in ComfyUI.
    """
    check_family(family)
    fused: dict[str, tuple[Place, dict[int, Factors]]] = {}
    for name, factors in layers_of(state).items():
        at = place(name, family)
        # The last SD3 block normalises its text by shift and scale alone, like the last layer.
        last = name.endswith("norm1_context.linear") and len(factors[1]) == 2 * factors[0].shape[1]
        whole = swap_halves(factors) if at.swapped or last else factors
        fused.setdefault(at.layer, (at, {}))[1][at.part] = whole
    found: dict[str, Tensor] = {}
    for layer, (at, parts) in fused.items():
        down, up = _fuse(parts, at.shares)
        found[f"{PREFIX}{layer}.lora_A.weight"] = down.contiguous()
        found[f"{PREFIX}{layer}.lora_B.weight"] = up.contiguous()
        found[f"{PREFIX}{layer}.alpha"] = torch.tensor(strength * len(down))
    return found


def _fuse(parts: Mapping[int, Factors], shares: Sequence[int]) -> Factors:
    if len(shares) == 1:
        return parts[0]
    part, (_, up) = next(iter(parts.items()))
    width = len(up) // shares[part]
    return stack_outputs([parts.get(i) for i in range(len(shares))], [width * s for s in shares])
