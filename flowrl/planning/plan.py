"""A recipe before it is run: who does what, how much work it is, and whether it fits.

Nothing is loaded, downloaded or allocated: networks are built on the meta device.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from flowrl.assembly.work_split import (
    IterationWork,
    WorkSplit,
    iteration_work,
    micro_batches,
    split_work,
)
from flowrl.backbones.families import family_of, lora_targets
from flowrl.backbones.loading import DTYPES
from flowrl.backbones.text_cache import CAPACITY
from flowrl.config import Config
from flowrl.config.load import find_recipe
from flowrl.config.rewards import HTTPOptions, PoolOptions, RewardOptions
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.planning.activations import Uncountable
from flowrl.planning.dry_run import inspect_reward
from flowrl.planning.duration import (
    Duration,
    decode_operations,
    forward_operations,
    known_rate,
    measured_rate,
)
from flowrl.planning.memory import (
    AUTO,
    Footprint,
    MemorySetup,
    NetworkCopy,
    footprints,
    full_network,
    host_bytes,
    peak,
)
from flowrl.planning.model_specs import ModelSpec, spec_for
from flowrl.trees.plan import TreePlan, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe asks of its GPUs."""

    geometry: WorkSplit  # of the first iteration
    transitions: bool  # it learns from nodes of trees, not from images
    work: "RunWork"
    phases: tuple[Footprint, ...]  # of the busiest GPU in the largest iterations; () if unknown
    unknown: str  # why the pipeline's shapes are not known, else ""
    memory: int | None  # bytes of a GPU, None where nobody named any
    host: Mapping[str, int]  # bytes of a machine's own memory, for all processes; {} if unknown
    advice: tuple[str, ...]  # what to change where it does not fit: KEY=VALUE (what it costs)
    duration: Duration | None  # None where the pipeline's shapes are not known
    notes: tuple[str, ...]  # what was assumed or left out

    @property
    def peak(self) -> Footprint | None:
        """Return the phase that needs most."""
        return peak(list(self.phases)) if self.phases else None

    @property
    def fits(self) -> bool | None:
        """Return None where it is not known, or nobody asked."""
        if self.peak is None or self.memory is None:
            return None
        return self.peak.total <= self.memory


def make_plan(
    config: Config, *, gpus: int = 1, memory: int | None = None, measure: bool = False
) -> Plan:
    """Plan a recipe on GPUs of `memory` bytes. Raises UserError if they cannot split its work.

    measure: time a step on this machine, where its rate is not known.
    """
    work = count_work(config)
    split = [split_work(load, gpus) for load in work.loads][0]
    spec, unknown = _spec(config)
    phases: tuple[Footprint, ...] = ()
    if spec is not None:
        try:
            phases = _phases(config, spec, work, gpus)
        except Uncountable as error:
            spec, unknown = None, str(error)
    advice: list[str] = []
    if phases and memory is not None and peak(list(phases)).total > memory:
        advice = _advice(config, peak(list(phases)).phase)
    return Plan(
        geometry=split,
        transitions=work.needs.states == "transitions",
        work=work,
        phases=phases,
        unknown=unknown,
        memory=memory,
        host={} if spec is None else _host(config, spec, work, gpus),
        advice=tuple(advice),
        duration=None if spec is None else _duration(config, spec, work, gpus, measure),
        notes=tuple(_notes(config, work.needs)),
    )


def _host(config: Config, spec: ModelSpec, work: "RunWork", gpus: int) -> dict[str, int]:
    kind = work.kinds[0]
    split = split_work(kind.load, gpus)
    return host_bytes(spec, build_setup(config, spec, work.needs, split, kind), gpus)


