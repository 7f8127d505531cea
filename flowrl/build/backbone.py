"""From options to a backbone around a pipeline, and to the layers of it that are adapted."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.base import Backbone, members_lacking
from flowrl.backbones.flux import Flux
from flowrl.backbones.loading import (
    DTYPES,
    load_pipeline,
    pipeline_path,
    recompute_blocks,
    set_attention,
)
from flowrl.backbones.offload import (
    AUTOENCODER,
    ENCODER,
    encoders_of,
    free_encoders,
    place,
    visiting,
)
from flowrl.backbones.quantized_base import BaseBits, check_base_bits, round_in_place, while_loading
from flowrl.backbones.sana import Sana
from flowrl.backbones.sd3 import SD3, dual_targets
from flowrl.backbones.text_cache import (
    CAPACITY,
    PromptCache,
    TextCache,
    by_files,
    by_weights,
    encoder_names,
    index_file,
)
from flowrl.config import Config
from flowrl.config.sections import LoRAOptions
from flowrl.errors import UserError
from flowrl.offline.source import StoredGroups
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.quantization.backends import (
    Backend,
    NVFP4Emulated,
    NVFP4Native,
    PerRow,
    capability_of,
    resolve,
)
from flowrl.quantization.layer_rules import LayerRules
from flowrl.quantization.linear import quantise_base
from flowrl.quantization.rollout_model import prepare, write_precision
from flowrl.trees.memory import free_bytes
from flowrl.utils.distributed import Runtime
from flowrl.utils.imports import load_callable
from flowrl.utils.progress import Steps

BACKBONES: dict[str, Callable[..., Backbone]] = {"sd3": SD3, "flux": Flux, "sana": Sana}
FAMILIES = {  # diffusers' classes
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "SanaPipeline": "sana",
}


PREFIXES = ("StableDiffusion3", "Flux", "Sana")  # of their relatives, which are not refused


def backbone_class(name: str) -> Callable[..., Backbone]:
    """A family of BACKBONES, or somebody's own by its import path. Raises UserError for neither."""
    if name in BACKBONES:
        return BACKBONES[name]
    try:
        return load_callable(name)
    except LookupError as error:
        raise UserError(
            f"pipeline.backbone is {name!r}, expected {', '.join(BACKBONES)} or module:attribute: "
            f"{error}"
        ) from error


def build_backbone(config: Config, pipeline: Any, *, guidance: float) -> Backbone:
    """Raises UserError for a pipeline of another family, and for a backbone that lacks members."""
    p = config.pipeline
    kind = type(pipeline)
    own = FAMILIES.get(kind.__name__)
    of_diffusers = kind.__module__.startswith("diffusers.")
    if p.backbone in BACKBONES and of_diffusers and not kind.__name__.startswith(PREFIXES):
        raise UserError(
            f"{p.path} is a {kind.__name__}, but flowrl trains pipelines of SD3, FLUX.1 and SANA: "
            "give one of these, or a backbone of your own as pipeline.backbone=module:attribute"
        )
    if p.backbone in BACKBONES and own not in (p.backbone, None):
        raise UserError(
            f"pipeline.backbone is {p.backbone}, but {p.path} is a {type(pipeline).__name__}: "
            f"write pipeline.backbone={own}, or start from a recipe for {own}"
        )
    backbone = backbone_class(p.backbone)(
        pipeline,
        guidance=guidance,
        max_sequence_length=p.max_sequence_length,
        height=p.height,
        width=p.width,
    )
    if lacking := members_lacking(backbone):
        raise UserError(
            f"pipeline.backbone {p.backbone!r} has no {', '.join(lacking)}: "
            "flowrl/backbones/base.py says what a backbone has"
        )
    return backbone


def with_pipeline_family(config: Config, pipeline: Any) -> Config:
    """The recipe with the backbone that a loaded pipeline asks for, as far as it is known."""
    family = FAMILIES.get(type(pipeline).__name__, config.pipeline.backbone)
    section = config.pipeline.model_copy(update={"backbone": family})
    return config.model_copy(update={"pipeline": section})


def adapted_layers(lora: LoRAOptions, backbone: Backbone) -> tuple[str, ...]:
    """Name endings of the adapted layers. Raises UserError for dual attention where is none."""
    targets = tuple(lora.targets or backbone.lora_targets)
    if not lora.dual_attention:
        return targets
    network: Any = backbone.transformer
    return targets + dual_targets(type(network).__name__, network.config)


# --- From the options under `memory` to a pipeline that fits, and to who remembers encoded pr --

LOG = logging.getLogger(__name__)
GuidedPrompts = Sequence[tuple[float, PromptRecord]]  # prompts, each with the guidance it is drawn with


