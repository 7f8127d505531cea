"""Names of layers in the original checkpoints, which ComfyUI loads LoRAs for, and in diffusers.

The original checkpoints stack some layers that diffusers has one by one. The maps between them, in
assets/comfyui_keys.json, are those of the converters in diffusers.loaders.single_file_utils.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources

import torch
from torch import Tensor

from flowrl.errors import UserError

Factors = tuple[Tensor, Tensor]  # down (r, in), up (out, r)


# --- the maps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedLayers:
    """Layers of diffusers whose outputs the original stacks into one layer.

    `*` stands for the number of a block.
    """

    original: str
    layers: tuple[str, ...]  # in the order of the outputs
    widths: tuple[int, ...]  # relative numbers of outputs
    swapped: bool = False  # scale and shift, the halves of the outputs, in the other order


Stacks = Mapping[str, StackedLayers]
NUMBER = re.compile(r"(?<=[._])\d+(?=[._])")  # of a block


@functools.cache
def key_map_of(network: str) -> tuple[Stacks, Stacks]:
    """Return a network's stacks by layer, and by original name with underscores for dots.

    The file has for each class: original -> layers, separated by spaces, with `:WIDTH` after one
    that is WIDTH times as wide as the others, or `:swapped`.

    Raises:
        UserError: the class is not in the file.
    """
    maps = json.loads(resources.files("flowrl").joinpath("assets/comfyui_keys.json").read_text())
    if network not in maps:
        raise UserError(
            f"flowrl knows ComfyUI's names for {', '.join(maps)}, and not for {network}: "
            "export with --to diffusers or merged"
        )
    by_layer, by_original = {}, {}
    for original, text in maps[network].items():
        pairs = [word.partition(":") for word in text.split()]
        stack = StackedLayers(
            original=original,
            layers=tuple(layer for layer, _, _ in pairs),
            widths=tuple(int(mark) if mark.isdigit() else 1 for _, _, mark in pairs),
            swapped=pairs[0][2] == "swapped",
        )
        by_layer |= dict.fromkeys(stack.layers, stack)
        by_original[original.replace(".", "_")] = stack
    return by_layer, by_original


def _stack_of(name: str, stacks: Stacks) -> StackedLayers | None:
    """Return the stack of a layer with the number of its block; None for an unknown one."""
    block = NUMBER.search(name)
    if block is None:
        return stacks.get(name)
    stack = stacks.get(NUMBER.sub("*", name, count=1))
    return stack and replace(
        stack,
        original=stack.original.replace("*", block[0]),
        layers=tuple(layer.replace("*", block[0]) for layer in stack.layers),
    )


# --- low-rank factors -----------------------------------------------------------------------------


def layers_of(state: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return LoRA factors by layer. Raises UserError for anything that is not a pair of them."""
    names = {name.partition(".lora_")[0] for name in state}
    wanted = {f"{name}.lora_{side}.weight" for name in names for side in "AB"}
    if odd := sorted(set(state) ^ wanted):
        raise UserError(
            f"the LoRA has {len(odd)} tensors that are not pairs of lora_A and lora_B, the first "
            f"is {odd[0]}: such a file cannot be exported"
        )
    return {n: (state[f"{n}.lora_A.weight"], state[f"{n}.lora_B.weight"]) for n in sorted(names)}


