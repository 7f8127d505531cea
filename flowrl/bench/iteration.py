"""One iteration of Flow-GRPO on a pipeline of published size with random weights."""

import copy
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.backbones.base import Backbone
from flowrl.backbones.loading import DTYPES
from flowrl.backbones.text_cache import TextCache
from flowrl.bench.random_model import random_text
from flowrl.bench.rollout import with_random_rewards
from flowrl.bench.two_stage import device_name, move, on_gpu
from flowrl.build.learner import PRECISION, ProvidedObjects, build_learner
from flowrl.build.work_split import split_work
from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.planning.memory import footprints
from flowrl.planning.model_specs import ModelSpec, build_pipeline, model_spec, shortened
from flowrl.planning.plan import build_setup, count_work
from flowrl.prompts.records import PromptRecord
from flowrl.quantization.backends import precision_name
from flowrl.quantization.backends import capability_of, resolve
from flowrl.sampling.rollout import Timer
from flowrl.sampling.source import Sampler
from flowrl.training.loop import Learner
from flowrl.trajectory import Conditioning, Rollout
from flowrl.utils.distributed import Runtime

# --- Where an iteration's time and memory go, told apart without making a GPU wait for the ho --

PHASES = ("encode", "rollout", "decode", "rewards", "training")
Moment = torch.cuda.Event | float


@dataclass(slots=True)
class Phase:
    """Of one phase: seconds, those inside the transformer's forwards, how many these were, and the
    most memory of the GPU that was in use at once, in bytes; None elsewhere."""

    seconds: float = 0.0
    forward_seconds: float = 0.0
    forwards: int = 0
    peak: int | None = None


@dataclass(slots=True)
class _Stretch:
    name: str
    began: Moment
    forwards: list[tuple[Moment, Moment]] = field(default_factory=list)
    ended: Moment | None = None


