"""One iteration of Flow-GRPO on a pipeline of published size with random weights.

The loop is training's own; text and rewards are noise: what an iteration costs must not depend on
what a network of random weights happens to earn.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from flowrl.assembly.learner import PRECISION, ProvidedObjects, build_learner
from flowrl.assembly.work_split import split_work
from flowrl.backbones.families import family_of
from flowrl.backbones.loading import DTYPES
from flowrl.config import Config, parse_config
from flowrl.errors import UserError
from flowrl.functional.batches import ALONE
from flowrl.planning.memory import OVERHEAD, MemoryPlan
from flowrl.planning.model_specs import ModelSpec
from flowrl.planning.work import count_work, doubles
from flowrl.quantization.backends import resolve
from flowrl.sampling.rollout import Sampler, Timer
from flowrl.training.loop import Learner
from flowrl.trajectory import Rollout
from flowrl.utils.distributed import Runtime
from scripts.bench.random_model import RandomTexts, build_pipeline, model_spec, move, shortened
from scripts.bench.rollout import sampler, training_passes, with_random_rewards
from scripts.bench.timing import (
    Phase,
    Timeline,
    compare_turns,
    device_name,
    middle_mean,
    on_gpu,
    spread,
    time_turns,
    watched,
)

PHASES = ("encode", "rollout", "decode", "rewards", "training")
BARE = "bare training"  # the forwards and backwards of training's rows, and nothing else
RANK = 32
SHARE = 0.9  # of sampling that is to be spent in the transformer's forwards
OF_PLANNED = 0.1  # how far the peak may be from the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWork:
    """What an iteration samples and learns from, and in which portions."""

    prompts: int
    group_size: int
    steps: int
    guidance: float  # classifier-free, or FLUX.1's input
    kl_coef: float  # above 0 the frozen network is asked too
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
    """Return a model's default work with changes. Raises UserError for an unknown name."""
    return replace(WORK[family_of(model_spec(name).pipeline).name], **changes)


def bench_iteration(
    *,
    name: str,
    work: MeasuredWork | None = None,
    pixels: int | None = None,
    layers: int | None = None,
    dtype: str = "bf16",
    precision: str | None = None,
    compile: bool = False,
    gradient_checkpointing: bool = False,
    text_tokens: int | None = None,
    repeats: int = 3,
    device: str = "auto",
) -> dict[str, Any]:
    """Measure iterations after a first one: settings, speed, and memory beside the plan's.

    Seconds and shares are means over the middle half of the iterations, memory is the largest.

    Args:
        name: of a published model.
        pixels: side of an image, None for PIXELS.
        layers: blocks of each kind, None for all.
        dtype, precision, compile, gradient_checkpointing: the options of these names.
        text_tokens: that the transformer attends to, None for the model's own number.

    Raises:
        UserError: unknown name, or a CPU for a network of full depth.
    """
    spec = model_spec(name)
    spec = replace(spec, text_tokens=text_tokens or spec.text_tokens)
    if layers is None and not on_gpu(device):
        raise UserError(
            f"{name} at its full depth would take a CPU hours: use a GPU, or give --layers 2 and "
            "--pixels 64 to see that everything runs, which says nothing of speed"
        )
    family = family_of(spec.pipeline).name
    work, pixels = work or WORK[family], pixels or PIXELS[family]
    options = {"dtype": dtype, "precision": precision, "compile": compile}
    with tempfile.TemporaryDirectory() as folder:
        pipeline = _pipeline(spec, work, pixels, device, **options)
        config = _config(pipeline, work, gradient_checkpointing, folder)
        runtime = Runtime(device=device, mixed_precision=PRECISION[dtype])
        learner = _learner(config, runtime, name, spec, work, layers)
        iterations, velocities = measure(learner, repeats)
    shorter = replace(spec, config=shortened(spec.config, layers), text_encoders=())
    memory = memory_plan(shorter, config, runtime.device)
    planned = plan(memory)
    return {
        "size": name,
        "checkpoint": spec.checkpoint,
        "device": device_name(runtime.device),
        "torch": torch.__version__,
        "diffusers": version("diffusers"),
        "layers": "all" if layers is None else f"{layers} of each kind: says nothing of speed",
        "dtype": dtype,
        "precision": precision or dtype,
        "compile": compile,
        "pixels": pixels,
        "rank": RANK,
        "images": work.prompts * work.group_size,
        **asdict(work),
        "gradient_checkpointing": gradient_checkpointing,
        "velocities": velocities,
        "iterations": repeats,
        **_speed(iterations, work.prompts * work.group_size),
        "operations_per_second": _rate(iterations, memory, velocities),
        **_memory(iterations, planned),
    }