def state_of(layers: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Return tensors by PEFT's names: the inverse of `layers_of`."""
    return {
        f"{name}.lora_{side}.weight": tensor.contiguous()
        for name, pair in layers.items()
        for side, tensor in zip("AB", pair, strict=True)
    }


def weight_change(down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return scale * up @ down: (out, in) fp32."""
    return scale * (up.float() @ down.float())


def stack_outputs(parts: Sequence[Factors | None], rows: Sequence[int]) -> Factors:
    """Return the LoRA of layers whose outputs are concatenated: ranks add up, nothing is rounded.

    Args:
        parts: the layers in order, None for one without LoRA; not all are.
        rows: outputs of each.

    Returns:
        down (sum r_i, in), all `down` below each other; up (sum rows, sum r_i), block diagonal.
    """
    present = [part for part in parts if part is not None]
    none = present[0][1].new_zeros
    ups = [none(n, 0) if part is None else part[1] for part, n in zip(parts, rows, strict=True)]
    return torch.cat([down for down, _ in present]), torch.block_diag(*ups)


def _in_order(stack: StackedLayers, factors: Factors) -> Factors:
    """Swap scale and shift where the original has the other order; the inverse of itself.

    A norm of six parts has others between them; in the last block a text's has these two alone.
    """
    down, up = factors
    if not stack.swapped or ("norm1" in stack.layers[0] and len(up) != 2 * down.shape[1]):
        return factors
    first, second = up.chunk(2)
    return down, torch.cat([second, first])


# --- from diffusers' names to the original's, and back --------------------------------------------

PREFIX, KOHYA = "diffusion_model.", "lora_unet_"  # of keys


def comfyui_state(
    state: Mapping[str, Tensor], scales: Mapping[str, float], network: str
) -> dict[str, Tensor]:
    """Return the tensors of ComfyUI's file for a LoRA with diffusers' layers and PEFT's names.

    The change of each original layer is exactly that of its parts stacked, zero for a part without
    LoRA.

    Args:
        scales: alpha / rank by layer; where they differ they go into the factors.
        network: name of the network's class.

    Raises:
        UserError: the class or a layer is unknown.
    """
    by_layer, _ = key_map_of(network)
    common = min(scales.values()) if len(set(scales.values())) == 1 else None
    stacks: dict[str, tuple[StackedLayers, dict[str, Factors]]] = {}
    for name, (down, up) in layers_of(state).items():
        stack = _stack_of(name, by_layer)
        if stack is None:
            raise UserError(
                f"the LoRA adapts {name}, which has no place in ComfyUI's {network}: export with "
                "--to diffusers or merged"
            )
        factors = (down, up * scales[name]) if common is None else (down, up)
        stacks.setdefault(stack.original, (stack, {}))[1][name] = _in_order(stack, factors)
    tensors: dict[str, Tensor] = {}
    for original, (stack, parts) in stacks.items():
        name, (down, up) = next(iter(parts.items()))
        if len(stack.layers) > 1:
            unit = len(up) // stack.widths[stack.layers.index(name)]
            rows = [unit * width for width in stack.widths]
            down, up = stack_outputs([parts.get(part) for part in stack.layers], rows)
        tensors[f"{PREFIX}{original}.lora_A.weight"] = down.contiguous()
        tensors[f"{PREFIX}{original}.lora_B.weight"] = up.contiguous()
        tensors[f"{PREFIX}{original}.alpha"] = torch.tensor((common or 1.0) * len(down))
    return tensors


def kohya_state(comfyui: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a ComfyUI file with kohya's keys: `lora_unet_` and underscores."""
    ends = {"lora_A.weight": "lora_down.weight", "lora_B.weight": "lora_up.weight"}
    tensors = {}
    for key, tensor in comfyui.items():
        layer, dot, end = key.removeprefix(PREFIX).partition(".lora_")
        layer, end = (layer, f"lora_{end}") if dot else (layer.removesuffix(".alpha"), "alpha")
        tensors[f"{KOHYA}{layer.replace('.', '_')}.{ends.get(end, end)}"] = tensor
    return tensors


def from_original(original: str, factors: Factors, network: str) -> dict[str, Factors] | None:
    """Return the LoRAs of diffusers' layers for that of an original layer: `comfyui_state` undone.

    The change is the same, number by number. Rows of `down` that a part does not use are left out,
    so that a file that flowrl wrote comes back as it was. None for a layer that the map of the
    network's class lacks, or whose outputs cannot be divided.
    """
    down, up = factors
    try:
        _, by_original = key_map_of(network)
    except UserError:
        return None
    stack = _stack_of(original.replace(".", "_"), by_original)
    if stack is None or len(up) % sum(stack.widths):
        return None
    if len(stack.layers) == 1:
        return {stack.layers[0]: _in_order(stack, factors)}
    unit, layers = len(up) // sum(stack.widths), {}
    rows = up.split([unit * width for width in stack.widths])
    for name, part in zip(stack.layers, rows, strict=True):
        used = part.abs().sum(0) > 0
        if bool(used.any()):
            layers[name] = (down[used], part[:, used])
    return layers
