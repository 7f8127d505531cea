"""A recipe before it is run: who does what, how much work it is, and whether it fits.

Nothing is loaded, downloaded or allocated: networks are built on the meta device.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.loading import TINY, pipeline_path
from flowrl.backbones.sd3 import dual_targets
from flowrl.build.backbone import FAMILIES, backbone_class
from flowrl.build.objective import build_objective
from flowrl.build.work_split import IterationWork, WorkSplit, build_load, micro_batches, solve
from flowrl.config import Config
from flowrl.config.rewards import HTTPOptions, PoolOptions
from flowrl.config.rewards import RewardOptions as RewardSection
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Needs
from flowrl.planning.activations import CLIP_TOKENS, keep_wide
from flowrl.planning.dry_run import tell
from flowrl.planning.memory import AUTO, Copy, Footprint, Setup, footprints, peak
from flowrl.planning.model_specs import SIZES, Size, TextEncoder, size_of_checkpoint
from flowrl.planning.suggestions import Remedies, find_remedies
from flowrl.trees.plan import TreePlan, count

# --- The shapes of a recipe's pipeline, without its weights ------------------------------------

OWN = ("architectures", "dtype", "torch_dtype", "transformers_version", "model_type")  # of files


def size_for(path: str) -> Size:
    """Of a checkpoint's name on the Hub, a built-in pipeline, or a folder.

    Raises UserError for a name that is not known, and a folder that is no pipeline of a family
    that flowrl has.
    """
    if (name := size_of_checkpoint(path)) is not None:
        return SIZES[name]
    folder = Path(pipeline_path(path))
    if not (folder / "model_index.json").is_file():
        known = ", ".join([*(size.checkpoint for size in SIZES.values()), *TINY])
        raise UserError(
            f"the memory of {path} cannot be planned without its shapes: known are {known}; for "
            "another checkpoint give the folder it was downloaded to as pipeline.path"
        )
    return _of_folder(folder)


def _of_folder(folder: Path) -> Size:
    """What the `config.json` files of a pipeline say; its weights are not read."""
    index = _json(folder / "model_index.json")
    family = FAMILIES.get(index["_class_name"])
    if family is None:
        raise UserError(
            f"{folder} is a {index['_class_name']}, whose memory cannot be planned: expected one "
            f"of {', '.join(FAMILIES)}"
        )
    transformer, vae = (_json(folder / part / "config.json") for part in ("transformer", "vae"))
    blocks = vae.get("block_out_channels") or vae["encoder_block_out_channels"]
    factor, channels = 2 ** (len(blocks) - 1), vae["latent_channels"]
    native = vae["sample_size"] // factor if family == "flux" else transformer["sample_size"]
    width = transformer["caption_channels" if family == "sana" else "joint_attention_dim"]
    return Size(
        family=family,
        pipeline=index["_class_name"],
        checkpoint=str(folder),
        transformer=index["transformer"][1],
        config=_public(transformer),
        autoencoder=index["vae"][1],
        autoencoder_config=_public(vae),
        autoencoder_params=_parameters(index["vae"][1], _public(vae)),
        scheduler=index["scheduler"][1],
        scheduler_config=_public(_json(folder / "scheduler" / "scheduler_config.json")),
        text_encoders=tuple(_encoders(folder, index)),
        channels=channels,
        factor=factor,
        text_tokens=text_tokens(family, 300 if family == "sana" else 256),
        text_width=width,
        pooled_width=transformer.get("pooled_projection_dim"),
        billions=_parameters(index["transformer"][1], _public(transformer)) / 1e9,
        pixels=native * factor,
    )


def text_tokens(family: str, longest: int) -> int:
    """What the transformer attends to where the longest text has so many tokens."""
    return longest + (CLIP_TOKENS if family == "sd3" else 0)


def own_pixels(size: Size) -> int:
    """An image's side where nothing is asked for: the pipeline's own."""
    if "sample_size" in size.config:
        return size.config["sample_size"] * size.factor
    return size.autoencoder_config["sample_size"]


def _encoders(folder: Path, index: dict[str, Any]) -> list[TextEncoder]:
    import transformers

    found = []
    for name, (library, made) in ((n, v) for n, v in index.items() if n.startswith("text_encoder")):
        if library is None:
            continue
        config = _json(folder / name / "config.json")
        kind = type(transformers.CONFIG_MAPPING[config["model_type"]]())
        # CLIP's text part has a configuration of its own.
        config_class = "CLIPTextConfig" if made.startswith("CLIP") else kind.__name__
        own = {key: value for key, value in config.items() if key not in OWN}
        with torch.device("meta"):
            network = getattr(transformers, made)(getattr(transformers, config_class)(**own))
        if made.startswith("CLIP"):
            own["max_position_embeddings"] = CLIP_TOKENS  # no more than that are counted anywhere
        found.append(
            TextEncoder(
                name=name,
                model=made,
                config_class=config_class,
                config=own,
                parameters=sum(p.numel() for p in network.parameters()),
                wide=keep_wide(network),
            )
        )
    return found


def _parameters(made: str, config: dict[str, Any]) -> int:
    import diffusers

    with torch.device("meta"):
        network = getattr(diffusers, made)(**config)
    return sum(p.numel() for p in network.parameters())


def _public(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("_")}


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


# --- What rewards take of a GPU's memory -------------------------------------------------------

# Numbers in the networks, by building them from their configurations on the meta device, except
# where a source is named.
CLIP_L = 427_616_513  # openai/clip-vit-large-patch14
CLIP_H = 986_109_441  # laion/CLIP-ViT-H-14-laion2B-s32B-b79K, and its descendants
WEIGHTS: Mapping[str, int] = {
    "pickscore": CLIP_H,
    "clipscore": CLIP_L,
    "aesthetic": CLIP_L,
    "hpsv2": CLIP_H,
    "imagereward": 447_000_000,  # its file of 1.79 GB in fp32
}
HPSV3 = 8_290_000_000  # Qwen2-VL-7B, whose numbers are in bf16
DETECTORS: Mapping[str, int] = {
    "mask2former": 68_741_083,  # facebook/mask2former-swin-small-coco-instance
    "owlv2": 154_966_792,  # google/owlv2-base-patch16-ensemble
    "grounding_dino": 233_000_000,  # IDEA-Research/grounding-dino-base, as its card rounds it
}
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def reward_bytes(entry: RewardSection) -> int | None:
    """Bytes of weights on each process's GPU; None for one's own reward, which nobody knows.

    0 for what is computed on the CPU or by a server. Every entry has weights of its own, and so has
    every process of a pool. What a network needs beside its weights, for one image at a time, is
    small against a transformer's training.
    """
    if isinstance(entry.executor, HTTPOptions) or entry.args.get("device") == "cpu":
        return 0
    workers = entry.executor.workers if isinstance(entry.executor, PoolOptions) else 1
    found = _weights(entry.name, entry.args)
    return None if found is None else found * workers


def _weights(name: str, args: Mapping[str, Any]) -> int | None:
    if ":" in name:
        return None
    if name == "hpsv3":
        return HPSV3 * 2
    if name == "geneval":
        return _geneval(args)
    if name in ("similarity", "diversity"):
        clip = str(args.get("measure", "")).startswith("clip")
        return CLIP_L * ITEMSIZE[args.get("dtype", "fp32")] if clip else 0
    return WEIGHTS.get(name, 0) * ITEMSIZE[args.get("dtype", "fp32")]


def _geneval(args: Mapping[str, Any]) -> int | None:
    detector, colors = args.get("detector", "tiny"), args.get("colors")
    if ":" in detector or (colors and ":" in colors):
        return None
    found = DETECTORS.get(detector, 0) * _size_of(args.get("detector_args"))
    return found + (CLIP_L * _size_of(args.get("colors_args")) if colors == "clip" else 0)


def _size_of(args: Mapping[str, Any] | None) -> int:
    """Bytes of a number; 0 for networks that are kept on the CPU."""
    args = args or {}
    return 0 if args.get("device") == "cpu" else ITEMSIZE[args.get("dtype", "fp32")]


def compares_groups(entry: RewardSection) -> bool:
    """Whether the reward compares all images of a prompt, as far as it says so here."""
    return getattr(tell(entry).reward, "scope", "sample") == "group"


# --- How many images, forwards and updates a recipe asks for, before anything is drawn -------

AGAIN = ("refl", "draft_lv", "srpo")  # compute the network's answer once more on the way back
UNGUIDED = ("flux",)  # guidance is an input there, and costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """Of all GPUs. Forwards are those of single images; guidance counts twice where it doubles.

    images: that are learned from; candidates: that are explored. exploring, drawing: forwards
    without graph. learning: forwards with one, each with a backward; again: computed once more
    for it, by checkpointing or where a group is larger than a micro-batch; beside: of the
    reference and the lagging policy. updates: optimiser steps. Learning is the most there can be:
    images that teach nothing are left out.
    """

    images: int = 0
    candidates: int = 0
    exploring: int = 0
    drawing: int = 0
    learning: int = 0
    again: int = 0
    beside: int = 0
    updates: int = 0

    def plus(self, other: "UpdateWork", times: int = 1) -> "UpdateWork":
        names = (f.name for f in fields(self))
        return UpdateWork(**{n: getattr(self, n) + times * getattr(other, n) for n in names})

    @property
    def forwards(self) -> int:
        return self.exploring + self.drawing + self.learning + self.again + self.beside


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKind:
    """What some iterations draw, and explore before it, if anything; and what that asks for."""

    plan: TreePlan
    candidates: TreePlan | None
    load: IterationWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """kinds: of iterations that hold different numbers of latents, the first one's first. loads:
    how many iterations ask for each; work: of all of them, audits among exploring; evaluation:
    forwards of one, and evaluations: their number."""

    kinds: tuple[PromptKind, ...]
    loads: Mapping[IterationWork, int]
    first: UpdateWork
    work: UpdateWork
    evaluation: int
    evaluations: int


def doubles(config: Config, guidance: float) -> bool:
    """Whether guidance takes a forward with the negative prompt beside each."""
    return config.pipeline.backbone not in UNGUIDED and guidance > 1


def draws_nothing(config: Config) -> bool:
    """Whether all groups are read from a store."""
    store = config.rollout.store
    return store is not None and store.path is not None and store.refresh_every is None


def count_run(config: Config, needs: Needs, *, whole_groups: bool, whole_trained: bool) -> RunWork:
    """The work of a whole run, whose trees may change from iteration to iteration."""
    r, seed = config.rollout, config.run.seed
    found: Counter[IterationWork] = Counter()
    known: dict = {}
    kinds: dict = {}
    for iteration in range(config.run.iterations):
        plan = r.plan(iteration, seed)
        candidates = None if r.explore is None else r.candidates(iteration, seed)
        if (plan, candidates) not in known:
            known[plan, candidates] = build_load(
                config, needs, plan, whole_groups=whole_groups, whole_trained=whole_trained,
                candidates=candidates,
            )  # fmt: skip
            kind = PromptKind(plan=plan, candidates=candidates, load=known[plan, candidates])
            kinds.setdefault((kind.load, count(plan), candidates and count(candidates)), kind)
        found[known[plan, candidates]] += 1
    work = UpdateWork()
    for load, times in found.items():
        work = work.plus(work_of(config, needs, load), times)
    return RunWork(
        kinds=tuple(kinds.values()),
        loads=found,
        first=work_of(config, needs, next(iter(found))),
        work=work.plus(_audits(config)),
        evaluation=evaluation_forwards(config),
        evaluations=_evaluations(config),
    )


def work_of(config: Config, needs: Needs, load: IterationWork) -> UpdateWork:
    """Of one iteration."""
    r, objective = config.rollout, config.objective
    training = r.guidance if r.training_guidance is None else r.training_guidance
    twice = 0 if draws_nothing(config) else 1 + doubles(config, r.guidance)
    rows = load.prompts * min(load.roots * load.rows, load.group_rows or load.roots * load.rows)
    learning = rows * load.row_forwards * (1 + doubles(config, training))
    checkpoints = config.memory.gradient_checkpointing + (objective.kind in AGAIN)
    return UpdateWork(
        images=load.prompts * load.roots * load.leaves,
        candidates=load.prompts * load.candidates * load.candidate_leaves,
        exploring=load.prompts * load.candidates * load.candidate_forwards * twice,
        drawing=load.prompts * load.roots * load.forwards * twice,
        learning=learning,
        again=learning * (checkpoints + _cut(load)),
        beside=learning * (needs.reference + (needs.old is not None)),
        updates=load.updates,
    )


def _cut(load: IterationWork) -> bool:
    """Whether what is compared is larger than a micro-batch, hence forwarded once more."""
    rows = load.roots * load.rows
    group = min(rows, load.group_rows or rows)
    groups = load.prompts // load.updates if load.together == "update" else 1
    largest = max(micro_batches(load, [group] * groups))
    return load.together != "image" and largest * load.row_forwards > load.micro_batch


def _audits(config: Config) -> UpdateWork:
    """Candidates that are drawn exactly to see whether the cheap ones rank as they do."""
    e, r = config.rollout.explore, config.rollout
    if e is None or not e.audit.every:
        return UpdateWork()
    times = -(-config.run.iterations // e.audit.every)
    plan = r.plan(0, config.run.seed)
    forwards = count(plan).forwards // plan.roots * (1 + doubles(config, r.guidance))
    drawn = times * e.audit.prompts * e.candidates
    return UpdateWork(exploring=drawn * forwards)


def evaluation_forwards(config: Config) -> int:
    """Of one evaluation, at most: paraphrases are drawn once more. 0 where there is none."""
    e = config.evaluation
    if e.prompts is None:
        return 0
    return e.images * e.steps * (1 + doubles(config, e.guidance)) * (1 + e.paraphrases)


def _evaluations(config: Config) -> int:
    """Before the first iteration, every so many, and after the last."""
    e = config.evaluation
    if e.prompts is None:
        return 0
    return 2 + ((config.run.iterations - 1) // e.every if e.every else 0)


# --- From options to what decides a GPU's memory: `flowrl.planning` knows no configuration -----

ENCODED = 64  # texts that are encoded at once, at most


def build_setup(
    config: Config,
    size: Size,
    needs: Needs,
    geometry: WorkSplit,
    plan: TreePlan,
    candidates: TreePlan | None,
) -> Setup:
    """Of the GPU that has most to do, in iterations that draw `plan` and explore `candidates`.

    Raises UserError for an adapter that the network has no layers for.
    """
    p, r, m, e = config.pipeline, config.rollout, config.memory, config.evaluation
    share, load = max(geometry.shares, key=lambda s: s.trees), geometry.load
    rows = max(max(s.rows) for s in geometry.shares) * load.row_forwards
    side = own_pixels(size)
    training = r.guidance if r.training_guidance is None else r.training_guidance
    images = -(-e.images // geometry.gpus) if e.prompts is not None else 0
    return Setup(
        dtype=p.dtype,
        base_bits=m.base_bits,
        base_library=m.base_library,
        height=p.height or side,
        width=p.width or side,
        text_tokens=text_tokens(size.family, p.max_sequence_length),
        rank=config.lora.rank,
        targets=_targets(config, size),
        adapters=1 + (config.ema.decay is not None) + (needs.old is not None),
        gradient_checkpointing=m.gradient_checkpointing,
        rollout_batch=r.batch_size,
        micro_batch=min(config.optim.micro_batch, max(rows, 1)),
        decode_batch=p.decode_batch,
        evaluation_batch=min(e.batch_size, images),
        evaluation_steps=e.steps,
        encode_batch=ENCODED,
        rollout_doubles=doubles(config, r.guidance),
        training_doubles=doubles(config, training),
        evaluation_doubles=doubles(config, e.guidance),
        reference=needs.reference or needs.old is not None,
        plan=plan,
        prompts_per_gpu=max(1, -(-share.trees // load.roots)),
        candidates=candidates,
        copies=_copies(config),
        training_copy=_training_copy(config),
        merged=_merged(config),
        text_encoders=m.text_encoders,
        vae=m.vae,
        reward_bytes=sum(reward_bytes(entry) or 0 for entry in config.rewards),
    )


def _targets(config: Config, size: Size) -> tuple[str, ...]:
    lora = config.lora
    own: Any = backbone_class(config.pipeline.backbone)
    targets = tuple(lora.targets or getattr(own, "lora_targets", ()))
    if not targets:
        raise UserError(
            f"pipeline.backbone {config.pipeline.backbone!r} does not say which layers it adapts "
            "before it is made: set lora.targets, or make lora_targets an attribute of its class"
        )
    if not lora.dual_attention:
        return targets
    return targets + dual_targets(size.transformer, size.config)


def _copies(config: Config) -> tuple[Copy, ...]:
    """Networks beside the policy's own: a compiled one, and that of candidates."""
    r, e, found = config.rollout, config.rollout.explore, []
    merged = _merged(config)
    if r.compile:
        found.append(Copy(format="bf16", merge=merged))
    if e is not None:
        folds = e.lora == "merge" and _foldable(config)
        if e.precision != "bf16" or folds != merged:
            found.append(
                Copy(
                    format=e.precision,
                    merge=e.lora == "merge",
                    min_dim=e.min_dim,
                    keep=None if e.keep_layers is None else tuple(e.keep_layers),
                )
            )
    return tuple(found)