class Timeline:
    """Phases that follow one another.

    On a GPU the ends of phases and forwards are events in its own queue, which are read at the
    end; seconds in which it waits for the host count where they fall. On a CPU it is the
    processor's own time, which other work on the machine does not stretch.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._past: list[_Stretch] = []
        self._now: _Stretch | None = None
        self._peaks: dict[str, int] = {}
        self._forward: Moment | None = None

    def enter(self, name: str | None) -> None:
        """What follows belongs to that phase, or None to no phase."""
        moment = self._moment()
        if self._now is not None:
            self._now.ended = moment
            self._past.append(self._now)
            if self.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.device)
                self._peaks[self._now.name] = max(peak, self._peaks.get(self._now.name, 0))
        self._now = None if name is None else _Stretch(name, moment)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def forwards_of(self, network: nn.Module) -> Iterator[None]:
        """Inside the block, this network's forwards are told from all else."""

        def before(*_: object) -> None:
            self._forward = self._moment()

        def after(*_: object) -> None:
            if self._now is not None and self._forward is not None:
                self._now.forwards.append((self._forward, self._moment()))

        hooks = (
            network.register_forward_pre_hook(before),
            network.register_forward_hook(after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def phases(self) -> dict[str, Phase]:
        """What there was, by name; ends the last phase and waits for the GPU."""
        self.enter(None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = {name: Phase(peak=self._peaks.get(name)) for name in PHASES}
        for stretch in self._past:
            phase = found[stretch.name]
            assert stretch.ended is not None
            phase.seconds += _between(stretch.began, stretch.ended)
            phase.forward_seconds += sum(_between(*pair) for pair in stretch.forwards)
            phase.forwards += len(stretch.forwards)
        return found

    def _moment(self) -> Moment:
        if self.device.type != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(began: Moment, ended: Moment) -> float:
    """Seconds."""
    if isinstance(began, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event)
        return began.elapsed_time(ended) / 1000
    assert not isinstance(ended, torch.cuda.Event)
    return ended - began


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedSampler:
    """A sampler whose phases are told apart; what follows its rollout is training.

    Its rewards are random numbers: what learning costs must not depend on what a network of
    random weights happens to earn.
    """

    own: Sampler
    timeline: Timeline

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        self.timeline.enter("encode")
        rollout = self.own.collect(iteration, timer)
        self.timeline.enter("training")
        return with_random_rewards(rollout)

    def save_state(self) -> None:
        pass


def watched(sampler: Sampler, timeline: Timeline) -> WatchedSampler:
    """The same sampler: drawing begins when its network is made ready, decoding with each batch of
    latents and ends when their images are on the CPU, rewards are asked when all is drawn."""
    stage = sampler.generator
    backbone, own = copy.copy(stage.backbone), stage.backbone

    def decode(x0: Tensor) -> Tensor:
        timeline.enter("decode")
        images = own.decode(x0).cpu()
        timeline.enter("rollout")
        return images

    @contextmanager
    def network() -> Iterator:
        timeline.enter("rollout")
        with stage.network() as velocity:
            yield velocity
        timeline.enter("rewards")

    backbone.decode = decode  # type: ignore[method-assign]
    told = replace(stage, backbone=backbone, network=network)
    return WatchedSampler(own=replace(sampler, generator=told), timeline=timeline)


# --- One iteration of Flow-GRPO on a pipeline of published size with random weights ------------

RANK = 32
SHARE = 0.9  # of drawing that is to be spent in the transformer's forwards
OF_PLANNED = 0.1  # how far the peak may be from the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWork:
    """What an iteration draws and learns from, and in which portions.

    guidance: classifier-free, or FLUX.1's input. kl_coef: above 0 the frozen network is asked too.
    """

    prompts: int
    group_size: int
    steps: int
    guidance: float
    kl_coef: float
    batch: int
    micro_batch: int
    decode_batch: int = 4


# Steps, guidance and KL of Flow-GRPO's published settings (2505.05470); for SANA, which it does
# not train, the steps of Sol-RL (2604.06916) and the pipeline's own guidance. Fewer prompts and
# smaller groups, to be done in minutes; portions that a GPU of 80 GB or more is to hold.
WORK = {
    "sd3": MeasuredWork(
        prompts=4, group_size=8, steps=10, guidance=4.5, kl_coef=0.04, batch=8, micro_batch=4
    ),
    "flux": MeasuredWork(
        prompts=2, group_size=8, steps=6, guidance=3.5, kl_coef=0.0, batch=8, micro_batch=2
    ),
    "sana": MeasuredWork(
        prompts=4, group_size=8, steps=10, guidance=4.5, kl_coef=0.0, batch=8, micro_batch=4
    ),
}
PIXELS = {"sd3": 512, "flux": 512, "sana": 1024}


def work_of(name: str, changes: Mapping[str, int]) -> MeasuredWork:
    """The default work of a size, with changes. Raises UserError for an unknown name."""
    return replace(WORK[model_spec(name).family], **changes)


def bench_iteration(
    *,
    name: str,
    work: MeasuredWork | None = None,
    pixels: int | None = None,
    layers: int | None = None,
    dtype: str = "bf16",
    precision: str | None = None,
    gradient_checkpointing: bool = False,
    device: str = "auto",
) -> dict[str, Any]:
    """The second of two iterations: settings, speed, and its memory beside the plan's.

    The loop is training's own; text and rewards are noise. pixels: None for PIXELS. layers: blocks
    of each kind, None for all. dtype, precision, gradient_checkpointing: the options of these
    names. Raises UserError for an unknown name, and on a CPU for a network of full depth.
    """
    size = model_spec(name)
    if layers is None and not on_gpu(device):
        raise UserError(
            f"{name} at its full depth would take a CPU hours: use a GPU, or give --layers 2 and "
            "--pixels 64 to see that everything runs, which says nothing of speed"
        )
    work = work or WORK[size.family]
    with tempfile.TemporaryDirectory() as folder:
        config = _config(
            size, work, pixels or PIXELS[size.family], dtype=dtype, precision=precision,
            gradient_checkpointing=gradient_checkpointing, device=device, folder=folder,
        )  # fmt: skip
        runtime = Runtime(device=device, mixed_precision=PRECISION[dtype])
        learner = _learner(config, runtime, name, work, layers)
        phases, forwards = measure(learner)
    shorter = replace(size, config=shortened(size.config, layers), text_encoders=())
    planned = plan(shorter, config, runtime.device)
    return (
        {"size": name, "checkpoint": size.checkpoint}
        | _where(runtime.device)
        | {"layers": "all" if layers is None else f"{layers} of each kind: says nothing of speed"}
        | _settings(config, work)
        | {"velocities": forwards}
        | _speed(phases, work.prompts * work.group_size)
        | _memory(phases, planned)
    )


def _config(
    size: ModelSpec,
    work: MeasuredWork,
    pixels: int,
    *,
    dtype: str,
    precision: str | None,
    gradient_checkpointing: bool,
    device: str,
    folder: str,
) -> Config:
    """Flow-GRPO as a recipe has it."""
    pipeline = {"path": size.checkpoint, "backbone": size.family, "dtype": dtype}
    pipeline |= {"precision": precision, "device": device, "decode_batch": work.decode_batch}
    return parse_config(
        {
            "pipeline": pipeline | {"height": pixels, "width": pixels},
            "memory": {"gradient_checkpointing": gradient_checkpointing},
            "lora": {"rank": RANK, "alpha": 2 * RANK},
            "prompts": {"train": "given"},
            "rewards": [{"name": "brightness"}],
            "rollout": {
                "prompts_per_iteration": work.prompts,
                "group_size": work.group_size,
                "num_inference_steps": work.steps,
                "guidance_scale": work.guidance,
                "batch_size": work.batch,
                "merge_lora": False,
            },
            "objective": {"kind": "grpo", "kl_coef": work.kl_coef},
            "optim": {
                "micro_batch": work.micro_batch,
                "updates_per_rollout": 1 if work.prompts % 2 else 2,  # of whole groups
            },
            "run": {"output_dir": folder},
        }
    )


def _learner(
    config: Config, runtime: Runtime, name: str, work: MeasuredWork, layers: int | None
) -> Learner:
    """Training's own, around random networks; the text is noise, and any ratio is taken."""
    pipeline = build_pipeline(
        name,
        device=runtime.device,
        dtype=DTYPES[config.pipeline.dtype],
        layers=layers,
        encoder=True,
    )
    prompts = [f"prompt {i}" for i in range(work.prompts)]
    learner = build_learner(config, runtime, ProvidedObjects(pipeline=pipeline, prompts=prompts))
    move(learner.policy)  # as after some training: factors of 0 would be no test
    assert isinstance(learner.source, Sampler)  # no store here
    stage = learner.source.generator
    texts = RandomTexts(model_spec(name), stage.backbone, guided=work.guidance > 1)
    source = replace(learner.source, generator=replace(stage, text_cache=texts))
    loose = replace(learner.update, ratio_tolerance=float("inf"))
    return replace(learner, source=source, update=loose)


class RandomTexts(TextCache):
    """Noise in place of encoded prompts: there are no text encoders."""

    def __init__(self, size: ModelSpec, backbone: Backbone, *, guided: bool):
        super().__init__(backbone)
        self.size, self.guided = size, guided

    def __call__(self, prompts: Sequence[PromptRecord]) -> Conditioning:
        like = self.backbone
        return random_text(
            self.size, len(prompts), guided=self.guided, device=like.device, dtype=like.dtype
        )


def measure(learner: Learner) -> tuple[dict[str, Phase], int]:
    """Phases of an iteration, and the velocities of its rollout; an iteration before it warms up,
    and makes the optimiser's state."""
    assert isinstance(learner.source, Sampler)
    learner.iterate(0)
    timeline = Timeline(learner.runtime.device)
    learner = replace(learner, source=watched(learner.source, timeline))
    with timeline.forwards_of(learner.policy.network):
        rollout, _ = learner.iterate(1)
    return timeline.phases(), rollout.tree.forwards


def plan(size: ModelSpec, config: Config, device: torch.device) -> dict[str, int]:
    """Bytes of each phase as `flowrl plan` has them for these very settings, as far as torch's own
    statistics can tell: without the driver's, and what lies idle between tensors."""
    section = config.pipeline
    if section.precision is not None:  # "auto" as this GPU has it
        format = precision_name(resolve(section.precision, capability_of(device)))
        section = section.model_copy(update={"precision": format})
    config = config.model_copy(update={"pipeline": section})
    needs = config.objective.build(config.rollout.kernel).needs
    kind = count_work(config, needs).kinds[0]  # every iteration is of one kind here
    setup = build_setup(config, size, needs, split_work(kind.load, 1), kind.plan, kind.candidates)
    setup = replace(setup, text_tokens=None)  # the noise is as long as the size's own text
    return {found.phase: found.allocated for found in footprints(size, setup)}


# --- the record ---------------------------------------------------------------------------------


def _where(device: torch.device) -> dict[str, Any]:
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "diffusers": version("diffusers"),
    }


def _settings(config: Config, work: MeasuredWork) -> dict[str, Any]:
    p = config.pipeline
    found = {"dtype": p.dtype, "precision": p.precision or p.dtype, "pixels": p.height}
    found |= {"rank": RANK, "images": work.prompts * work.group_size} | asdict(work)
    return found | {"gradient_checkpointing": config.memory.gradient_checkpointing}


def _speed(phases: Mapping[str, Phase], images: int) -> dict[str, Any]:
    """forward_share: of drawing, which is to be SHARE or more; forward_share_with_decoding: of
    drawing and decoding."""
    total = sum(phase.seconds for phase in phases.values())
    drawing, decoding = phases["rollout"], phases["decode"]
    both = drawing.seconds + decoding.seconds
    return {
        "seconds": total,
        "images_per_second": images / total,
        "images_per_second_in_rollout": images / (total - phases["training"].seconds),
        "forward_share": drawing.forward_seconds / drawing.seconds,
        "forward_share_with_decoding": drawing.forward_seconds / both,
    }


def _memory(phases: Mapping[str, Phase], planned: Mapping[str, int]) -> dict[str, Any]:
    """The largest of all phases, and each; None for what was not measured or not planned. Bytes
    that tensors had, of which a GPU gives its processes more."""
    peaks = [phase.peak for phase in phases.values() if phase.peak is not None]
    rows = [
        {
            "phase": name,
            "seconds": phase.seconds,
            "forwards": phase.forwards,
            "in_forwards": phase.forward_seconds / phase.seconds if phase.seconds else None,
            **_beside(phase.peak, planned.get(name)),
        }
        for name, phase in phases.items()
    ]
    whole = _beside(max(peaks, default=None), max(planned[n] for n in planned if n in phases))
    return whole | {"phases": rows}


def _beside(peak: int | None, planned: int | None) -> dict[str, float | None]:
    return {
        "peak_gb": peak and peak / 1e9,
        "planned_gb": planned and planned / 1e9,
        "of_planned": peak / planned if peak and planned else None,
    }
