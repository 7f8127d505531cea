"""What a run computes in, for people and for the run's folder."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from flowrl.quantization.layer_rules import LayerChoice, layer_table, quantised_share
from flowrl.quantization.precision import Resolved, named, shown
from flowrl.utils.files import write_text

FILE = "precision.json"
LOG = logging.getLogger(__name__)


def write_precision(
    folder: Path,
    resolved: Resolved,
    choices: Sequence[LayerChoice],
    *,
    dtype: torch.dtype,
    what: str = "candidates",
    since: int = 0,
    lora: str = "merge",
    four_over_six: bool = False,
    file: str = FILE,
) -> None:
    """Tell what `what` are drawn in, and write it with all layers to a file of the folder.

    choices: none where nothing is quantised. dtype: the network's own. since: the iteration, from
    0, before which it began.
    """
    LOG.info("%s", told(resolved, choices, dtype=dtype, what=what))
    content = {
        "what": what,
        "since_iteration": since,
        "precision": shown(resolved, dtype_name(dtype)),
        "dtype": dtype_name(dtype),
        **asdict(resolved),
        "format": None if resolved.format == "bf16" else resolved.format,
        "lora": lora,
        "four_over_six": four_over_six,
        "quantised_share": quantised_share(choices) if choices else 0.0,
        "layers": layer_table(choices),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / file, json.dumps(content, indent=2) + "\n")


def read_precision(folder: Path, file: str = FILE) -> str | None:
    """The precision as people write it; None where the folder's file does not say."""
    path = folder / file
    return json.loads(path.read_text(encoding="utf-8")).get("precision") if path.exists() else None


def told(
    resolved: Resolved,
    choices: Sequence[LayerChoice],
    *,
    dtype: torch.dtype,
    what: str = "candidates",
) -> str:
    """One sentence on the precision and its back end."""
    if resolved.format == "bf16":
        text = f"{what} are {shown(resolved, dtype_name(dtype))}"
        return text if resolved.requested == "bf16" else f"{text}: {resolved.reason}"
    text = f"{what} are computed in {named(resolved)} by {resolved.backend}: {resolved.reason}"
    if not choices:
        return text
    layers = sum(c.format is not None for c in choices)
    return (
        f"{text}; {layers} of {len(choices)} layers are quantised, "
        f"{quantised_share(choices):.0%} of their weights"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """As in float32."""
    return str(dtype).removeprefix("torch.")
