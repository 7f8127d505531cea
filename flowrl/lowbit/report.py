"""What a run computes in, for people and for the run's folder."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flowrl.lowbit.precision import Resolved
from flowrl.lowbit.rules import LayerChoice, layer_table, quantised_share
from flowrl.storage import write_text

FILE = "precision.json"
LOG = logging.getLogger(__name__)


def write_precision(
    folder: Path,
    resolved: Resolved,
    choices: Sequence[LayerChoice],
    *,
    what: str = "candidates are drawn",
    file: str = FILE,
) -> None:
    """Tell what `what` in, and write it with all layers to a file of the folder.

    choices: none where nothing is quantised.
    """
    share = quantised_share(choices) if choices else 0.0
    LOG.info("%s", told(resolved, choices, what))
    content = asdict(resolved) | {"quantised_share": share, "layers": layer_table(choices)}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / file, json.dumps(content, indent=2) + "\n")


def told(
    resolved: Resolved, choices: Sequence[LayerChoice], what: str = "candidates are drawn"
) -> str:
    """One sentence on the precision and its back end."""
    text = f"{what} in {resolved.format} by {resolved.backend}: {resolved.reason}"
    if not choices:
        return text
    layers = sum(c.format is not None for c in choices)
    return (
        f"{text}; {layers} of {len(choices)} layers are quantised, "
        f"{quantised_share(choices):.0%} of their weights"
    )
