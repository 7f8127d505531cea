"""Caches of prompts' conditioning: `TextCache` in memory, `PromptCache` on disk."""

import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.offload import ENCODER, are_freed, place_to_encode
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.errors import DamagedFile, UserError, phase
from flowrl.prompts.records import PromptRecord
from flowrl.trajectory import Conditioning
from flowrl.utils.files import load_state, save_state

LOG = logging.getLogger(__name__)
VERSION = 4  # of the files


class PromptCache:
    """Encoded prompts on disk: one safetensors file each, shared by runs and processes.

    Files are written whole or not at all, so that processes need no lock. None is ever removed:
    what a killed process left half-written might be another's that still writes; nobody reads it.

    Args:
        key: all that decides a conditioning but the texts, as JSON: pipeline, encoders, dtype,
            tokens, guidance.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]):
        self.folder = Path(folder)
        self.key = {"version": VERSION, **key}

    def path(self, prompt: str, negative: str) -> Path:
        whole = {**self.key, "prompt": prompt, "negative": negative}
        name = blake2b(json.dumps(whole, sort_keys=True).encode(), digest_size=16).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    def has(self, prompt: str, negative: str) -> bool:
        """Whether there is a file, which is written whole or not at all; it is not read."""
        return self.path(prompt, negative).is_file()

    def load(self, prompt: str, negative: str) -> Conditioning | None:
        """Return one row on the CPU as it was saved; None without a file or for a damaged one."""
        path = self.path(prompt, negative)
        try:
            return Conditioning(tensors=load_state(path)["tensors"])
        except DamagedFile:
            LOG.warning("the encoded prompt %s is damaged: it is made anew", path)
        except FileNotFoundError:
            pass
        return None

    def save(self, prompt: str, negative: str, cond: Conditioning) -> None:
        """Write the conditioning of a prompt, one row."""
        state = {"prompt": prompt, "negative": negative, "tensors": dict(cond.tensors)}
        save_state(self.path(prompt, negative), state)


CAPACITY = 2_048  # prompts; at the real sizes one takes megabytes
Key = tuple[str, str]  # prompt and negative prompt


class TextCache:
    """Conditioning by prompt, on the CPU; runs the text encoders only for prompts not yet cached.

    Encoders compute in their own dtype, as in the pipeline's own call, also under autocast. Where
    `place_to_encode` is not where they live, whoever calls moves them there for that time.

    Args:
        negative: the negative prompt of records that have none.
        disk: where prompts are also kept between runs.
        capacity: most prompts in memory, the least recently used are dropped; None keeps all.
    """

    def __init__(
        self,
        backbone: PipelineBackbone,
        negative: str = "",
        batch_size: int = 64,
        *,
        disk: PromptCache | None = None,
        capacity: int | None = CAPACITY,
    ):
        self.use(backbone)
        self.negative = negative
        self.batch_size = batch_size
        self.disk, self.capacity = disk, capacity
        self.encoded: OrderedDict[Key, Conditioning] = OrderedDict()

    def use(self, backbone: PipelineBackbone) -> None:
        """Encode with this backbone from now on; its encoders are on a device, or freed."""
        self.backbone, self.freed = backbone, are_freed(backbone.pipeline)
        where = place_to_encode(backbone)
        self.encoder = backbone if where == backbone.device else backbone.on(where)

    def __call__(self, prompts: Sequence[PromptRecord]) -> Conditioning:
        """Return the prompts' conditioning. Raises UserError if one needs freed text encoders."""
        keys = [self.key(prompt) for prompt in prompts]
        self._recall(keys)
        cond = Conditioning.cat([self.encoded[key] for key in keys]).to(self.backbone.device)
        for key in keys:
            self.encoded.move_to_end(key)
        self._forget()
        return cond

    def key(self, prompt: PromptRecord) -> Key:
        return prompt.encoded, self.negative if prompt.negative is None else prompt.negative

    def has(self, prompt: PromptRecord, *, whole: bool = False) -> bool:
        """Whether a prompt is cached. whole: read its file to the end."""
        key = self.key(prompt)
        if key in self.encoded or self.disk is None:
            return key in self.encoded
        return self.disk.load(*key) is not None if whole else self.disk.has(*key)

    def make(self, prompts: Sequence[PromptRecord]) -> None:
        """Encode these prompts, cached or not."""
        self._encode([self.key(prompt) for prompt in prompts])
        self._forget()

    def _recall(self, keys: Sequence[Key]) -> None:
        missing = []
        for key in dict.fromkeys(keys):
            if key in self.encoded:
                continue
            stored = None if self.disk is None else self.disk.load(*key)
            if stored is None:
                missing.append(key)
            else:
                self.encoded[key] = stored
        self._encode(missing, rows=min(len(keys), self.batch_size))

    @torch.no_grad()
    def _encode(self, keys: Sequence[Key], rows: int = 0) -> None:
        """Encode texts, at least `rows` at once, since the last bits depend on that number.

        How many of an iteration's texts are new is another number in a run that was resumed.
        """
        if not keys:
            return
        keys = list(dict.fromkeys(keys))
        if self.freed:
            raise self._unknown(keys[0])
        with phase("encode"), torch.autocast(self.encoder.device.type, enabled=False):
            for start in range(0, len(keys), self.batch_size):
                part = keys[start : start + self.batch_size]
                texts = [*part, *part[:1] * (rows - len(part))]
                cond = self.encoder.encode([p for p, _ in texts], [n for _, n in texts]).to("cpu")
                for i, key in enumerate(part):
                    self.encoded[key] = cond.take(torch.tensor([i]))
                    if self.disk is not None:
                        self.disk.save(*key, self.encoded[key])

    def _unknown(self, key: Key) -> UserError:
        remedy = ""
        if self.disk is not None and self.disk.has(*key):
            remedy = f"remove {self.disk.path(*key)}, which is damaged, or "
        return UserError(
            f"the prompt {key[0]!r} is not among the prompts that were encoded before the text "
            f"encoders were freed: {remedy}set memory.text_encoders to offload or keep"
        )

    def _forget(self) -> None:
        while self.capacity is not None and len(self.encoded) > self.capacity:
            self.encoded.popitem(last=False)


INDEX = "model_index.json"


def index_file(path: str, revision: str | None) -> Path | None:
    """Return the index file of a pipeline in a folder, or in this machine's cache of the Hub."""
    if Path(path).is_dir():
        file = Path(path) / INDEX
        return file if file.exists() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(path, INDEX, revision=revision)
    except HFValidationError:  # no name of the Hub either
        return None
    return Path(file) if isinstance(file, str) else None


def identify_by_files(index: Path, kinds: Sequence[str] = (ENCODER, "tokenizer")) -> dict[str, Any]:
    """Identify parts of a pipeline by the commit on the Hub, or by lengths and times of files.

    index: the pipeline's model_index.json. kinds: how the names of the parts' folders begin.
    """
    folder = index.parent
    if folder.parent.name == "snapshots":  # as the Hub's cache is laid out
        return {"commit": folder.name}
    parts = [index, *sorted(p for n in kinds for p in folder.glob(f"{n}*/**/*") if p.is_file())]
    stats = [(p.relative_to(folder).as_posix(), p.stat()) for p in parts]
    return {"files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}