def _duration(
    config: Config, spec: ModelSpec, work: "RunWork", gpus: int, measure: bool
) -> Duration:
    """Count the operations of transformer and decoder, and time them where a rate is known.

    A backward pass through frozen weights computes the gradients of activations alone, which takes
    as many operations as a forward pass.
    """
    kind = work.kinds[0]
    setup = build_setup(config, spec, work.needs, split_work(kind.load, gpus), kind)
    image = forward_operations(spec, setup)
    decoding = decode_operations(spec, setup)

    def of(load: UpdateWork) -> float:
        forwards = load.previews + load.sampling + 2 * load.training
        forwards += load.recomputed + load.reference
        return image * forwards + decoding * (load.images + load.candidates)

    e, ends = config.evaluation, min(work.evaluations, 2)
    between = work.evaluations - ends
    decoded = e.num_images * (ends * len(e.step_counts) + between)
    forwards = ends * work.evaluation + between * work.between
    rate, name = measured_rate(setup.torch_dtype) if measure else known_rate()
    return Duration(
        iteration=of(work.first),
        run=of(work.total) + image * forwards + decoding * decoded * bool(ends),
        gpus=gpus,
        rate=rate,
        rate_of=name,
    )


def _spec(config: Config) -> tuple[ModelSpec | None, str]:
    """Return the pipeline's shapes, or why they are not known."""
    try:
        return spec_for(config.pipeline.path, config.pipeline.revision), ""
    except UserError as error:
        return None, str(error)


def _advice(config: Config, phase: str) -> list[str]:
    """Return changes that lower a phase's memory, from what costs least.

    Images stay the same; only fewer bits change the policy's numbers.
    """
    m, p, r = config.memory, config.pipeline, config.rollout
    training, decoding = phase == "training", phase in ("decode", "evaluation")
    sampling = phase in ("rollout", "evaluation")
    changes = [
        (training and not m.gradient_checkpointing,
         "memory.gradient_checkpointing=true (one more forward for each backward)"),
        (training and config.optim.micro_batch > 1,
         "optim.micro_batch=1 (slower; with rollout.batch_size=1 in fp32)"),
        (sampling and r.batch_size > 1,
         "rollout.batch_size=1 evaluation.batch_size=1 (slower)"),
        (decoding and p.decode_batch > 1, "pipeline.decode_batch=1 (slower)"),
        (decoding and not m.vae_tiling,
         "memory.vae_tiling=true (slightly different images, above 512 pixels a side)"),
        (m.text_encoders == "keep",
         "memory.text_encoders=offload (all prompts are encoded first)"),
        (m.vae == "keep", "memory.vae=offload (the autoencoder is moved for every decoding)"),
        (p.dtype == "fp32", "pipeline.dtype=bf16 (half the bytes, rounded)"),
        (m.base_bits is None and p.precision is None,
         "memory.base_bits=4 (frozen weights in 4 bits, slightly different images)"),
        (config.runtime.shard is None,
         "runtime.shard=node with --gpus N (the GPUs share one copy of the transformer)"),
        (phase != "encode", "pipeline.height, pipeline.width (smaller images)"),
    ]  # fmt: skip
    return [text for applies, text in changes if applies]


def _phases(config: Config, spec: ModelSpec, work: "RunWork", gpus: int) -> tuple[Footprint, ...]:
    """Return for each phase the iteration that needs most.

    work: of this recipe, or of one that differs in nothing that changes it but optim.micro_batch.
    """
    found: dict[str, Footprint] = {}
    for kind in work.kinds:
        split = split_work(replace(kind.load, micro_batch=config.optim.micro_batch), gpus)
        for one in footprints(spec, build_setup(config, spec, work.needs, split, kind)):
            found[one.phase] = peak([found.get(one.phase, one), one])
    return tuple(found.values())


def _notes(config: Config, needs: Needs) -> Iterator[str]:
    if config.runtime.shard == "node":
        yield "All GPUs are counted as those of one machine, which share its copy."
    unknown = [e.label or e.name for e in config.rewards if reward_networks(e) is None]
    if unknown:
        yield f"The weights of {', '.join(unknown)} are not counted: nobody knows them."
    apart = sum(rewards_bytes([entry]) for entry in config.rewards)
    if saved := apart - rewards_bytes(config.rewards):
        yield f"Rewards share equal networks, which saves {saved / 2**30:.1f} GiB."
    explore, store = config.rollout.explore, config.rollout.store
    if "auto" in (config.pipeline.precision, explore and explore.precision):
        yield f"precision auto is counted as the larger of {' and '.join(AUTO)}."
    if needs.reward_grad:
        yield "The gradient through the decoder and the reward is not counted."
    if store is not None:
        yield "Groups come from a store; the rollout's memory is that of generating them."


