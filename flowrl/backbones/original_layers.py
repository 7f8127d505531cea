"""Layers as the original checkpoints of SD3 and FLUX.1 name and fuse them, for ComfyUI's LoRAs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrl.errors import UserError

Factors = tuple[Tensor, Tensor]  # down (r, in), up (out, r)


def weight_change(down: Tensor, up: Tensor, strength: float) -> Tensor:
    """Return strength * up @ down: (out, in) fp32, or float64 where a factor is."""
    kind = torch.promote_types(torch.promote_types(down.dtype, up.dtype), torch.float32)
    return strength * (up.to(kind) @ down.to(kind))


def stack_outputs(parts: Sequence[Factors | None], rows: Sequence[int]) -> Factors:
    """Return the LoRA of layers whose outputs are concatenated: ranks add up, nothing is rounded.

    Args:
        parts: the layers in order, None for one without LoRA.
        rows: outputs of each.

    Returns:
        down (sum r_i, in), all `down` below each other; up (sum rows, sum r_i), block diagonal.

    Raises:
        ValueError: all are None, or an `up` has another number of rows.
    """
    present = [part for part in parts if part is not None]
    if not present:
        raise ValueError("no layer has a LoRA")
    ranks = [0 if part is None else part[0].shape[0] for part in parts]
    up = present[0][1].new_zeros(sum(rows), sum(ranks))
    for i, part in enumerate(parts):
        if part is None:
            continue
        if part[1].shape[0] != rows[i]:
            raise ValueError(f"part {i} has {part[1].shape[0]} outputs, expected {rows[i]}")
        top, left = sum(rows[:i]), sum(ranks[:i])
        up[top : top + rows[i], left : left + ranks[i]] = part[1]
    return torch.cat([down for down, _ in present]), up


def swap_halves(factors: Factors) -> Factors:
    """Return the LoRA of the layer whose first and second half of outputs are swapped."""
    down, up = factors
    first, second = up.chunk(2)
    return down, torch.cat([second, first])


def layers_of(state: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return LoRA factors by layer. Raises UserError for anything that is not a pair of them."""
    names = {name.partition(".lora_")[0] for name in state}
    wanted = {f"{name}.lora_{side}.weight" for name in names for side in "AB"}
    if other := sorted(set(state) ^ wanted):
        raise UserError(
            f"the LoRA has {len(other)} tensors that are not pairs of lora_A and lora_B, the first "
            f"is {other[0]}: such a file cannot be exported"
        )
    return {n: (state[f"{n}.lora_A.weight"], state[f"{n}.lora_B.weight"]) for n in sorted(names)}


PREFIX = "diffusion_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a layer of diffusers is in the original checkpoint."""

    layer: str  # the original's name
    part: int = 0  # which of its parts
    shares: tuple[int, ...] = (1,)  # relative widths of the parts' outputs; (1,) is one part
    swapped: bool = False  # the halves of its outputs change places


QKV = (1, 1, 1)
QKV_MLP = (1, 1, 1, 4)  # FLUX.1's feed-forward is four times as wide


def _qkv(
    names: str, layer: str, shares: tuple[int, ...] = QKV
) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    return {names.format(letter): (layer, part, shares) for part, letter in enumerate("qkv")}


