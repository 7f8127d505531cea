"""Encoded prompts on disk: one safetensors file a prompt, shared by runs and processes."""

import json
import logging
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, uint8

from flowrl.trajectory import Conditioning
from flowrl.utils.files import write_bytes

LOG = logging.getLogger(__name__)
VERSION = 1  # of the files


class PromptCache:
    """Conditioning of single prompts below `folder`, under all that decides it.

    key: everything but the texts, of what JSON has: pipeline, encoders, dtype, tokens, guidance.
    Files are written whole or not at all, so that processes need no lock: two that write the
    same prompt write the same. Nothing is unpickled. Nothing is ever removed.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]):
        self.folder = Path(folder)
        self.key = {"version": VERSION, **key}

    def path(self, prompt: str, negative: str) -> Path:
        name = _digest(_json({**self.key, "prompt": prompt, "negative": negative}).encode())
        return self.folder / name[:2] / f"{name}.safetensors"

    def has(self, prompt: str, negative: str) -> bool:
        """Whether there is a file of the length that its header says; its content is not read."""
        path = self.path(prompt, negative)
        try:
            with path.open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, length)))
            ends = [part["data_offsets"][1] for k, part in header.items() if k != "__metadata__"]
            return length == 8 + size + max(ends)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def load(self, prompt: str, negative: str) -> Conditioning | None:
        """One row on the CPU, bit for bit as it was saved; None where there is none.

        A file that is damaged, which is told, counts as none.
        """
        path = self.path(prompt, negative)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            tensors = load(data)
            size = int.from_bytes(data[:8], "little")
            wanted = json.loads(data[8 : 8 + size])["__metadata__"]["digest"]
            intact = bool(tensors) and _content(tensors) == wanted
        except (SafetensorError, ValueError, KeyError):
            intact, tensors = False, {}
        if not intact:
            LOG.warning("the encoded prompt %s is damaged: it is made anew", path)
            return None
        return Conditioning(tensors=tensors)

    def save(self, prompt: str, negative: str, cond: Conditioning) -> None:
        """cond: one row."""
        tensors = {name: t.detach().cpu().contiguous() for name, t in cond.tensors.items()}
        notes = {"digest": _content(tensors), "prompt": prompt, "negative": negative}
        write_bytes(self.path(prompt, negative), save(tensors, metadata=notes))


def _content(tensors: Mapping[str, Tensor]) -> str:
    """Of names and bytes; shapes are in the header that the lengths are checked against."""
    parts = [name.encode() + _bytes(tensors[name]) for name in sorted(tensors)]
    return _digest(b"".join(parts))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(uint8).numpy().tobytes()


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True)
