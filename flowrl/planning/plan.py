"""A recipe before it is run: who does what, how much work it is, how long, and whether it fits.

Nothing is loaded, downloaded or allocated: networks are built on the meta device.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from flowrl.assembly.work_split import WorkSplit, split_work
from flowrl.backbones.loading import check_pipeline
from flowrl.config import Config
from flowrl.config.load import find_recipe
from flowrl.errors import UserError
from flowrl.objectives.base import Needs
from flowrl.planning.activations import Uncountable
from flowrl.planning.duration import Duration
from flowrl.planning.memory import AUTO, Footprint, MemoryPlan, peak, prompt_count
from flowrl.planning.model_specs import spec_for
from flowrl.planning.rewards import reward_networks
from flowrl.planning.work import IterationKind, RunWork, UpdateWork, count_work
from flowrl.prompts.sources import TINY
from flowrl.trees.plan import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe asks of its GPUs and their machine."""

    geometry: WorkSplit  # of the first iteration
    work: RunWork
    phases: tuple[Footprint, ...]  # of the busiest GPU in the largest iterations; () if unknown
    unknown: str  # why the pipeline's shapes are not known, else ""
    memory: int | None  # bytes of a GPU, None where nobody named any
    host: Mapping[str, int]  # bytes of a machine's own memory, for all processes; {} if unknown
    host_memory: int  # bytes that the machine has
    advice: tuple[str, ...]  # what to change where it does not fit: KEY=VALUE (what it costs)
    duration: Duration | None  # None where the pipeline's shapes are not known
    notes: tuple[str, ...]  # what was assumed or left out

    @property
    def peak(self) -> Footprint | None:
        """Return the phase that needs most."""
        return peak(list(self.phases)) if self.phases else None

    @property
    def fits(self) -> bool | None:
        """Return whether a GPU holds it; None where it is not known, or not compared."""
        if self.peak is None or self.memory is None:
            return None
        return self.peak.total <= self.memory

    @property
    def host_fits(self) -> bool:
        """Return whether the machine's own memory holds it, as far as it is known."""
        return sum(self.host.values()) <= self.host_memory


def make_plan(
    config: Config, *, gpus: int = 1, memory: int | None = None, host_memory: int | None = None
) -> Plan:
    """Plan a recipe on GPUs of `memory` bytes, in a machine of `host_memory` or like this one.

    Raises UserError for a pipeline that cannot be trained, or where the GPUs cannot split the
    recipe's work.
    """
    check_pipeline(config.pipeline.path, config.pipeline.revision)
    work = count_work(config)
    # Trees with equal counts need equal memory: a window that moves makes many of them.
    alike: dict[tuple, IterationKind] = {}
    for kind in work.kinds:
        counts = count(kind.plan), kind.candidates and count(kind.candidates)
        alike.setdefault((kind.load, *counts), kind)
    splits = {kind: split_work(kind.load, gpus) for kind in alike.values()}
    spec, unknown = None, ""
    try:
        spec = spec_for(config.pipeline.path, config.pipeline.revision)
    except UserError as error:
        unknown = str(error)
    phases: tuple[Footprint, ...] = ()
    host: dict[str, int] = {}
    duration = None
    if spec is not None:
        plans = [
            MemoryPlan(config=config, spec=spec, needs=work.needs, kind=kind, split=split)
            for kind, split in splits.items()
        ]
        try:
            # Of each phase the iteration that needs most.
            of_iterations = zip(*(plan.footprints() for plan in plans), strict=True)
            phases = tuple(peak(list(same)) for same in of_iterations)
            host = plans[0].host_bytes()
            duration = _duration(plans[0], work)
        except Uncountable as error:
            unknown = str(error)
    too_large = phases and memory is not None and peak(list(phases)).total > memory
    return Plan(
        geometry=next(iter(splits.values())),
        work=work,
        phases=phases,
        unknown=unknown,
        memory=memory,
        host=host,
        host_memory=host_memory or psutil.virtual_memory().total,
        advice=tuple(_advice(config, peak(list(phases)).phase)) if too_large else (),
        duration=duration,
        notes=tuple(_notes(config, work.needs)),
    )


