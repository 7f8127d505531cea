"""Which prompts a run encodes, and the caches that all parts of it share."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.base import Backbone
from flowrl.backbones.loading import pipeline_path
from flowrl.backbones.offload import encoders_of, free_encoders, moved_to
from flowrl.backbones.text_cache import (
    CAPACITY,
    PromptCache,
    TextCache,
    encoder_names,
    identify_by_files,
    identify_by_weights,
    index_file,
)
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.offline.source import StoredGroups
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.trees.memory import free_bytes
from flowrl.utils.distributed import Runtime
from flowrl.utils.progress import Steps

GuidedPrompts = Sequence[tuple[float, PromptRecord]]  # each with the guidance scale of its images


def prompts_to_encode(
    config: Config,
    training: Sequence[PromptRecord],
    held_out: Sequence[PromptRecord],
    first: int = 0,
) -> list[tuple[float, PromptRecord]]:
    """Return every text that training from iteration `first` on and evaluation encode.

    Paraphrases are included, texts of an offline data set are not: see `stored_prompts`.
    """
    r, e, seed, balance = config.rollout, config.evaluation, config.run.seed, config.prompts.balance
    if training and r.store is None:  # a data set is renewed from all prompts
        sampler = PromptSampler(training, r.prompts_per_iteration, seed, balance=balance)
        taken: dict[str, PromptRecord] = {}
        for iteration in range(first, config.run.iterations):
            taken |= {prompt.uid: prompt for prompt in sampler.at(iteration)}
            if len(taken) == len(training):
                break
        training = list(taken.values())
    training = _worded(training, config.prompts.retained is not None)
    found = [(r.guidance_scale, prompt) for prompt in training]
    if r.store is not None:
        found += [(r.learning_guidance_scale, prompt) for prompt in training]
    return found + [(e.guidance_scale, prompt) for prompt in _worded(held_out, e.paraphrases)]


def _worded(prompts: Sequence[PromptRecord], paraphrases: bool) -> list[PromptRecord]:
    others = [replace(p, wording=words) for p in prompts for words in p.paraphrases * paraphrases]
    return [*prompts, *others]


def stored_prompts(config: Config, source: Any) -> list[tuple[float, PromptRecord]]:
    """Return every text that is read from an offline data set."""
    if not isinstance(source, StoredGroups):
        return []
    guidance = config.rollout.learning_guidance_scale
    kinds = source.sampler.order.kinds.values()
    return [(guidance, prompt) for records in kinds for prompt in records]


class TextCaches:
    """The encoded prompts of a run: one `TextCache` with guidance and one without."""

    def __init__(self, config: Config, pipeline: Any = None):
        self.config, self.pipeline = config, pipeline  # one that was provided, if any
        self._caches: dict[bool, TextCache] = {}
        self._identity: dict[str, Any] | None = None

    def get(self, backbone: Backbone, guidance: float) -> TextCache:
        guided = guidance > 1
        if guided not in self._caches:
            disk = self._disk(guided)
            keep_all = self.config.memory.text_encoders == "free" and disk is None
            negative, capacity = self.config.rollout.negative_prompt, None if keep_all else CAPACITY
            self._caches[guided] = TextCache(backbone, negative, disk=disk, capacity=capacity)
        return self._caches[guided]

    def unneeded_encoders(self, prompts: GuidedPrompts) -> list[str]:
        """Return the text encoders that need not be loaded: all or none, by what is on disk."""
        index = self._index()
        kept = self.config.memory.text_encoders != "free" or self.config.rollout.reads_store
        if kept or index is None:
            return []
        disks = {guided: self._disk(guided) for guided in (False, True)}
        default = self.config.rollout.negative_prompt
        for guidance, prompt in prompts:
            disk = disks[guidance > 1]
            negative = default if prompt.negative is None else prompt.negative
            if disk is None or not disk.has(prompt.read, negative):
                self._identity = None  # a branch may have moved on: known once they are loaded
                return []
        return encoder_names(index)

    def commit(self) -> str | None:
        """Return the commit of the pipeline on the Hub whose encoders wrote what is on disk."""
        return (self._identify() or {}).get("commit")

    def encode_and_free(self, pipeline: Any, prompts: GuidedPrompts, runtime: Runtime) -> None:
        """With memory.text_encoders free: encode these prompts, then drop the encoders.

        All users must have called `get` before. With a disk each process encodes a share, and
        reads what the others wrote.

        Raises:
            UserError: on all processes, for texts that do not fit into memory, and for a damaged
                file where the encoders were not loaded.
        """
        if self.config.memory.text_encoders != "free":
            return
        asked = [(self._caches[guidance > 1], prompt) for guidance, prompt in prompts]
        texts = list({(cache, cache.key(p)): (cache, p) for cache, p in asked}.values())
        # Dealt one by one, since what is missing often lies side by side.
        on_disk = all(cache.disk is not None for cache in self._caches.values())
        share = texts[runtime.rank :: runtime.world_size] if on_disk else texts
        for part, whole in ((share, True), (texts, False)):
            with runtime.raise_on_all():
                missing = [(cache, p) for cache, p in part if not cache.has(p, whole=whole)]
                _encode(missing, show=runtime.is_main)
            runtime.wait()
        free_encoders(pipeline)

    def _disk(self, guided: bool) -> PromptCache | None:
        folder, p = self.config.memory.prompt_cache, self.config.pipeline
        if folder is None or (identity := self._identify()) is None:
            return None
        key = {
            "pipeline": p.path,
            "revision": p.revision,
            "encoders": identity,
            "backbone": p.backbone,
            "dtype": p.dtype,
            "max_sequence_length": p.max_sequence_length,
            "guided": guided,
            "code": [version("diffusers"), version("transformers")],
        }
        return PromptCache(Path(folder), key)

    def _identify(self) -> dict[str, Any] | None:
        """Return what identifies the encoders; None before a Hub pipeline is downloaded."""
        if self._identity is None and self.pipeline is not None:
            self._identity = identify_by_weights(self.pipeline)
        elif self._identity is None and (index := self._index()) is not None:
            self._identity = identify_by_files(index)
        return self._identity

    def _index(self) -> Path | None:
        p = self.config.pipeline
        return None if self.pipeline is not None else index_file(pipeline_path(p.path), p.revision)


def _encode(missing: Sequence[tuple[TextCache, PromptRecord]], *, show: bool) -> None:
    """Encode in full batches. Raises UserError after the first for what will not fit in memory."""
    by_cache: dict[TextCache, list[PromptRecord]] = {}
    for cache, prompt in missing:
        by_cache.setdefault(cache, []).append(prompt)
    parts = [
        (cache, prompts[start : start + cache.batch_size])
        for cache, prompts in by_cache.items()
        for start in range(0, len(prompts), cache.batch_size)
    ]
    if not parts:
        return
    backbone = parts[0][0].backbone  # all have one pipeline
    steps = Steps("encoding prompts", len(parts)) if show else None
    with moved_to(encoders_of(backbone.pipeline), backbone.device), steps or nullcontext():
        for number, (cache, prompts) in enumerate(parts):
            cache.make(prompts)
            if number == 0 and cache.disk is None:
                _check_room(cache.nbytes() // len(cache.known), len(missing))
            if steps is not None:
                steps.advance()


def _check_room(nbytes: int, prompts: int) -> None:
    """Check that all processes can keep their encoded prompts, each of so many bytes."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the launcher's
    free = free_bytes(torch.device("cpu"))
    if free is not None and nbytes * prompts * processes > free:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"memory.text_encoders is free, but {prompts} encoded prompts of {nbytes / 2**20:.1f} "
            f"MB{each} do not fit into the {free / 2**30:.0f} GB of memory that are left: set "
            "memory.prompt_cache to a folder, or memory.text_encoders to offload"
        )
