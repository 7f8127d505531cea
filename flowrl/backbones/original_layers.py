"""Names of layers in the original checkpoints, which ComfyUI loads LoRAs for, and in diffusers.

The original checkpoints stack some layers that diffusers has one by one. The maps between them, in
assets/comfyui_keys.json, are those of the converters in diffusers.loaders.single_file_utils;
Qwen-Image has the same names in both.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from flowrl.errors import UserError

Factors = tuple[Tensor, Tensor]  # down (r, in), up (out, r)


# --- the maps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedLayers:
    """Layers of diffusers whose outputs the original stacks into one layer."""

    original: str
    layers: tuple[str, ...]  # in the order of the outputs
    widths: tuple[int, ...]  # relative numbers of outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """The layers of an original transformer; `*` stands for the number of a block."""

    by_original: Mapping[str, StackedLayers]  # with underscores for dots
    by_layer: Mapping[str, StackedLayers]

    @staticmethod
    def parse(names: Mapping[str, str]) -> "KeyMap":
        """Read a map.

        names: the original's layer -> layers of diffusers, separated by spaces, with `:WIDTH` after
            one that is WIDTH times as wide as the others.
        """
        stacks = []
        for original, text in names.items():
            pairs = [word.partition(":") for word in text.split()]
            layers = tuple(layer for layer, _, _ in pairs)
            widths = tuple(int(width or 1) for _, _, width in pairs)
            stacks.append(StackedLayers(original=original, layers=layers, widths=widths))
        return KeyMap(
            by_original={stack.original.replace(".", "_"): stack for stack in stacks},
            by_layer={layer: stack for stack in stacks for layer in stack.layers},
        )

    def of_layer(self, layer: str) -> StackedLayers | None:
        """Return the stacked original layer that holds a diffusers layer; None if unknown."""
        block = re.search(r"(?<=\.)\d+(?=\.)", layer)
        return _numbered(self.by_layer, layer, block)

    def of_original(self, original: str) -> StackedLayers | None:
        """Return the stack of an original layer; None for an unknown one.

        original: its name, also with underscores for dots, as kohya writes it.
        """
        flat = original.replace(".", "_")
        return _numbered(self.by_original, flat, re.search(r"(?<=_)\d+(?=_)", flat))


def _numbered(
    stacks: Mapping[str, StackedLayers], name: str, block: re.Match | None
) -> StackedLayers | None:
    """Look up a name with `*` for the number of its block; return the stack with that number."""
    if block is None:
        return stacks.get(name)
    stack = stacks.get(f"{name[: block.start()]}*{name[block.end() :]}")
    return stack and StackedLayers(
        original=stack.original.replace("*", block[0]),
        layers=tuple(layer.replace("*", block[0]) for layer in stack.layers),
        widths=stack.widths,
    )


@functools.cache
def _key_maps() -> dict[str, KeyMap]:
    """Return the maps by the class of the network."""
    text = resources.files("flowrl").joinpath("assets/comfyui_keys.json").read_text("utf-8")
    return {network: KeyMap.parse(names) for network, names in json.loads(text).items()}


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
    """Return scale * up @ down: (out, in) fp32, or float64 where a factor is."""
    kind = torch.promote_types(torch.promote_types(down.dtype, up.dtype), torch.float32)
    return scale * (up.to(kind) @ down.to(kind))


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


# Layers of diffusers where scale and shift have changed places.
SWAPPED = {
    "SD3Transformer2DModel": ("norm_out.linear", "norm1_context.linear"),
    "FluxTransformer2DModel": ("norm_out.linear",),
    "Flux2Transformer2DModel": ("norm_out.linear",),
}


def _swapped(network: str, layer: str, factors: Factors) -> Factors:
    """Swap scale and shift where the original has them in the other order.

    SD3's blocks have other parts between them, except the last block, which normalises its text by
    shift and scale alone.
    """
    down, up = factors
    if not layer.endswith(SWAPPED.get(network, ())):
        return factors
    return factors if "norm1" in layer and len(up) != 2 * down.shape[1] else swap_halves(factors)


# --- from diffusers' names to the original's, and back --------------------------------------------

PREFIX = "diffusion_model."


def key_map_of(network: str) -> KeyMap:
    """Return the map of a network class. Raises UserError where ComfyUI's names are unknown."""
    if network not in _key_maps():
        raise UserError(
            f"flowrl knows ComfyUI's names for {', '.join(_key_maps())}, and not for {network}: "
            "export with --to diffusers or merged"
        )
    return _key_maps()[network]


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
    key_map = key_map_of(network)
    common = min(scales.values()) if len(set(scales.values())) == 1 else None
    stacks: dict[str, tuple[StackedLayers, dict[str, Factors]]] = {}
    for name, (down, up) in layers_of(state).items():
        stack = key_map.of_layer(name)
        if stack is None:
            raise UserError(
                f"the LoRA adapts {name}, which has no place in ComfyUI's {network}: export with "
                "--to diffusers or merged"
            )
        factors = (down, up * scales[name]) if common is None else (down, up)
        stacks.setdefault(stack.original, (stack, {}))[1][name] = _swapped(network, name, factors)
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


def from_original(original: str, factors: Factors, network: str) -> dict[str, Factors] | None:
    """Return the LoRAs of diffusers' layers for that of an original layer: `comfyui_state` undone.

    The change is the same, number by number. Rows of `down` that a part does not use are left out,
    so that a file that flowrl wrote comes back as it was. None for a layer that the map of the
    network's class lacks, or whose outputs cannot be divided.
    """
    stack = _key_maps()[network].of_original(original) if network in _key_maps() else None
    down, up = factors
    if stack is None or len(up) % sum(stack.widths):
        return None
    if len(stack.layers) == 1:
        return {stack.layers[0]: _swapped(network, stack.layers[0], factors)}
    unit, layers = len(up) // sum(stack.widths), {}
    rows = up.split([unit * width for width in stack.widths])
    for name, part in zip(stack.layers, rows, strict=True):
        used = part.abs().sum(0) > 0
        if bool(used.any()):
            layers[name] = (down[used], part[:, used])
    return layers