def _duration(plan: MemoryPlan, work: RunWork) -> Duration:
    """Count the operations of transformer and decoder.

    A backward pass through frozen weights computes the gradients of activations alone, which takes
    as many operations as a forward pass.
    """
    image, decoding = plan.forward_operations(), plan.decode_operations()

    def operations(load: UpdateWork) -> float:
        forwards = load.previews + load.sampling + 2 * load.training
        forwards += load.recomputed + load.reference
        return image * forwards + decoding * (load.images + load.candidates)

    return Duration(
        iteration=operations(work.first),
        run=operations(work.total) + operations(work.evaluated),
        gpus=plan.split.gpus,
        compiled=bool(plan.config.pipeline.compile),
    )


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
        (phase == "encode",
         "flowrl train RECIPE --encode-only memory.prompt_cache=PATH pipeline.device=cpu, then "
         "memory.text_encoders=free memory.prompt_cache=PATH (texts are encoded on the CPU)"),
        (m.vae == "keep", "memory.vae=offload (the autoencoder is moved for every decoding)"),
        (p.dtype == "fp32", "pipeline.dtype=bf16 (half the bytes, rounded)"),
        (m.base_bits is None and p.precision is None,
         "memory.base_bits=4 (frozen weights in 4 bits, slightly different images)"),
        (config.runtime.shard is None,
         "runtime.shard=node with --gpus N (the GPUs share one copy of the transformer)"),
        (phase != "encode", "pipeline.height, pipeline.width (smaller images)"),
    ]  # fmt: skip
    return [text for applies, text in changes if applies]


def _notes(config: Config, needs: Needs) -> Iterator[str]:
    if config.runtime.shard == "node":
        yield "All GPUs are counted as those of one machine, which share its copy."
    unknown = [e.label or e.name for e in config.rewards if reward_networks(e) is None]
    if unknown:
        yield f"Memory of {', '.join(unknown)} is not included: size unknown."
    train = config.prompts.train
    if not train.startswith(TINY) and prompt_count(train) is None:
        yield f"{train} cannot be read here: its prompts are counted as all different."
    explore, store = config.rollout.explore, config.rollout.store
    if "auto" in (config.pipeline.precision, explore and explore.precision):
        yield f"precision auto is counted as {AUTO}."
    if needs.reward_grad:
        yield "The gradient through the decoder and the reward is not included."
    if store is not None:
        yield "Groups come from a store; the rollout's memory is that of generating them."


# --- sizes of memory, and the head of a recipe --------------------------------------------------


def parse_memory(text: str, option: str = "--memory") -> int:
    """Return the bytes of "24GB", "24" (10^9 bytes each) or "24GiB" (2^30).

    GPUs sold with 24 GB have some more than 24 * 10^9 bytes, of which their driver keeps a part.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(G?B?|GiB?)\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise UserError(f"{option} is {text!r}, expected a size such as 24GB, 80G or 24GiB")
    return int(float(match[1]) * (2**30 if "i" in match[2].lower() else 10**9))


def memory_class(name: str) -> int | None:
    """Return the bytes of a GPU that a recipe's name ends in, as in "-24gb"; None without one."""
    match = re.search(r"-([0-9]+)gb$", name.removesuffix(".yaml").lower())
    return int(match[1]) * 10**9 if match else None


def gpus_of(recipe: str) -> int:
    """Return how many GPUs the head of a recipe's file is for; 1 where it does not say."""
    head = find_recipe(recipe).read_text(encoding="utf-8")
    match = re.search(r"^# Hardware: ([0-9]+) GPU", head, re.MULTILINE)
    return int(match[1]) if match else 1