def build_pipeline(
    config: Config,
    device: torch.device,
    given: Any = None,
    *,
    without: Sequence[str] = (),
    revision: str | None = None,
    decoder_learns: bool = False,
) -> Any:
    """The pipeline that the configuration names or that was given, as `memory` says.

    without: components that are not loaded. revision: None for the recipe's. decoder_learns:
    gradients go through the autoencoder, which then stays on the device. Raises UserError for what
    cannot be had here.
    """
    p, m = config.pipeline, config.memory
    backbone_class(p.backbone)  # or the sentence that says why not, before anything is loaded
    base = base_bits(config)
    if base is not None:
        check_base_bits(base, device)
    away = (ENCODER,) if m.text_encoders != "keep" else ()
    if m.vae == "offload" and decoder_learns:
        LOG.warning(
            "memory.vae is offload, but objective %s follows gradients through the autoencoder, "
            "which stays on the device for that",
            config.objective.kind,
        )
    elif m.vae == "offload":
        away += (AUTOENCODER,)
    if given is None:
        rounding = None if base is None else while_loading(base, DTYPES[p.dtype])
        pipeline = load_pipeline(
            p.path,
            dtype=p.dtype,
            device=device,
            revision=revision or p.revision,
            rounding=rounding,
            away=away,
            without=without,
        )
    else:
        pipeline = place(given, device, away)
        if base is not None:
            round_in_place(pipeline.transformer, base)
    if p.attention is not None:
        set_attention(pipeline.transformer, p.attention, device)
    if m.gradient_checkpointing:
        recompute_blocks(pipeline.transformer)
    return pipeline


def base_bits(config: Config) -> BaseBits | None:
    m = config.memory
    return None if m.base_bits is None else BaseBits(bits=m.base_bits, library=m.base_library)


def rounding_key(config: Config) -> dict[str, Any]:
    """How the frozen weights are rounded, for keys of what depends on them; {} where they are
    not. All other options under `memory` leave images and scores as they are."""
    m = config.memory
    return {} if m.base_bits is None else {"base": [m.base_bits, m.base_library]}


def prompts_to_encode(
    config: Config,
    drawn: Sequence[PromptRecord],
    held_out: Sequence[PromptRecord],
    first: int = 0,
) -> list[tuple[float, PromptRecord]]:
    """Every text that training and evaluation will ask for, paraphrases included.

    drawn: what training takes its prompts from; held_out: what is drawn in evaluations; first: the
    iteration that training starts with. What a store holds comes on top: it is known once the
    store is open.
    """
    r, e = config.rollout, config.evaluation
    training = _worded(_taken(config, drawn, first), config.prompts.retained is not None)
    found = [(r.guidance_scale, prompt) for prompt in training]
    if r.store is not None:
        found += [(learning_guidance(config), prompt) for prompt in training]
    return found + [(e.guidance_scale, prompt) for prompt in _worded(held_out, e.paraphrases)]


def _taken(config: Config, drawn: Sequence[PromptRecord], first: int) -> list[PromptRecord]:
    """The prompts of iterations from `first` on; all where a store is drawn anew from them."""
    r, seed, balance = config.rollout, config.run.seed, config.prompts.balance
    if not drawn or r.store is not None:
        return list(drawn)
    sampler = PromptSampler(drawn, r.prompts_per_iteration, seed, balance=balance)
    taken = {p.uid: p for i in range(first, config.run.iterations) for p in sampler.at(i)}
    return list(taken.values())


def stored_prompts(config: Config, source: Any) -> list[tuple[float, PromptRecord]]:
    """Every text that is read from a store."""
    if not isinstance(source, StoredGroups):
        return []
    kinds = source.sampler.order.kinds.values()
    return [(learning_guidance(config), prompt) for records in kinds for prompt in records]


def _worded(prompts: Sequence[PromptRecord], reworded: bool) -> list[PromptRecord]:
    others = [replace(p, wording=words) for p in prompts for words in p.paraphrases * reworded]
    return [*prompts, *others]


def learning_guidance(config: Config) -> float:
    """The guidance of the backbone that learns."""
    r = config.rollout
    return r.guidance_scale if r.training_guidance_scale is None else r.training_guidance_scale


