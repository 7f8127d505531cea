"""The three families of tiny pipelines, and how a finished one is stored."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track as progress

from flowrl.utils.files import write_text
from scripts.pretrain_tiny import flux, sana, sd3

MODELS: dict[str, tuple[Any, Any]] = {  # how to make the autoencoder, and the `TinyModel`
    "sd3": (sd3.autoencoder, sd3.TinySD3),
    "flux": (sd3.autoencoder, flux.TinyFlux),
    "sana": (sana.autoencoder, sana.TinySana),
}


def track(steps: Iterable[int], name: str) -> Iterable[int]:
    """Show a progress bar over a stage's steps."""
    return progress(steps, description=name)


def save_half(pipeline: Any, folder: Path) -> None:
    """Store a pipeline in fp16 such that a plain `from_pretrained` computes in fp32 throughout.

    diffusers' own models load in fp32 whatever the file holds; those of transformers follow the
    dtype in their configuration, and half of a pipeline in fp16 cannot run.
    """
    pipeline.to(torch.float16).save_pretrained(folder)
    for path in folder.glob("text_encoder*/config.json"):
        config = json.loads(path.read_text())
        config["dtype"] = "float32"
        write_text(path, json.dumps(config, indent=2, sort_keys=True) + "\n")