def bench_compile(
    *,
    name: str,
    pixels: int,
    layers: int | None,
    dtype: str,
    compile: bool | str = True,
    rows: int = 4,
    text_tokens: int | None = None,
    repeats: int = 3,
    device: str = "auto",
) -> dict[str, Any]:
    """Compare forwards and backwards of `rows` rows in compiled blocks with plain ones.

    compile: the option of this name, true or "graphs".

    Returns the seconds of the first call of each, the compiled ones' by the plain ones' of later
    calls in alternating turns, and by how much of its norm the gradient differs.
    """
    spec = model_spec(name)
    spec = replace(spec, text_tokens=text_tokens or spec.text_tokens)
    work = replace(
        WORK[family_of(spec.pipeline).name], prompts=1, group_size=rows, steps=2, batch=rows,
        micro_batch=rows, guidance=1.0, kl_coef=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        pipeline = _pipeline(spec, work, pixels, device, dtype=dtype, compile=compile)
        config = _config(pipeline, work, False, folder)
        runtime = Runtime(device=device, mixed_precision=PRECISION[dtype])
        learner = _learner(config, runtime, name, spec, work, layers)
        with torch.compiler.set_stance("force_eager"):
            rollout = with_random_rewards(learner.source.collect(0, Timer()))
        data: Any = learner.objective.prepare(rollout)
        chunk = next(iter(ALONE.micro_batches(data, rows)))
        cond = chunk.cond.take(chunk.prompt)
        gradients: dict[str, torch.Tensor] = {}

        def passes(mode: str) -> None:
            learner.policy.begin_step()
            with torch.compiler.set_stance("force_eager" if mode == "plain" else "default"):
                with runtime.autocast():
                    loss = learner.policy.velocity(chunk.x, chunk.sigma, cond).square().mean()
                loss.backward()
            gradients[mode] = torch.cat([p.grad.flatten() for p in learner.policy.parameters()])
            learner.optimizer.zero_grad(set_to_none=not learner.policy.graphs)

        jobs = {mode: partial(passes, mode) for mode in ("compiled", "plain")}
        first = {f"first {mode} seconds": seconds(job) for mode, job in jobs.items()}
        turns = time_turns(jobs, repeats, runtime.device)
    difference = (gradients["compiled"] - gradients["plain"]).norm() / gradients["plain"].norm()
    return {
        "size": name, "pixels": pixels, "batch": rows, "dtype": dtype, **first,
        "difference": difference.item(),
        **compare_turns(turns["compiled"], turns["plain"]),
    }  # fmt: skip


def seconds(job: Callable[[], None]) -> float:
    """Return the seconds of a job by the clock, until the GPU is done with it."""
    began = time.perf_counter()
    job()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _pipeline(
    spec: ModelSpec, work: MeasuredWork, pixels: int, device: str, **options: Any
) -> dict[str, Any]:
    """Return the recipe's section of this name."""
    return {
        "path": spec.checkpoint, "device": device, "decode_batch": work.decode_batch,
        "height": pixels, "width": pixels, **options,
    }  # fmt: skip


def _config(
    pipeline: dict[str, Any], work: MeasuredWork, gradient_checkpointing: bool, folder: str
) -> Config:
    """Return Flow-GRPO as a recipe has it."""
    return parse_config(
        {
            "pipeline": pipeline,
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
    config: Config,
    runtime: Runtime,
    name: str,
    spec: ModelSpec,
    work: MeasuredWork,
    layers: int | None,
) -> Learner:
    """Build training's own around random networks; the text is noise, and any ratio is taken."""
    dtype = DTYPES[config.pipeline.dtype]
    pipeline = build_pipeline(name, device=runtime.device, dtype=dtype, layers=layers, encoder=True)
    prompts = [f"prompt {i}" for i in range(work.prompts)]
    learner = build_learner(config, runtime, ProvidedObjects(pipeline=pipeline, prompts=prompts))
    move(learner.policy)  # as after some training: factors of 0 would be no test
    own = sampler(learner)
    texts = RandomTexts(own.generator.backbone)
    source = replace(own, generator=replace(own.generator, text_cache=texts))
    return replace(learner, source=source, ratio_tolerance=float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedSampler:
    """A sampler with random rewards that reports its phases, and training's, to a timeline."""

    own: Sampler
    timeline: Timeline

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        self.timeline.enter("encode")
        rollout = self.own.collect(iteration, timer)
        self.timeline.enter("training")
        return with_random_rewards(rollout)

    def save_state(self) -> None:
        pass


Phases = Mapping[str, Phase]  # of one iteration, by PHASES


def measure(learner: Learner, repeats: int) -> tuple[list[Phases], int]:
    """Return the phases of iterations after a first one, and the velocities of a rollout."""
    learner.iterate(0)  # warms up and creates the optimiser's state
    found = [_measured(learner, number) for number in range(1, repeats + 1)]
    return [phases for phases, _ in found], found[0][1]


def _measured(learner: Learner, number: int) -> tuple[Phases, int]:
    """Return the phases of an iteration and then of its bare passes, and its velocities."""
    source, timeline = sampler(learner), Timeline(learner.runtime.device)
    generator = watched(
        source.generator, timeline, sync="rollout", sample="rollout", decode="decode",
        reward="rewards",
    )  # fmt: skip
    observed = WatchedSampler(own=replace(source, generator=generator), timeline=timeline)
    with timeline.forwards_of(learner.policy.network):
        rollout, _ = replace(learner, source=observed).iterate(number)
    timeline.enter(None)
    transitions: Any = learner.objective.prepare(rollout)
    timeline.enter(BARE)
    with learner.runtime.autocast():
        training_passes(learner, transitions, learner.optim.micro_batch)
    phases = timeline.phases()
    return {name: phases.get(name, Phase()) for name in (*PHASES, BARE)}, rollout.tree.forwards


def memory_plan(spec: ModelSpec, config: Config, device: torch.device) -> MemoryPlan:
    """Return what `flowrl plan` would plan for this device."""
    if config.pipeline.precision is not None:  # "auto" as this GPU has it
        format = resolve(config.pipeline.precision, device)
        section = config.pipeline.model_copy(update={"precision": format})
        config = config.model_copy(update={"pipeline": section})
    work = count_work(config)
    (kind,) = work.kinds  # every iteration is of one kind here
    split = split_work(kind.load, 1)
    return MemoryPlan(config=config, spec=spec, needs=work.needs, split=split, kind=kind)


def plan(memory: MemoryPlan) -> dict[str, int]:
    """Return the bytes of each phase that `flowrl plan` predicts, as torch's statistics see them.

    They lack the driver's memory, and what lies idle between tensors.
    """
    # What torch.cuda.max_memory_allocated would show.
    return {f.phase: f.total - f.parts[OVERHEAD] for f in memory.footprints()}


def _rate(iterations: Sequence[Phases], memory: MemoryPlan, velocities: int) -> float:
    """Return the operations a second of the rollout's forwards, as `planning.duration` has them."""
    rows = velocities * (1 + doubles(memory.config, memory.config.rollout.guidance_scale))
    seconds = middle_mean([phases["rollout"].forward_seconds for phases in iterations])
    return memory.forward_operations() * rows / seconds


def _speed(iterations: Sequence[Phases], images: int) -> dict[str, Any]:
    """Return the speeds; forward_share, of sampling, is to be SHARE or more.

    training_by_bare: learning by its rows' bare forwards and backwards; a frozen network that a KL
    term asks is in the first alone.
    """
    rows = [_speed_of(phases, images) for phases in iterations]
    shares = spread([row["forward_share"] for row in rows])
    return {name: middle_mean([row[name] for row in rows]) for name in rows[0]} | {
        "forward_share_spread": shares
    }


def _speed_of(phases: Phases, images: int) -> dict[str, float]:
    total = sum(phases[name].seconds for name in PHASES)
    sampling, decoding = phases["rollout"], phases["decode"]
    both = sampling.seconds + decoding.seconds
    return {
        "seconds": total,
        "images_per_second": images / total,
        "images_per_second_in_rollout": images / (total - phases["training"].seconds),
        "forward_share": sampling.forward_seconds / sampling.seconds,
        "forward_share_with_decoding": sampling.forward_seconds / both,
        "training_by_bare": phases["training"].seconds / phases[BARE].seconds,
    }


def _memory(iterations: Sequence[Phases], planned: Mapping[str, int]) -> dict[str, Any]:
    """Return the largest of all phases, and each; None for what was not measured or planned.

    Bytes that tensors had; a GPU gives its processes more.
    """
    rows = [_phase(name, [phases[name] for phases in iterations], planned) for name in PHASES]
    peaks = [phases[name].peak for phases in iterations for name in PHASES]
    whole = _compare(
        max(filter(None, peaks), default=None), max(planned[n] for n in planned if n in PHASES)
    )
    return whole | {"phases": rows}


def _phase(name: str, turns: Sequence[Phase], planned: Mapping[str, int]) -> dict[str, Any]:
    """Return what a phase took in the middle half of the iterations, and its highest peak."""
    shares = [turn.forward_seconds / turn.seconds for turn in turns if turn.seconds]
    return {
        "phase": name,
        "seconds": middle_mean([turn.seconds for turn in turns]),
        "forwards": turns[0].forwards,
        "in_forwards": middle_mean(shares) if shares else None,
        **_compare(max((t.peak for t in turns if t.peak), default=None), planned.get(name)),
    }


def _compare(peak: int | None, planned: int | None) -> dict[str, float | None]:
    return {
        "peak_gb": peak and peak / 1e9,
        "planned_gb": planned and planned / 1e9,
        "of_planned": peak / planned if peak and planned else None,
    }
