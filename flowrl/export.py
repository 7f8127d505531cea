"""The LoRA file: written as diffusers writes it, read back with a count of what attached."""

import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.storage import write_bytes

FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
METADATA = "lora_adapter_metadata"  # diffusers' name for the header that holds r and alpha


def save_lora(pipeline: Any, folder: Path, *, adapter: str) -> Path:
    """Write one adapter of the pipeline's transformer so that `load_lora_weights(folder)` reads it.

    The file carries the adapter's configuration: without it diffusers would take alpha = rank,
    and the LoRA would act with the wrong strength. Written atomically. -> its path.
    """
    from peft import get_peft_model_state_dict

    network = pipeline.transformer
    config = network.peft_config[adapter].to_dict()
    with tempfile.TemporaryDirectory() as scratch:
        type(pipeline).save_lora_weights(
            scratch,
            transformer_lora_layers=get_peft_model_state_dict(network, adapter_name=adapter),
            transformer_lora_adapter_metadata={k: _plain(v) for k, v in config.items()},
        )
        data = (Path(scratch) / FILE).read_bytes()
    write_bytes(folder / FILE, data)
    return folder / FILE


def _plain(value: Any) -> Any:
    """Values as JSON has them: sets sorted, enumerations by their text."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return (
        value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else str(value)
    )


def lora_file(source: str | Path) -> Path:
    """A LoRA file, or the one in a run's folder. Raises UserError when there is none."""
    path = Path(source)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"no LoRA at {source}: give a .safetensors file or a folder with {FILE}")
    return path


def read_lora(source: str | Path) -> tuple[dict[str, Tensor], float]:
    """A transformer LoRA: tensors by PEFT name, and its strength alpha / rank.

    Raises UserError for a file that is not a diffusers LoRA of a transformer.
    """
    path = lora_file(source)
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            names = [k for k in file.keys() if k.startswith(PREFIX)]
            state = {k.removeprefix(PREFIX): file.get_tensor(k) for k in names}
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}") from error
    if not any(".lora_A." in name for name in state):
        raise UserError(
            f"{path} holds no LoRA of a transformer in diffusers' names ({PREFIX}...lora_A)"
        )
    rank = next(t.shape[0] for name, t in state.items() if ".lora_A." in name)
    return state, header.get(f"{PREFIX}lora_alpha", rank) / header.get(f"{PREFIX}r", rank)


def load_lora(pipeline: Any, source: str | Path) -> int:
    """`load_lora_weights` that does not stay silent when nothing attaches -> attached layers.

    Raises UserError when a tensor of the file found no layer.
    """
    path = lora_file(source)
    wanted = sum(".lora_A." in name for name in read_lora(path)[0])
    try:
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name)
    except (ValueError, RuntimeError) as error:  # no layer of these names; other shapes
        raise UserError(
            f"{path} does not fit this pipeline: {str(error).splitlines()[0]}"
        ) from error
    attached = count_layers(pipeline.transformer)
    if attached != wanted:
        raise UserError(
            f"{path} adapts {wanted} layers, but {attached} of this pipeline took it: "
            "it was trained for another pipeline"
        )
    return attached


def count_layers(network: nn.Module) -> int:
    """How many layers of the network carry a LoRA."""
    from peft.tuners.lora import LoraLayer

    return sum(isinstance(module, LoraLayer) for module in network.modules())