# In a block: diffusers' name -> the original's name, part and shares.
SD3_BLOCK = {
    **_qkv("attn.to_{}", "x_block.attn.qkv"),
    "attn.to_out.0": ("x_block.attn.proj", 0, (1,)),
    **_qkv("attn.add_{}_proj", "context_block.attn.qkv"),
    "attn.to_add_out": ("context_block.attn.proj", 0, (1,)),
    **_qkv("attn2.to_{}", "x_block.attn2.qkv"),
    "attn2.to_out.0": ("x_block.attn2.proj", 0, (1,)),
    "norm1.linear": ("x_block.adaLN_modulation.1", 0, (1,)),
    "norm1_context.linear": ("context_block.adaLN_modulation.1", 0, (1,)),
    "ff.net.0.proj": ("x_block.mlp.fc1", 0, (1,)),
    "ff.net.2": ("x_block.mlp.fc2", 0, (1,)),
    "ff_context.net.0.proj": ("context_block.mlp.fc1", 0, (1,)),
    "ff_context.net.2": ("context_block.mlp.fc2", 0, (1,)),
}
FLUX_BLOCK = {
    **_qkv("attn.to_{}", "img_attn.qkv"),
    "attn.to_out.0": ("img_attn.proj", 0, (1,)),
    **_qkv("attn.add_{}_proj", "txt_attn.qkv"),
    "attn.to_add_out": ("txt_attn.proj", 0, (1,)),
    "norm1.linear": ("img_mod.lin", 0, (1,)),
    "norm1_context.linear": ("txt_mod.lin", 0, (1,)),
    "ff.net.0.proj": ("img_mlp.0", 0, (1,)),
    "ff.net.2": ("img_mlp.2", 0, (1,)),
    "ff_context.net.0.proj": ("txt_mlp.0", 0, (1,)),
    "ff_context.net.2": ("txt_mlp.2", 0, (1,)),
}
FLUX_SINGLE = {
    **_qkv("attn.to_{}", "linear1", QKV_MLP),
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
    """Raise UserError unless ComfyUI loads LoRAs of the family."""
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


def find_place(name: str, family: str) -> Place:
    """Return where the original keeps diffusers' layer `name`; raise UserError if unknown."""
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


def comfyui_state(
    state: Mapping[str, Tensor], strength: float | Mapping[str, float], family: str
) -> dict[str, Tensor]:
    """Return the tensors of ComfyUI's file for a diffusers LoRA with PEFT's names.

    The change of each original layer is exactly that of its parts stacked, zero for a part without
    LoRA. strength: alpha / rank, of all layers or by layer; where they differ they go into the
    factors. Raises UserError for an unknown family or layer.
    """
    check_family(family)
    layers = layers_of(state)
    common = strength if isinstance(strength, int | float) else 1.0
    if not isinstance(strength, int | float):
        layers = {n: (down, up * strength[n]) for n, (down, up) in layers.items()}
    fused: dict[str, tuple[Place, dict[int, Factors]]] = {}
    for name, factors in layers.items():
        at = find_place(name, family)
        # The last SD3 block normalises its text by shift and scale alone, like the last layer.
        last = name.endswith("norm1_context.linear") and len(factors[1]) == 2 * factors[0].shape[1]
        whole = swap_halves(factors) if at.swapped or last else factors
        fused.setdefault(at.layer, (at, {}))[1][at.part] = whole
    found: dict[str, Tensor] = {}
    for layer, (at, parts) in fused.items():
        down, up = _fuse(parts, at.shares)
        found[f"{PREFIX}{layer}.lora_A.weight"] = down.contiguous()
        found[f"{PREFIX}{layer}.lora_B.weight"] = up.contiguous()
        found[f"{PREFIX}{layer}.alpha"] = torch.tensor(common * len(down))
    return found


def _fuse(parts: Mapping[int, Factors], shares: Sequence[int]) -> Factors:
    if len(shares) == 1:
        return parts[0]
    part, (_, up) = next(iter(parts.items()))
    width = len(up) // shares[part]
    return stack_outputs([parts.get(i) for i in range(len(shares))], [width * s for s in shares])


# --- the inverse: layers of diffusers in a LoRA with the original's names ------------------------


def original_family(names: Iterable[str], path: Path) -> str:
    """Return whose original names a LoRA has: sd3 or flux. Raises UserError for neither."""
    names = list(names)
    for family, blocks in BLOCKS.items():
        if any(original in name for name in names for original, _ in blocks.values()):
            return family
    raise UserError(
        f"{path} has keys as {names[0]}, which name no block of SD3 or FLUX.1: flowrl reads the "
        "keys of kohya and ComfyUI for these two"
    )


def _parts(family: str, original: str) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the layers of diffusers that the original keeps as one, with part and shares."""
    outside = [name for name, its in OUTSIDE[family].items() if its == original]
    if outside:
        return [(outside[0], 0, (1,))]
    match = re.fullmatch(r"(\w+)\.(\d+)\.(.+)", original)
    found = []
    for own, (blocks, layers) in BLOCKS[family].items():
        if match is not None and match[1] == blocks:
            for name, (layer, part, shares) in layers.items():
                if layer == match[3]:
                    found.append((f"{own}.{match[2]}.{name}", part, shares))
    return found


def from_original(original: str, factors: Factors, family: str, source: str) -> dict[str, Factors]:
    """Return the LoRAs of diffusers' layers for that of an original layer: `comfyui_state` undone.

    The change is the same, number by number. Rows of `down` that a part does not use are left out,
    so that a file that flowrl wrote comes back as it was. Raises UserError for an unknown layer.
    """
    parts = _parts(family, original)
    if not parts:
        raise UserError(f"{source} adapts {original}, which is no layer of {family}'s original")
    down, up = factors
    if len(parts) == 1:
        name = parts[0][0]
        halves = name.endswith("norm1_context.linear") and len(up) == 2 * down.shape[1]
        return {name: swap_halves(factors) if name == SWAPPED or halves else factors}
    shares = parts[0][2]
    if len(up) % sum(shares):
        raise UserError(f"{source} changes {original} by {len(up)} outputs, not {shares} parts")
    found, width = {}, len(up) // sum(shares)
    for name, part, _ in parts:
        start = width * sum(shares[:part])
        own = up[start : start + width * shares[part]]
        used = own.abs().sum(0) > 0
        if bool(used.any()):
            found[name] = (down[used], own[:, used])
    return found


def kohya_names(names: Iterable[str], family: str) -> dict[str, str]:
    """Return the original's name for each of kohya's, which have underscores for dots."""
    found = {}
    for name in names:
        match = re.fullmatch(r"(joint_blocks|double_blocks|single_blocks)_(\d+)_(.+)", name)
        if match is not None:
            layers = [its for blocks, its in BLOCKS[family].values() if blocks == match[1]]
            for layer in {layer for its in layers for layer, _, _ in its.values()}:
                if layer.replace(".", "_") == match[3]:
                    found[name] = f"{match[1]}.{match[2]}.{layer}"
        for original in OUTSIDE[family].values():
            if original.replace(".", "_") == name:
                found[name] = original
    return found