def _training_copy(config: Config) -> Copy | None:
    p = config.pipeline
    if p.precision in (None, "bf16"):
        return None
    keep = None if p.keep_layers is None else tuple(p.keep_layers)
    # The larger of what auto may be: bf16 keeps nothing beside the weights.
    format = "fp8" if p.precision == "auto" else p.precision
    return Copy(format=format, merge=False, min_dim=p.min_dim, keep=keep)


def _foldable(config: Config) -> bool:
    """As `Drawing.foldable` of `flowrl.build.rollout` finds it of the network itself."""
    return config.pipeline.precision is None and config.memory.base_bits is None


def _merged(config: Config) -> bool:
    wanted = config.rollout.merge_lora
    if wanted == "auto":
        return config.pipeline.dtype == "fp32" and _foldable(config)
    return bool(wanted)


# --- A recipe before it is run: who does what, how much work it is, and whether it fits --------

UNITS = {"M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {"MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """geometry: of the first iteration. transitions: it learns from nodes of trees, not from
    images. phases: of the GPU that has most to do, in the iterations that need most; none where
    the pipeline's shapes are not known, and then `unknown` says why. memory: bytes of a GPU, None
    where nobody named any. remedies: where it does not fit. notes: what was assumed or left out.
    """

    geometry: WorkSplit
    transitions: bool
    work: RunWork
    phases: tuple[Footprint, ...]
    unknown: str
    memory: int | None
    remedies: Remedies | None
    notes: tuple[str, ...]

    @property
    def peak(self) -> Footprint | None:
        """The phase that needs most."""
        return peak(list(self.phases)) if self.phases else None

    @property
    def fits(self) -> bool | None:
        """None where it is not known, or nobody asked."""
        if self.peak is None or self.memory is None:
            return None
        return self.peak.total <= self.memory


def make_plan(config: Config, *, gpus: int = 1, memory: int | None = None) -> Plan:
    """memory: bytes of each GPU. Raises UserError where an iteration cannot be dealt to so many."""
    needs = build_objective(config.objective, KERNELS[config.rollout.kernel]).needs
    work = count_work(config, needs)
    shares = [solve(load, gpus) for load in work.loads]
    geometry = shares[0]
    size, unknown = _size(config)
    phases: tuple[Footprint, ...] = ()
    remedies = None
    if size is not None:
        phases = _phases(config, size, needs, work.kinds, gpus)
        if memory is not None and peak(list(phases)).total > memory:
            remedies = find_remedies(
                config, lambda c: peak(list(_phases(c, size, needs, work.kinds, gpus))), memory
            )
    return Plan(
        geometry=geometry,
        transitions=needs.states == "transitions",
        work=work,
        phases=phases,
        unknown=unknown,
        memory=memory,
        remedies=remedies,
        notes=tuple(_notes(config, needs)),
    )


def count_work(config: Config, needs: Needs) -> RunWork:
    """See `flowrl.planning.plan`."""
    groups = [(entry, compares_groups(entry)) for entry in config.rewards]
    return count_run(
        config,
        needs,
        whole_groups=any(group for _, group in groups),
        whole_trained=any(group and entry.weight and not entry.held_out for entry, group in groups),
    )


def _phases(
    config: Config, size: Size, needs: Needs, kinds: Sequence[PromptKind], gpus: int
) -> tuple[Footprint, ...]:
    """Of each phase, the iteration that needs most. kinds: of this recipe, or of one that differs
    in nothing that changes them but optim.micro_batch."""
    found: dict[str, Footprint] = {}
    for kind in kinds:
        geometry = solve(replace(kind.load, micro_batch=config.optim.micro_batch), gpus)
        setup = build_setup(config, size, needs, geometry, kind.plan, kind.candidates)
        for one in footprints(size, setup):
            found[one.phase] = peak([found.get(one.phase, one), one])
    return tuple(found.values())


def _size(config: Config) -> tuple[Size | None, str]:
    """The pipeline's shapes, or why nobody knows them. Raises UserError for another family's."""
    path, family = config.pipeline.path, config.pipeline.backbone
    try:
        size = size_for(path)
    except UserError as error:
        return None, str(error)
    if ":" not in family and size.family != family:
        raise UserError(
            f"pipeline.path is {path}, of the family {size.family}, but pipeline.backbone is "
            f"{family}: set both alike"
        )
    return size, ""


def _notes(config: Config, needs: Needs) -> Sequence[str]:
    found = []
    unknown = [e.label or e.name for e in config.rewards if reward_bytes(e) is None]
    if unknown:
        found.append(f"The weights of {', '.join(unknown)} are not counted: nobody knows them.")
    explore = config.rollout.explore
    if "auto" in (config.pipeline.precision, explore and explore.precision):
        found.append(f"precision auto is counted as the larger of {' and '.join(AUTO)}.")
    if needs.reward_grad:
        found.append("The gradient through the decoder and the reward is not counted.")
    store = config.rollout.store
    if store is not None and store.path is not None:
        found.append("Groups come from a store; the rollout's memory is that of drawing them.")
    return found


def parse_memory(text: str) -> int:
    """ "24GB", "80G" (10^9 bytes) or "24GiB" (2^30) -> bytes. Raises UserError for other text.

    GPUs sold with 24 GB have some more than 24 * 10^9 bytes, of which their driver keeps a part.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper().removesuffix("B") if match else None
    if match is None or unit is None or unit not in UNITS | BINARY or not float(match[1]):
        raise UserError(f"--memory is {text!r}, expected a size such as 24GB, 80G or 24GiB")
    return int(float(match[1]) * (UNITS | BINARY)[unit])


def memory_class(name: str) -> int | None:
    """Of the GPUs that a recipe says in its name it is for: "...-24gb"; None where it does not."""
    match = re.search(r"-([0-9]+)gb$", name.removesuffix(".yaml").lower())
    return int(match[1]) * UNITS["G"] if match else None
