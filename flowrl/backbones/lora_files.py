"""LoRA files in diffusers' format: `save_lora`, `load_lora` and `read_lora`, `merge_lora`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor, nn

from flowrl.errors import DamagedFile, UserError
from flowrl.utils.digests import check_seal, notes_of, seal
from flowrl.utils.files import write_bytes

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


FILE = "pytorch_lora_weights.safetensors"
PREFIX = "transformer."
REMEDY = "export the run that it came from, or download it again"
METADATA = "lora_adapter_metadata"  # diffusers' name for the header that holds r and alpha


def save_lora(pipeline: Any, folder: Path, *, adapter: str) -> Path:
    """Save an adapter of the transformer for diffusers' `load_lora_weights`; return the path.

    The file holds the adapter's configuration, without which diffusers would take alpha = rank, and
    a digest of tensors and header. Written atomically. Raises UserError, and writes nothing, for
    weights that are not finite.
    """
    from peft import get_peft_model_state_dict

    network = pipeline.transformer
    layers = get_peft_model_state_dict(network, adapter_name=adapter)
    if not _are_finite(layers):
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


def _are_finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: sets sorted, enumerations by their text."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    kept = (bool, int, float, str, list, dict, type(None))
    return value if isinstance(value, kept) else str(value)


def lora_file(source: str | Path) -> Path:
    """Return the path of a LoRA file, given it or a run's folder. Raises UserError for neither."""
    path = Path(source)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"no LoRA at {source}: give a .safetensors file or a folder with {FILE}")
    return path


def read_lora(source: str | Path) -> tuple[dict[str, Tensor], float]:
    """Return the tensors of a transformer's LoRA by PEFT name, and its strength alpha / rank.

    Raises UserError for a file that is not a diffusers LoRA of a transformer, and DamagedFile for
    one that is not what flowrl wrote, or has numbers that are not finite.
    """
    path = lora_file(source)
    data = path.read_bytes()
    check_seal(data, path)
    try:
        tensors = load(data)
        header = _header(notes_of(data), path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}") from error
    state = {k.removeprefix(PREFIX): t for k, t in tensors.items() if k.startswith(PREFIX)}
    if not any(".lora_A." in name for name in state):
        raise UserError(
            f"{path} holds no LoRA of a transformer in diffusers' names ({PREFIX}...lora_A)"
        )
    empty = [name for name, tensor in state.items() if not tensor.numel()]
    if empty:
        raise UserError(f"{path} has a tensor of rank 0, {empty[0]}: such a LoRA changes nothing")
    if not _are_finite(state):
        raise DamagedFile(f"{path} holds numbers that are not finite: take an earlier checkpoint's")
    rank = next(t.shape[0] for name, t in state.items() if ".lora_A." in name)
    return state, header.get(f"{PREFIX}lora_alpha", rank) / header.get(f"{PREFIX}r", rank)


def _header(metadata: Mapping[str, str] | None, path: Path) -> dict[str, Any]:
    """Return the adapter's configuration, {} where the file has none.

    Raises UserError, naming the entry, for one that diffusers could not read or would read as
    another strength.
    """
    try:
        header = json.loads((metadata or {}).get(METADATA, "{}"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} has a header {METADATA} that is not JSON: {REMEDY}") from error
    if not isinstance(header, dict):
        raise UserError(f"{path} has a header {METADATA} that is no JSON object: {REMEDY}")
    for name in ("r", "lora_alpha"):
        value = header.get(f"{PREFIX}{name}", 1)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole = name != "r" or isinstance(value, int)
        if not number or not whole or not 0 < abs(value) < math.inf or (name == "r" and value < 1):
            wanted = "a whole number from 1" if name == "r" else "a finite number other than 0"
            raise UserError(
                f"{path} has {name} = {value!r:.40} in its header {METADATA}, expected {wanted}: "
                f"{REMEDY}"
            )
    return header


def load_lora(pipeline: Any, source: str | Path) -> int:
    """Load a LoRA into the pipeline; return the number of adapted layers.

    Raises UserError when a tensor of the file fits no layer, where diffusers stays silent.
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
    """Return the number of layers with a LoRA."""
    from peft.tuners.lora import LoraLayer

    return sum(isinstance(module, LoraLayer) for module in network.modules())


def check_header(source: str | Path) -> None:
    """Raise UserError unless the file's header has one rank and alpha for all layers."""
    path = lora_file(source)
    read_lora(path)
    with safe_open(path, "pt") as file:
        header = _header(file.metadata(), path)
    if not {f"{PREFIX}lora_alpha", f"{PREFIX}r"} <= set(header):
        raise UserError(
            f"{path} does not say its alpha ({METADATA} is missing), so that it would act with "
            "the strength 1: export the run that it came from"
        )
    if header.get(f"{PREFIX}alpha_pattern") or header.get(f"{PREFIX}rank_pattern"):
        raise UserError(
            f"{path} has ranks or alphas of its own for some layers, expected one for all: such a "
            "file loads with diffusers, but cannot be exported"
        )


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


@torch.no_grad()
def merge_lora(pipeline: Any, source: str | Path) -> int:
    """Add a LoRA to the weights of the pipeline's transformer; return the number of layers.

    From the file's own numbers, which diffusers would round to the network's dtype: each sum is
    taken in fp32 and rounded once. Raises UserError for a quantised network, and when a layer of
    the file is not there or of another shape; then nothing is changed.
    """
    state, strength = read_lora(source)
    layers, network = layers_of(state), pipeline.transformer
    weights = {name: _weight(network, name, *factors) for name, factors in layers.items()}
    for name, weight in weights.items():
        change = weight_change(*layers[name], strength).to(weight.device)
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