class TextCaches:
    """Who remembers encoded prompts: one `TextCache` with and one without guidance, for all.

    pipeline: one that was given, in place of the one that the configuration names.
    """

    def __init__(self, config: Config, pipeline: Any = None):
        self.config, self.given = config, pipeline
        self._caches: dict[bool, TextCache] = {}
        self._identity: dict[str, Any] | None = None

    def of(self, backbone: Backbone, guidance: float) -> TextCache:
        guided, m = guidance > 1, self.config.memory
        if guided not in self._caches:
            disk = self._disk(guided)
            every = m.text_encoders == "free" and disk is None
            self._caches[guided] = TextCache(
                backbone,
                self.config.rollout.negative_prompt,
                disk=disk,
                capacity=None if every else CAPACITY,
            )
        return self._caches[guided]

    def unneeded(self, needed: GuidedPrompts) -> list[str]:
        """The text encoders that need not be loaded, as all texts are on disk; none if one is."""
        index, store = self._index(), self.config.rollout.store
        freed = self.config.memory.text_encoders == "free"
        if not freed or index is None or (store is not None and store.path is not None):
            return []
        disks = {guided: self._disk(guided) for guided in (False, True)}
        for guidance, prompt in needed:
            disk = disks[guidance > 1]
            negative = (
                self.config.rollout.negative_prompt if prompt.negative is None else prompt.negative
            )
            if disk is None or not disk.has(prompt.read, negative):
                self._identity = None  # a branch may have moved on: known once they are loaded
                return []
        return encoder_names(index)

    def commit(self) -> str | None:
        """Of a pipeline from the Hub: the commit whose text encoders encoded what is on disk."""
        return (self._who() or {}).get("commit")

    def free(self, pipeline: Any, needed: GuidedPrompts, runtime: Runtime) -> None:
        """With memory.text_encoders free: encode all texts that are needed, and drop the encoders.

        Once all who draw have asked for their cache. With a disk each process encodes a share and
        reads it to the end, then what the others have put where it cannot see it. Raises UserError
        on all processes for texts that do not fit into memory, and for a damaged file where the
        encoders were not loaded.
        """
        if self.config.memory.text_encoders != "free":
            return
        asked = [(self._caches[guidance > 1], prompt) for guidance, prompt in needed]
        texts = list({(cache, cache.key(p)): (cache, p) for cache, p in asked}.values())
        # Dealt one by one, since what is missing often lies side by side.
        on_disk = all(cache.disk is not None for cache in self._caches.values())
        share = texts[runtime.rank :: runtime.world_size] if on_disk else texts
        for part, whole in ((share, True), (texts, False)):
            with runtime.together():
                missing = [(cache, p) for cache, p in part if not cache.has(p, whole=whole)]
                _encode(missing, show=runtime.is_main)
            runtime.wait()
        free_encoders(pipeline)

    def _disk(self, guided: bool) -> PromptCache | None:
        folder, p = self.config.memory.prompt_cache, self.config.pipeline
        if folder is None or (identity := self._who()) is None:
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

    def _who(self) -> dict[str, Any] | None:
        """What tells the text encoders from others; None before a pipeline from the Hub is here."""
        if self._identity is None and self.given is not None:
            self._identity = by_weights(self.given)
        elif self._identity is None and (index := self._index()) is not None:
            self._identity = by_files(index)
        return self._identity

    def _index(self) -> Path | None:
        p = self.config.pipeline
        return None if self.given is not None else index_file(pipeline_path(p.path), p.revision)


def _encode(missing: Sequence[tuple[TextCache, PromptRecord]], *, show: bool) -> None:
    """In full batches, with a progress bar. Raises UserError after the first for what will not
    fit into memory."""
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
    with visiting(encoders_of(backbone.pipeline), backbone.device), steps or nullcontext():
        for number, (cache, prompts) in enumerate(parts):
            cache.make(prompts)
            if number == 0 and cache.disk is None:
                _check_room(cache.nbytes() // len(cache.known), len(missing))
            if steps is not None:
                steps.advance()


def _check_room(nbytes: int, prompts: int) -> None:
    """nbytes: of one encoded prompt, of which each process of this machine keeps all."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the launcher's
    free = free_bytes(torch.device("cpu"))
    if free is not None and nbytes * prompts * processes > free:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"memory.text_encoders is free, but {prompts} encoded prompts of {nbytes / 2**20:.1f} "
            f"MB{each} do not fit into the {free / 2**30:.0f} GB of memory that are left: set "
            "memory.prompt_cache to a folder, or memory.text_encoders to offload"
        )


# --- From options to the precision that the network draws and learns in ------------------------

FILE = "training-precision.json"
WHERE = "pipeline"  # the section of its options


def set_precision(config: Config, backbone: Backbone, runtime: Runtime) -> None:
    """Pack the network's frozen weights as `pipeline.precision` says, and tell; null is nothing.

    Before adapters are added. Raises UserError for a precision that the device lacks, layers that
    cannot be packed, and kernels that compute something else.
    """
    p = config.pipeline
    if p.precision is None:
        return
    resolved = resolve(p.precision, capability_of(runtime.device), where=WHERE)
    choices, backend = prepare(
        backbone.transformer,
        resolved,
        dtype=backbone.dtype,
        device=runtime.device,
        rules=layer_rules(backbone),
        min_dim=p.min_dim,
        keep=p.keep_layers,
        convolutions=False,
        where=WHERE,
    )
    if runtime.is_main:
        write_precision(
            Path(config.run.output_dir),
            resolved,
            choices,
            dtype=backbone.dtype,
            what="rollouts and training",
            lora="side",
            file=FILE,
        )
    quantise_base(backbone.transformer, choices, row_by_row(backend))


def layer_rules(backbone: Backbone) -> LayerRules | None:
    """What a backbone of somebody's own says of its layers, if it does."""
    return getattr(backbone, "layer_rules", None)


def row_by_row(backend: Backend) -> Backend:
    """The same numbers whatever the batch: a rollout's and a micro-batch are seldom alike."""
    return PerRow(backend) if isinstance(backend, NVFP4Native | NVFP4Emulated) else backend
