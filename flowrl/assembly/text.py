"""Which prompts a run encodes, and the caches that all parts of it share."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowrl.assembly.backbone import build_backbone, load_without_transformer
from flowrl.backbones.loading import pipeline_path
from flowrl.backbones.offload import (
    ENCODER,
    encoders_of,
    encoders_on_device,
    free_device_memory,
    free_encoders,
)
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.sharding import NETWORK
from flowrl.backbones.text_cache import (
    CAPACITY,
    PromptCache,
    TextCache,
    identify_by_files,
    index_file,
)
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.offline.format import open_dataset
from flowrl.offline.source import filter_groups
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.scoring.spec import RewardSpec
from flowrl.trajectory import Conditioning
from flowrl.utils.distributed import Runtime
from flowrl.utils.progress import Steps
from flowrl.utils.untrusted import read_json

ROWS = 64  # texts that are encoded at once, at most
# Tokens encoded at once before the transformer is loaded: small cards have memory for no more.
TOKENS_FIRST = 4096
GuidedPrompts = Sequence[tuple[float, PromptRecord]]  # each with the guidance scale of its images


def prompts_to_encode(
    config: Config,
    training: Sequence[PromptRecord],
    held_out: Sequence[PromptRecord],
    iterations: range | None = None,
) -> list[tuple[float, PromptRecord]]:
    """Return every text that these iterations of training, None for all, and evaluation encode.

    Texts of an offline data set are not included: see `stored_prompts`.
    """
    r, e, p, seed = config.rollout, config.evaluation, config.prompts, config.run.seed
    if training and r.store is None and p.book is None:  # which are taken from all prompts
        sampler = PromptSampler(
            training, r.prompts_per_iteration, seed, balance=p.balance, weights=p.weights
        )
        taken: dict[str, PromptRecord] = {}
        for iteration in range(config.run.iterations) if iterations is None else iterations:
            taken |= {prompt.uid: prompt for prompt in sampler.at(iteration)}
            if len(taken) == len(training):
                break
        training = list(taken.values())
    guided = [(r.guidance_scale, prompt) for prompt in training]
    if r.store is not None:
        guided += [(r.learning_guidance_scale, prompt) for prompt in training]
    return guided + [(e.guidance_scale, prompt) for prompt in held_out]


def stored_prompts(config: Config, specs: Sequence[RewardSpec]) -> list[tuple[float, PromptRecord]]:
    """Return every text that is read from an offline data set, if the recipe reads one."""
    r, p = config.rollout, config.prompts
    if r.store is None:
        return []
    groups = filter_groups(
        open_dataset(r.store), specs, r.prompts_per_iteration, config.run.seed,
        balance=p.balance, weights=p.weights,
    )  # fmt: skip
    kinds = groups.order.kinds.values()
    return [(r.learning_guidance_scale, prompt) for records in kinds for prompt in records]


def rows_first(tokens: int) -> int:
    """Return how many texts of so many tokens are encoded at once before the network is there."""
    return max(1, min(ROWS, TOKENS_FIRST // tokens))


class TextCaches:
    """The encoded prompts of a run: one `TextCache` with guidance and one without."""

    def __init__(self, config: Config, pipeline: Any = None):
        if pipeline is not None and config.memory.prompt_cache is not None:
            raise UserError(
                "memory.prompt_cache is set, and nothing says whose text encoders a pipeline "
                "object has: name the pipeline in the recipe, or set memory.prompt_cache to null"
            )
        self.config, self.pipeline = config, pipeline  # one that was provided, if any
        self._caches: dict[bool, TextCache] = {}
        self._identity: dict[str, Any] | None = None
        self._first: GuidedPrompts = ()  # what is encoded before the transformer is placed

    def get(self, backbone: PipelineBackbone, guidance: float) -> TextCache:
        guided = guidance > 1
        if guided not in self._caches:
            disk = self._disk(guided)
            negative, capacity, rows = self.config.rollout.negative_prompt, CAPACITY, ROWS
            if self.config.memory.text_encoders != "keep":  # all are encoded first, and kept
                rows = rows_first(self.config.pipeline.max_sequence_length)
                capacity = None if disk is None else CAPACITY
            self._caches[guided] = TextCache(backbone, negative, rows, disk=disk, capacity=capacity)
        cache = self._caches[guided]
        cache.use(backbone)  # the one of now, whose transformer is there
        if backbone.example is None:
            backbone.example = self._example(guided)
        return cache

    def _example(self, guided: bool) -> Conditioning | None:
        """Return an encoded prompt, for calls of the pipeline after its encoders are gone."""
        cache = self._caches[guided]
        keys = [cache.key(p) for guidance, p in self._first if (guidance > 1) == guided][:1]
        for key in keys:
            if key in cache.encoded:
                return cache.encoded[key]
            if cache.disk is not None:
                return cache.disk.load(*key)
        return None

    def encode_first(self, prompts: GuidedPrompts, runtime: Runtime) -> dict[str, Any]:
        """Encode these prompts before the transformer is placed, unless the encoders are kept.

        Returns the components that are loaded by then, for `build_pipeline`; encoders among them
        are on the CPU, or None with memory.text_encoders free. A pipeline that was provided is used
        as it is, and loses its encoders then.

        Raises:
            UserError: on all processes; see `encode`.
        """
        config, how = self.config, self.config.memory.text_encoders
        self._first = prompts
        if how == "keep" or (how == "offload" and not prompts):
            return {}
        if without := self.unneeded_encoders(prompts):
            return dict.fromkeys(without)
        pipeline = self.pipeline
        if pipeline is None:
            pipeline = load_without_transformer(config.pipeline)
        for guidance in dict.fromkeys(guidance for guidance, _ in prompts):
            backbone = build_backbone(config.pipeline, pipeline, guidance=guidance)
            self.get(backbone.on(runtime.device), guidance)
        self.encode(pipeline, prompts, runtime)
        free_device_memory()
        if self.pipeline is not None:
            return {}
        network = getattr(pipeline, NETWORK, None)
        empty = network is not None and next(network.parameters()).is_meta
        return {n: part for n, part in pipeline.components.items() if n != NETWORK or not empty}

    def unneeded_encoders(self, prompts: GuidedPrompts) -> list[str]:
        """Return the text encoders that need not be loaded: all or none, by what is on disk."""
        index = self._index()
        if self.config.memory.text_encoders != "free" or index is None:
            return []
        if self.count_on_disk(prompts) < len(prompts):
            self._identity = None  # a branch may have moved on: known once they are loaded
            return []
        return [name for name in read_json(index) if name.startswith(ENCODER)]

    def count_on_disk(self, prompts: GuidedPrompts) -> int:
        """Return how many of these prompts are in memory.prompt_cache."""
        disks = {guided: self._disk(guided) for guided in (False, True)}
        default, count = self.config.rollout.negative_prompt, 0
        for guidance, prompt in prompts:
            disk = disks[guidance > 1]
            negative = default if prompt.negative is None else prompt.negative
            count += disk is not None and disk.has(prompt.text, negative)
        return count

    def commit(self) -> str | None:
        """Return the commit of the pipeline on the Hub whose encoders wrote what is on disk."""
        return (self._identify() or {}).get("commit")

    def weights(self) -> dict[str, Any] | None:
        """Return what identifies the pipeline's files; None for a pipeline that was provided."""
        index = self._index()
        return None if index is None else identify_by_files(index, kinds=("",))

    def encode(self, pipeline: Any, prompts: GuidedPrompts, runtime: Runtime) -> None:
        """Encode these prompts; then drop the encoders, with memory.text_encoders free.

        All users must have called `get` before. With a disk each process encodes a share, and
        reads what the others wrote.

        Raises:
            UserError: on all processes, for a damaged file where the encoders were not loaded.
        """
        wanted = [(self._caches[guidance > 1], prompt) for guidance, prompt in prompts]
        texts = list({(cache, cache.key(p)): (cache, p) for cache, p in wanted}.values())
        # Dealt one by one, since what is missing often lies side by side.
        on_disk = all(cache.disk is not None for cache in self._caches.values())
        share = texts[runtime.rank :: runtime.world_size] if on_disk else texts
        for part, whole in ((share, True), (texts, False)):
            with runtime.raise_on_all():
                missing = _incomplete_batches(part, whole=whole)
                _encode(missing, show=runtime.is_main)
            runtime.wait()
        if self.config.memory.text_encoders == "free":
            free_encoders(pipeline)

    def _disk(self, guided: bool) -> PromptCache | None:
        folder, p = self.config.memory.prompt_cache, self.config.pipeline
        if folder is None or (identity := self._identify()) is None:
            return None
        key = {
            "pipeline": p.path,
            "revision": p.revision,
            "encoders": identity,
            "dtype": p.dtype,
            "max_sequence_length": p.max_sequence_length,
            "guided": guided,
            "code": [version("diffusers"), version("transformers")],
        }
        return PromptCache(Path(folder), key)

    def _identify(self) -> dict[str, Any] | None:
        """Return what identifies the encoders; None before a Hub pipeline is downloaded."""
        if self._identity is None and (index := self._index()) is not None:
            self._identity = identify_by_files(index)
        return self._identity

    def _index(self) -> Path | None:
        p = self.config.pipeline
        return None if self.pipeline is not None else index_file(pipeline_path(p.path), p.revision)


def _incomplete_batches(
    texts: Sequence[tuple[TextCache, PromptRecord]], *, whole: bool
) -> list[tuple[TextCache, list[PromptRecord]]]:
    """Return the batches of each cache that lack a prompt, with all of their prompts.

    A text's last bits depend on its batch: a run that was killed encodes the same batches again.
    """
    incomplete = []
    for cache in dict.fromkeys(cache for cache, _ in texts):
        prompts = [prompt for its_cache, prompt in texts if its_cache is cache]
        for start in range(0, len(prompts), cache.batch_size):
            batch = prompts[start : start + cache.batch_size]
            if not all([cache.has(prompt, whole=whole) for prompt in batch]):
                incomplete.append((cache, batch))
    return incomplete


def _encode(batches: Sequence[tuple[TextCache, list[PromptRecord]]], *, show: bool) -> None:
    """Encode batches of prompts."""
    if not batches:
        return
    encoder = batches[0][0].encoder  # all have one pipeline
    moved = encoders_on_device(encoders_of(encoder.pipeline), encoder.device)
    with moved, Steps("encoding prompts", len(batches), show=show) as steps:
        for cache, prompts in batches:
            cache.make(prompts)
            steps.advance()
