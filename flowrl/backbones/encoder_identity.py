"""Which text encoders a pipeline has, as far as its files or its weights tell: for caches."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.offload import ENCODER, encoders_of

INDEX = "model_index.json"
READERS = (ENCODER, "tokenizer")  # how the names of what turns text into numbers begin
SAMPLED = 64  # values of each weight


def index_file(path: str, revision: str | None) -> Path | None:
    """The index of a pipeline in a folder, or on the Hub as far as this machine has it already."""
    if Path(path).is_dir():
        file = Path(path) / INDEX
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, INDEX, revision=revision)
    except HFValidationError:  # no name of the Hub either
        return None
    return Path(found) if isinstance(found, str) else None


def encoder_names(index: Path) -> list[str]:
    """The text encoders' places in the pipeline."""
    return [name for name in json.loads(index.read_text()) if name.startswith(ENCODER)]


def by_files(index: Path) -> dict[str, Any]:
    """The commit of a pipeline from the Hub; of a folder the lengths and times of its files."""
    folder = index.parent
    if folder.parent.name == "snapshots":  # as the Hub's cache is laid out
        return {"commit": folder.name}
    parts = sorted(p for name in READERS for p in folder.glob(f"{name}*/**/*") if p.is_file())
    stats = [(p.relative_to(folder).as_posix(), p.stat()) for p in parts]
    return {"files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}


@torch.no_grad()
def by_weights(pipeline: Any) -> dict[str, Any]:
    """A digest of some values of every weight of the text encoders, with names and shapes."""
    digest = blake2b(digest_size=16)
    for part in encoders_of(pipeline):
        digest.update(type(part).__name__.encode())
        for name, weight in part.named_parameters():
            flat = weight.detach().flatten()
            some = flat[:: max(1, flat.numel() // SAMPLED)].to("cpu", torch.float32)
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(some.numpy().tobytes())
    return {"weights": digest.hexdigest()}
