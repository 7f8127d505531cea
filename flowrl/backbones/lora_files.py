"""Fit LoRAs to a pipeline's network; save, load and merge them."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.backbones.lora_formats import (
    FILE,
    PREFIX,
    LoRA,
    few,
    lora_bytes,
    open_lora,
    plain_name,
)
from flowrl.backbones.original_layers import (
    Factors,
    from_original,
    layers_of,
    state_of,
    weight_change,
)
from flowrl.backbones.quantized_base import check_mergeable
from flowrl.errors import UserError
from flowrl.utils.files import write_bytes


def file_prefix(pipeline: type) -> str:
    """Return the prefix of keys in a file that diffusers loads into a pipeline class.

    It is "" where the class has no LoRA loader for a transformer: then the network loads the file.
    """
    saver = getattr(pipeline, "save_lora_weights", None)
    named = saver is not None and "transformer_lora_layers" in inspect.signature(saver).parameters
    return PREFIX if named else ""


# --- save -----------------------------------------------------------------------------------------


def save_lora(pipeline: Any, folder: Path, *, adapter: str) -> Path:
    """Save an adapter for diffusers' `load_lora_weights` or `load_lora_adapter`; return the path.

    Written atomically. Raises UserError, and writes nothing, for weights that are NaN or infinite.
    """
    from peft import get_peft_model_state_dict

    network: Any = pipeline.transformer
    state = get_peft_model_state_dict(network, adapter_name=adapter)
    if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
        raise UserError(f"the LoRA has NaN or infinite numbers: {folder / FILE} was not written")
    config = network.peft_config[adapter]
    scale: float = config.lora_alpha / config.r
    lora = LoRA(
        name=adapter, path=folder / FILE, make="diffusers", state=state,
        scales=dict.fromkeys(layers_of(state), scale),
        prefix=file_prefix(type(pipeline)),
    )  # fmt: skip
    write_bytes(lora.path, lora_bytes(lora))
    return lora.path


# --- fit to a network -----------------------------------------------------------------------------


def fit_lora(lora: LoRA, network: nn.Module, pipeline: type) -> LoRA:
    """Return the LoRA with the names of a network's layers.

    Names are compared without wrappers' prefixes and with underscores for dots, then looked up in
    the map of the original checkpoint.

    Raises:
        UserError: a layer of the LoRA is missing in the network, or has another shape.
    """
    modules = {n: m for n, m in network.named_modules() if getattr(m, "weight", None) is not None}
    kind = type(network).__name__
    names = {plain_name(name).replace(".", "_"): name for name in modules}
    layers: dict[str, Factors] = {}
    scales: dict[str, float] = {}
    unknown = []
    for name, factors in lora.layers.items():
        if (layer := names.get(name.replace(".", "_"))) is not None:
            parts: Mapping[str, Factors] | None = {layer: factors}
        else:
            parts = from_original(name, factors, kind)
        if parts is None or not parts.keys() <= modules.keys():
            unknown.append(name)
        elif twice := parts.keys() & layers.keys():
            raise UserError(f"{lora.path} holds two LoRAs: {min(twice)} is adapted twice")
        else:
            layers |= parts
            scales |= dict.fromkeys(parts, lora.scales[name])
    if unknown:
        raise UserError(
            f"{lora.path} adapts {len(lora.scales)} layers, of which {kind} lacks "
            f"{len(unknown)}, {few(unknown)}: it was trained for another pipeline, or has names "
            "that diffusers alone knows, whose pipe.transformer.save_lora_adapter writes it anew"
        )
    if not layers:
        raise UserError(f"{lora.path} has zeros alone in its upper factors: it changes nothing")
    for name, (down, up) in layers.items():
        shape = _shape(modules[name])
        if shape != (len(up), down.shape[1]):
            raise UserError(
                f"{lora.path} changes {name} by {len(up)} x {down.shape[1]}, but it is "
                f"{shape[0]} x {shape[1]} in {kind}: it was trained for another pipeline"
            )
    prefix = file_prefix(pipeline)
    return replace(lora, state=state_of(layers), scales=scales, prefix=prefix)


def _shape(module: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of a layer, also where its weight is packed into 4 bits."""
    weight = module.weight
    rows, columns = weight.shape[:2] if weight.ndim > 1 else (0, 0)
    return getattr(module, "out_features", rows), getattr(module, "in_features", columns)


# --- load and merge -------------------------------------------------------------------------------


def load_lora(pipeline: Any, source: str | Path | LoRA) -> int:
    """Load a LoRA of any program into the pipeline; return the number of adapted layers.

    Raises UserError when a layer of the file is not the network's, which diffusers ignores; then
    the pipeline is as it was.
    """
    lora = source if isinstance(source, LoRA) else open_lora(source)
    network: Any = pipeline.transformer
    if count_layers(network):
        raise UserError(
            f"{lora.path} cannot be loaded: the pipeline has another LoRA already, which "
            "unload_lora() removes"
        )
    lora = fit_lora(lora, network, type(pipeline))
    if hasattr(network, "load_lora_adapter"):
        # Not the pipeline's method, which warns of text encoders that the file does not adapt.
        network.load_lora_adapter(
            dict(lora.state), prefix=None, metadata=lora.header(), _pipeline=pipeline
        )
    else:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

        config = LoraConfig(**lora.header())
        inject_adapter_in_model(config, network, state_dict=lora.state)
        set_peft_model_state_dict(network, lora.state)
    return count_layers(network)


def unload_lora(pipeline: Any) -> None:
    """Remove the LoRA from the pipeline's network; its own weights are as they were."""
    from diffusers.utils.peft_utils import recurse_remove_peft_layers

    network: Any = pipeline.transformer
    if hasattr(network, "unload_lora"):
        network.unload_lora()
    else:
        recurse_remove_peft_layers(network)
        network.__dict__.pop("peft_config", None)


def count_layers(network: nn.Module) -> int:
    """Return the number of layers with a LoRA."""
    from peft.tuners.lora import LoraLayer

    return sum(isinstance(module, LoraLayer) for module in network.modules())


@torch.no_grad()
def merge_lora(pipeline: Any, source: str | Path | LoRA) -> int:
    """Add a LoRA to the weights of the pipeline's network; return the number of layers.

    From the file's own numbers, which diffusers would round to the network's dtype: each sum is
    taken in fp32 and rounded once. Raises UserError for a quantised network, and when a layer of
    the file is missing or of another shape; then nothing is changed.
    """
    lora = source if isinstance(source, LoRA) else open_lora(source)
    network = pipeline.transformer
    lora = fit_lora(lora, network, type(pipeline))
    weights = {name: network.get_submodule(name).weight for name in lora.scales}
    for weight in weights.values():
        check_mergeable(weight)
    for name, (down, up) in lora.layers.items():
        weight: Any = weights[name]
        change = weight_change(down, up, lora.scales[name]).to(weight.device)
        weight.data = (weight.data.float() + change).to(weight.dtype)
    return len(weights)