UNITS = {"M": 10**6, "G": 10**9, "T": 10**12, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_memory(text: str) -> int:
    """Return the bytes of "24GB", "24" (10^9 bytes each) or "24GiB" (2^30).

    GPUs sold with 24 GB have some more than 24 * 10^9 bytes, of which their driver keeps a part.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = (match[2].upper().removesuffix("B") or "G") if match else ""
    if match is None or unit not in UNITS or not float(match[1]):
        raise UserError(f"--memory is {text!r}, expected a size such as 24GB, 80G or 24GiB")
    return int(float(match[1]) * UNITS[unit])


def memory_class(name: str) -> int | None:
    """Return the bytes of a GPU that a recipe's name ends in, as in "-24gb"; None without one."""
    match = re.search(r"-([0-9]+)gb$", name.removesuffix(".yaml").lower())
    return int(match[1]) * UNITS["G"] if match else None


def gpus_of(recipe: str) -> int:
    """Return how many GPUs the head of a recipe's file is for; 1 where it does not say."""
    head = find_recipe(recipe).read_text(encoding="utf-8")
    match = re.search(r"^# Hardware: ([0-9]+) GPU", head, re.MULTILINE)
    return int(match[1]) if match else 1


# --- how many images, forwards and updates ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """Work of all GPUs. Forwards are those of single images, doubled by guidance.

    Training is the most there can be: images that teach nothing are left out.
    """

    images: int = 0  # that are learned from
    candidates: int = 0
    previews: int = 0  # forwards without a graph, of candidates
    sampling: int = 0  # forwards without a graph, of images
    training: int = 0  # forwards with a graph, each with a backward
    recomputed: int = 0  # once more, by checkpointing or where a group exceeds a micro-batch
    reference: int = 0  # forwards of the reference and the old policy
    updates: int = 0  # optimiser steps

    def plus(self, other: "UpdateWork", times: int = 1) -> "UpdateWork":
        names = (f.name for f in fields(self))
        return UpdateWork(**{n: getattr(self, n) + times * getattr(other, n) for n in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationKind:
    """Iterations that sample trees of one plan, after previews of `candidates`, if any."""

    plan: TreePlan
    candidates: TreePlan | None
    load: IterationWork


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """The work of a run, whose trees may change from iteration to iteration."""

    needs: Needs
    kinds: tuple[IterationKind, ...]  # iterations with different numbers of latents, first first
    loads: Mapping[IterationWork, int]  # how many iterations ask for each
    first: UpdateWork  # of the first iteration
    total: UpdateWork  # of all iterations, audits among the previews
    evaluation: int  # forwards of one evaluation, at most
    between: int  # the same of one between the first and the last, at one number of steps
    evaluations: int


def count_work(config: Config) -> RunWork:
    """Count the work of a whole run."""
    r, e = config.rollout, config.evaluation
    needs = config.objective.build(r.kernel).needs
    scopes = [getattr(inspect_reward(e).reward, "scope", "sample") for e in config.rewards]
    groups = [e for e, scope in zip(config.rewards, scopes, strict=True) if scope == "group"]
    whole_trained = any(entry.trained for entry in groups)
    loads: Counter[IterationWork] = Counter()
    known: dict[tuple[TreePlan, TreePlan | None], IterationWork] = {}
    kinds: dict[tuple, IterationKind] = {}
    iterations = config.planned_iterations()
    for iteration in iterations:
        plan = r.plan(iteration, config.run.seed)
        candidates = None if r.explore is None else r.candidates(iteration, config.run.seed)
        if (plan, candidates) not in known:
            load = known[plan, candidates] = iteration_work(
                config, needs, plan, whole_groups=bool(groups), whole_trained=whole_trained,
                candidates=candidates,
            )  # fmt: skip
            kind = IterationKind(plan=plan, candidates=candidates, load=load)
            kinds.setdefault((load, count(plan), candidates and count(candidates)), kind)
        loads[known[plan, candidates]] += 1
    total = UpdateWork(previews=_audit_forwards(config))
    for load, times in loads.items():
        times = times * config.run.iterations // len(iterations)  # longer runs go on like this
        total = total.plus(_iteration_work(config, needs, load), times)
    evaluation = between = evaluations = 0
    if config.held_out:  # before the first iteration, every so many, and after the last
        evaluations = 2 + ((config.run.iterations - 1) // e.every if e.every else 0)
        forwards = e.num_images * (1 + e.paraphrases) * (1 + doubles(config, e.guidance_scale))
        evaluation, between = forwards * sum(e.step_counts), forwards * e.step_counts[0]
    return RunWork(
        needs=needs,
        kinds=tuple(kinds.values()),
        loads=loads,
        first=_iteration_work(config, needs, next(iter(loads))),
        total=total,
        evaluation=evaluation,
        between=between,
        evaluations=evaluations,
    )


def doubles(config: Config, guidance: float) -> bool:
    """Return whether guidance takes a forward with the negative prompt beside each."""
    off = family_of(class_of(config)).unguided
    return off is not None and guidance > off


@lru_cache(maxsize=32)
def _class_at(path: str, revision: str | None) -> str:
    try:
        return spec_for(path, revision).pipeline
    except UserError:
        return ""


def class_of(config: Config) -> str:
    """Return the pipeline's class; an empty string where it is not on this machine."""
    return _class_at(config.pipeline.path, config.pipeline.revision)


def _training_doubles(config: Config) -> bool:
    r = config.rollout
    scale = r.guidance_scale if r.training_guidance_scale is None else r.training_guidance_scale
    return doubles(config, scale)


def _iteration_work(config: Config, needs: Needs, load: IterationWork) -> UpdateWork:
    r = config.rollout
    per_image = 1 + doubles(config, r.guidance_scale) if r.store is None else 0
    rows = load.prompts * min(load.roots * load.rows, load.group_rows or load.roots * load.rows)
    training = rows * load.row_forwards * (1 + _training_doubles(config))
    again = config.memory.gradient_checkpointing + config.objective.recomputes
    return UpdateWork(
        images=load.prompts * load.roots * load.leaves,
        candidates=load.prompts * load.candidates * load.candidate_leaves,
        previews=load.prompts * load.candidates * load.candidate_forwards * per_image,
        sampling=load.prompts * load.roots * load.forwards * per_image,
        training=training,
        recomputed=training * (again + _exceeds_micro_batch(load)),
        reference=training * (needs.reference + (needs.old is not None)),
        updates=load.updates,
    )


def _exceeds_micro_batch(load: IterationWork) -> bool:
    """Return whether images that are compared do not fit one micro-batch: then they run twice."""
    rows = load.roots * load.rows
    group = min(rows, load.group_rows or rows)
    groups = load.prompts // load.updates if load.together == "update" else 1
    largest = max(micro_batches(load, [group] * groups))
    return load.together != "image" and largest * load.row_forwards > load.micro_batch


def _audit_forwards(config: Config) -> int:
    """Return the forwards of candidates that are sampled exactly to compare their ranking."""
    r, explore = config.rollout, config.rollout.explore
    if explore is None or not explore.audit.every:
        return 0
    times = -(-config.run.iterations // explore.audit.every)
    plan = r.plan(0, config.run.seed)
    forwards = count(plan).forwards // plan.roots * (1 + doubles(config, r.guidance_scale))
    return times * explore.audit.prompts * explore.candidates * forwards


# --- from options to what decides a GPU's memory ------------------------------------------------


def build_setup(
    config: Config, spec: ModelSpec, needs: Needs, split: WorkSplit, kind: IterationKind
) -> MemorySetup:
    """Return the busiest GPU's setup. Raises UserError where no layers are named to adapt."""
    p, r, m, e = config.pipeline, config.rollout, config.memory, config.evaluation
    share, load = max(split.shares, key=lambda s: s.trees), split.load
    rows = max(max(s.rows) for s in split.shares) * load.row_forwards
    evaluated = -(-e.num_images // split.gpus) if config.held_out else 0
    return MemorySetup(
        dtype=p.dtype,
        base_bits=m.base_bits,
        base_library=m.base_library,
        height=p.height or spec.native_pixels,
        width=p.width or spec.native_pixels,
        text_tokens=p.max_sequence_length,
        rank=config.lora.rank,
        targets=_targets(config, spec),
        adapters=1 + (config.ema.decay is not None) + (needs.old is not None),
        gradient_checkpointing=m.gradient_checkpointing,
        rollout_batch=r.batch_size,
        micro_batch=min(config.optim.micro_batch, max(rows, 1)),
        decode_batch=p.decode_batch,
        evaluation_batch=min(e.batch_size, evaluated),
        evaluation_steps=max(e.step_counts),
        evaluation_height=e.height,
        evaluation_width=e.width,
        rollout_doubles=doubles(config, r.guidance_scale),
        training_doubles=_training_doubles(config),
        evaluation_doubles=doubles(config, e.guidance_scale),
        reference=needs.reference or needs.old is not None,
        plan=kind.plan,
        prompts_per_gpu=max(1, -(-share.trees // load.roots)),
        candidates=kind.candidates,
        **_copies(config),
        text_encoders=m.text_encoders,
        vae=m.vae,
        vae_tiling=m.vae_tiling,
        evaluation_encodes=e.as_deployed and e.prompts is not None,
        prompts=_prompts_in_memory(config),
        **_reward_memory(config.rewards),
        parts=1 if config.runtime.shard is None else split.gpus,
    )


def _reward_memory(entries: Sequence[RewardOptions]) -> dict[str, Any]:
    """Return the setup's bytes of rewards."""
    return {
        "reward_bytes": rewards_bytes(entries),
        "offloaded_bytes": _offloaded_bytes(entries),
        "host_reward_bytes": host_rewards_bytes(entries),
    }


def _prompts_in_memory(config: Config) -> int:
    """Return how many encoded prompts a process remembers, at most."""
    r, e, m = config.rollout, config.evaluation, config.memory
    evaluated = 0 if e.prompts is None else e.num_images * (1 + e.paraphrases)
    prompts = config.run.iterations * r.prompts_per_iteration + evaluated
    bounded = m.text_encoders == "keep" or m.prompt_cache is not None
    return min(prompts, CAPACITY) if bounded else prompts


def _targets(config: Config, spec: ModelSpec) -> tuple[str, ...]:
    lora, family = config.lora, family_of(spec.pipeline)
    network = full_network(spec, DTYPES[config.pipeline.dtype])
    return tuple(lora.targets or lora_targets(family, network))


def _copies(config: Config) -> dict[str, Any]:
    """Return the setup's `merged`, `copies` and `training_copy`."""
    p, r, e = config.pipeline, config.rollout, config.rollout.explore
    mergeable = p.precision is None and config.memory.base_bits is None
    merged = p.dtype == "fp32" and mergeable if r.merge_lora == "auto" else r.merge_lora
    copies, training_copy = [], None
    if r.compile:
        copies.append(NetworkCopy(format="bf16", merge=merged))
    if e is not None and (e.precision != "bf16" or mergeable != merged):
        copies.append(NetworkCopy(format=e.precision, min_dim=e.min_dim))
    if p.precision not in (None, "bf16"):
        # The larger of what auto may be: bf16 keeps nothing beside the weights.
        format = "fp8" if p.precision == "auto" else p.precision
        training_copy = NetworkCopy(format=format, merge=False, min_dim=p.min_dim)
    return {"merged": merged, "copies": tuple(copies), "training_copy": training_copy}


# --- memory of reward models --------------------------------------------------------------------

# Parameters, by building networks from their configurations on the meta device, except where a
# source is named.
CLIP_L = 427_616_513  # openai/clip-vit-large-patch14
CLIP_H = 986_109_441  # laion/CLIP-ViT-H-14-laion2B-s32B-b79K, and its descendants
VIT_L14 = "openai/clip-vit-large-patch14"
# Other networks that a reward's `model` may name; one that is not here counts as the reward's own.
MODELS: Mapping[str, int] = {
    VIT_L14: CLIP_L,
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": CLIP_H,
}
# The name of a reward's network, unless its args have a `model`, and its parameters.
REWARDS: Mapping[str, tuple[str, int]] = {
    "pickscore": ("yuvalkirstain/PickScore_v1", CLIP_H),
    "clipscore": (VIT_L14, CLIP_L),
    "aesthetic": (VIT_L14, CLIP_L),
    "hpsv2": ("xswu/HPSv2", CLIP_H),
    "imagereward": ("THUDM/ImageReward", 446_206_689),
}
HPSV3 = 7_748_610_610  # without the head for the next token; in bf16 unless args say otherwise
DETECTORS: Mapping[str, int] = {
    "mask2former": 68_741_083,  # facebook/mask2former-swin-small-coco-instance
    "owlv2": 154_966_792,  # google/owlv2-base-patch16-ensemble
}
Networks = dict[tuple[str, ...], int]  # bytes on a GPU, by what decides a network


def rewards_bytes(entries: Sequence[RewardOptions]) -> int:
    """Return the bytes of rewards' weights on each process's GPU, as far as they are known.

    Equal networks of one process are held once, every process of a pool has its own. What a
    network needs beside its weights, for one image at a time, is small against a transformer's
    training.
    """
    held: Networks = {}
    for number, entry in enumerate(entries):
        found = reward_networks(entry) or {}
        if isinstance(entry.executor, PoolOptions):
            others = (other for other in range(number) if entry.same_reward(entries[other]))
            place, workers = str(next(others, number)), entry.executor.workers
            found = {("pool", place, *key): size * workers for key, size in found.items()}
        held |= found
    return sum(held.values())


def _offloaded_bytes(entries: Sequence[RewardOptions]) -> int:
    """Return the bytes that no reward holds on the GPU while nothing is asked."""
    stay = [entry for entry in entries if not getattr(entry.executor, "offload", False)]
    return rewards_bytes(entries) - rewards_bytes(stay)


def host_rewards_bytes(entries: Sequence[RewardOptions]) -> int:
    """Return the same in a process's share of the machine's memory.

    That is of rewards whose device is the CPU, and of those that wait there to be asked.
    """
    here = [e for e in entries if e.args.get("device") == "cpu"]
    args = [{k: v for k, v in e.args.items() if k != "device"} for e in here]
    pairs = zip(here, args, strict=True)
    computed = rewards_bytes([e.model_copy(update={"args": own}) for e, own in pairs])
    return computed + _offloaded_bytes(entries)


def reward_networks(entry: RewardOptions) -> Networks | None:
    """Return the networks of a reward; None for one's own reward.

    Empty for what is computed on the CPU or by a server.
    """
    name, args = entry.name, entry.args
    if isinstance(entry.executor, HTTPOptions) or args.get("device") == "cpu":
        return {}
    if ":" in name:
        return None
    if name == "hpsv3":
        return _network("MizzenAI/HPSv3", HPSV3, {"dtype": "bf16"} | args)
    if name == "geneval":
        detector, colors = args.get("detector", "tiny"), args.get("colors")
        if ":" in detector or (colors and ":" in colors):
            return None
        its = args.get("detector_args") or {}
        found = _network(detector, DETECTORS.get(detector, 0), its)
        return found | (_clip_l(args.get("colors_args") or {}) if colors == "clip" else {})
    if name == "diversity":
        return _clip_l(args) if args.get("measure") == "clip" else {}
    return _network(*REWARDS[name], args) if name in REWARDS else {}


def _clip_l(args: Mapping[str, Any]) -> Networks:
    return _network(VIT_L14, CLIP_L, args)


def _network(model: str, parameters: int, args: Mapping[str, Any]) -> Networks:
    said = (args.get(key) for key in ("revision", "device", "dtype"))
    model = str(args.get("model", model))
    return {(model, *map(str, said)): MODELS.get(model, parameters) * _itemsize(args)}


def _itemsize(args: Mapping[str, Any]) -> int:
    """Return the bytes of a number; 0 for networks that are kept on the CPU."""
    return 0 if args.get("device") == "cpu" else DTYPES[args.get("dtype", "fp32")].itemsize
