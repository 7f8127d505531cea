"""Save, load and merge LoRAs: `save_lora`, `load_lora` and `read_lora`, `merge_lora`."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from flowrl.backbones.lora_formats import (
    FILE,
    METADATA,
    PREFIX,
    LoRA,
    are_finite,
    check_fits,
    normalised,
    open_lora,
)
from flowrl.backbones.original_layers import layers_of, weight_change
from flowrl.errors import UserError
from flowrl.utils.digests import seal
from flowrl.utils.files import write_bytes


def save_lora(pipeline: Any, folder: Path, *, adapter: str) -> Path:
    """Save an adapter of the transformer for diffusers' `load_lora_weights`; return the path.

    The file holds the adapter's configuration, without which diffusers would take alpha = rank, and
    a digest of tensors and header. Written atomically. Raises UserError, and writes nothing, for
    weights that are not finite.
    """
    from peft import get_peft_model_state_dict

    network = pipeline.transformer
    layers = get_peft_model_state_dict(network, adapter_name=adapter)
    if not are_finite(layers):
        raise UserError(
            f"the LoRA has numbers that are not finite: {folder / FILE} was not written"
        )
    config = {k: _plain(v) for k, v in network.peft_config[adapter].to_dict().items()}
    named = {f"{PREFIX}{key}": value for key, value in config.items()}
    header = {"format": "pt", METADATA: json.dumps(named, indent=2, sort_keys=True)}
    parts: list[bytes] = []
    # In memory, since a scratch folder may be full or missing; diffusers only names the tensors.
    type(pipeline).save_lora_weights(
        folder,
        transformer_lora_layers=layers,
        save_function=lambda tensors, _: parts.append(save(tensors, metadata=header)),
    )
    (data,) = parts
    write_bytes(folder / FILE, seal(data))
    return folder / FILE


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: sets sorted, enumerations by their text."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    kept = (bool, int, float, str, list, dict, type(None))
    return value if isinstance(value, kept) else str(value)


def read_lora(source: str | Path) -> tuple[dict[str, Tensor], float]:
    """Return the tensors of a transformer's LoRA by PEFT name, and its strength alpha / rank.

    Raises UserError for what `open_lora` refuses, and for layers of different strengths.
    """
    lora = open_lora(source)
    return lora.state, lora.strength


def load_lora(pipeline: Any, source: str | Path | LoRA) -> int:
    """Load a LoRA of any make into the pipeline; return the number of adapted layers.

    Raises UserError when a tensor of the file fits no layer, where diffusers stays silent; then
    the pipeline is as it was.
    """
    lora = source if isinstance(source, LoRA) else open_lora(source)
    check_fits(lora, pipeline.transformer)
    try:
        if lora.ready:
            pipeline.load_lora_weights(str(lora.path.parent), weight_name=lora.path.name)
        else:
            with tempfile.TemporaryDirectory() as scratch:
                (Path(scratch) / FILE).write_bytes(normalised(lora))
                pipeline.load_lora_weights(scratch, weight_name=FILE)
    except (ValueError, RuntimeError) as error:  # what diffusers itself finds wrong
        raise UserError(
            f"{lora.path} does not fit this pipeline: {str(error).splitlines()[0]}"
        ) from error
    wanted, attached = len(lora.strengths), count_layers(pipeline.transformer)
    if attached != wanted:
        missing = sorted(set(lora.strengths) - set(_adapted(pipeline.transformer)))
        if not missing:
            raise UserError(
                f"{lora.path} adapts {wanted} layers, but {attached} of this pipeline have a LoRA: "
                "it has another one already, which unload_lora_weights() removes"
            )
        raise UserError(
            f"{lora.path} adapts {wanted} layers, but {attached} of this pipeline took it, without "
            f"{', '.join(missing[:3])}: it was trained for another pipeline"
        )
    return attached


def _adapted(network: nn.Module) -> list[str]:
    from peft.tuners.lora import LoraLayer

    return [name for name, module in network.named_modules() if isinstance(module, LoraLayer)]


def count_layers(network: nn.Module) -> int:
    """Return the number of layers with a LoRA."""
    return len(_adapted(network))


@torch.no_grad()
def merge_lora(pipeline: Any, source: str | Path | LoRA) -> int:
    """Add a LoRA to the weights of the pipeline's transformer; return the number of layers.

    From the file's own numbers, which diffusers would round to the network's dtype: each sum is
    taken in fp32 and rounded once. Raises UserError for a quantised network, and when a layer of
    the file is not there or of another shape; then nothing is changed.
    """
    lora = source if isinstance(source, LoRA) else open_lora(source)
    layers, network = layers_of(lora.state), pipeline.transformer
    weights = {name: _weight(network, name, *factors) for name, factors in layers.items()}
    for name, weight in weights.items():
        change = weight_change(*layers[name], lora.strengths[name]).to(weight.device)
        weight.data = (weight.data.float() + change).to(weight.dtype)
    return len(weights)


def _weight(network: nn.Module, name: str, down: Tensor, up: Tensor) -> nn.Parameter:
    weight = getattr(dict(network.named_modules()).get(name), "weight", None)
    kind = type(network).__name__
    if weight is None:
        raise UserError(f"the LoRA adapts {name}, which {kind} has not: it is of another pipeline")
    packed = type(weight.data) is not Tensor or weight.dtype.itemsize < 2
    if packed or getattr(network, "hf_quantizer", None) is not None:
        raise UserError(
            f"{name} of {kind} is quantised, and a LoRA cannot be added to such weights: merge "
            "into the pipeline in 16 or 32 bits"
        )
    if weight.shape != (len(up), down.shape[1]):
        raise UserError(
            f"the LoRA changes {name} by {len(up)} x {down.shape[1]}, but it is "
            f"{' x '.join(map(str, weight.shape))} in {kind}: it is of another pipeline"
        )
    return weight
