"""Two-stage rollouts of Sol-RL (2604.06916) against sampling all candidates exactly.

`bench_solrl` measures a pipeline by the options that training has, `bench_sizes` networks of
published sizes with random weights. Both stand beside what the cost model predicts.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch._dynamo.utils import counters

from flowrl.assembly.rollout import EXPLORING
from flowrl.backbones.loading import TINY
from flowrl.backbones.policy import OLD, POLICY, Policy
from flowrl.config.rollout import Precision
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.quantization.backends import resolve
from flowrl.quantization.layer_rules import LayerChoice, quantised_share
from flowrl.quantization.rollout_model import RolloutModel, prepare
from flowrl.sampling.rollout import (
    RolloutGenerator,
    RolloutRequest,
    Sampler,
    Timer,
    decode,
    policy_velocity,
    rollout_model_velocity,
    sample_request,
    submit_images,
    with_network,
)
from flowrl.sampling.two_stage import Explorer
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.trees.plan import TreePlan
from flowrl.trees.presets import chains
from flowrl.utils.distributed import Runtime
from scripts.bench.cost import break_even_gain, two_stage_ratio
from scripts.bench.random_model import RandomBackbone, RandomTexts, model_spec, move
from scripts.bench.rollout import bench_learner, sampler
from scripts.bench.timing import (
    Seconds,
    Timeline,
    device_name,
    in_turns,
    middle_mean,
    on_gpu,
    spread,
    watched,
)

ALLOWED = 1.10  # the measured ratio by the predicted one: what the cost model leaves out
SECONDS = ("single", "two", "exact_step", "low_step", "peft_step", "finish")
OTHER = "select and other"
FINISHED = 4  # times that a batch is sampled, decoded and scored in a round: finishing it is short

# What the numbers of a row are called for people; those that `verdict` tells are not among them.
LABELS = {
    "model": "model",
    "size": "size",
    "plan": "kept/candidates@their steps/steps",
    "layers": "layers",
    "pixels": "side of an image, pixels",
    "precision": "precision of candidates",
    "native": "computed natively",
    "compiled": "compiled",
    "quantised_layers": "quantised layers",
    "quantised_share": "quantised share of weights",
    "cheap_copy_gb": "low-bit copy, GB",
    "exact_copy_gb": "exact copy, GB",
    "device": "device",
    "prompts": "prompts",
    "batch": "images in one forward",
    "keep": "K: kept of a prompt",
    "candidates": "N: candidates of a prompt",
    "preview_steps": "steps of a candidate",
    "steps": "steps of a kept image",
    "single": "all N exactly, s",
    "two": "two stages, s",
    "exact_step": "an exact step, s an image",
    "low_step": "a candidate's step, s an image",
    "peft_step": "a step as trained, s an image",
    "finish": "decode and score, s an image",
    "q": "q: low-bit speed factor",
    "phi": "phi: fixed cost an image",
    "measured": "measured ratio",
    "spread": "the same, middle half of the rounds",
    "predicted": "predicted ratio",
    "q_to_break_even": "q from which two stages pay",
    "to_adapter_beside": "ratio to N with the adapter beside the weights",
    "recompiled": "graphs compiled again",
    "rounds": "rounds",
    "peak_memory_gb": "peak memory, GB",
}


def labelled(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for people: a line for each of its numbers that has a label."""
    return [{"what": LABELS[name], "is": row[name]} for name in row if name in LABELS]


def verdict(row: Mapping[str, Any]) -> str:
    """Return one sentence: what was measured beside what the cost model predicted."""
    within = "within" if row["of_predicted"] <= row["allowed"] else "above"
    return (
        f"measured {row['measured']:.3f}, predicted {row['predicted']:.3f}: "
        f"{row['of_predicted']:.2f} times, {within} {row['allowed']:.2f}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCounts:
    """Counts of one prompt. Raises UserError for counts that the cost model does not know."""

    keep: int  # images that are regenerated exactly, of the candidates
    candidates: int
    preview_steps: int  # of a candidate
    steps: int  # of a kept image

    def __post_init__(self) -> None:
        try:
            self.ratio(1.0, 0.0)
        except ValueError as error:
            raise UserError(str(error)) from error
        if not 2 <= self.preview_steps <= self.steps:
            raise UserError(
                f"the counts {self} give candidates {self.preview_steps} steps, expected 2 to the "
                f"{self.steps} of a kept image"
            )

    def ratio(self, gain: float, fixed: float) -> float:
        """Return the ratio of the cost model, see `two_stage_ratio`."""
        return two_stage_ratio(**asdict(self), gain=gain, fixed=fixed)

    def scaled(self, factor: float) -> "MeasuredCounts":
        """Return fewer images in the same proportion. Raises UserError unless they are whole."""
        keep, candidates = self.keep * factor, self.candidates * factor
        if keep < 1 or keep != int(keep) or candidates != int(candidates):
            raise UserError(
                f"a scale of {factor:g} makes {keep:g} of {candidates:g} candidates of {self}: "
                "whole numbers are expected, such as by 0.5, 0.25 or 0.125"
            )
        return replace(self, keep=int(keep), candidates=int(candidates))

    def __str__(self) -> str:
        return f"{self.keep}/{self.candidates}@{self.preview_steps}/{self.steps}"


# Sol-RL's own (2604.06916), and a wider first stage of fewer steps.
PUBLISHED = MeasuredCounts(keep=24, candidates=96, preview_steps=6, steps=10)
WIDER = MeasuredCounts(keep=16, candidates=128, preview_steps=4, steps=10)


def parse_counts(text: str) -> MeasuredCounts:
    """Parse 24/96@6/10: kept/candidates@preview steps/steps. Raises UserError for other text."""
    try:
        kept, taken = text.split("@")
        keep, candidates, preview_steps, steps = map(int, (*kept.split("/"), *taken.split("/")))
    except ValueError as error:
        raise UserError(
            f"the counts are {text!r}, expected kept/candidates@steps of a candidate/steps of a "
            "kept image such as 24/96@6/10"
        ) from error
    return MeasuredCounts(
        keep=keep, candidates=candidates, preview_steps=preview_steps, steps=steps
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one round."""

    device: str
    prompts: int
    counts: MeasuredCounts  # of each prompt
    batch: int
    single: float  # all candidates exactly
    two: float  # both stages
    split: Seconds  # the parts of `two`, which add up
    # Of one full batch, an image: a step of the exact network, of the candidates' and of the
    # network as it is trained, with the adapter beside the weights.
    exact_step: float
    low_step: float
    peft_step: float
    finish: float  # decoding and scoring, an image
    graphs: int  # compiled after the first round, over several changes of the adapter
    memory: int | None  # most bytes at once during both stages, None on a CPU

    @property
    def gain(self) -> float:
        """Return q: how many times as fast as an exact step a candidate's is."""
        return self.exact_step / self.low_step

    @property
    def fixed(self) -> float:
        """Return phi: decoding and scoring an image, by sampling it in exact steps."""
        return self.finish / (self.counts.steps * self.exact_step)

    @property
    def measured(self) -> float:
        return self.two / self.single

    @property
    def predicted(self) -> float:
        """Return the cost model's ratio with this run's q and phi."""
        return self.counts.ratio(self.gain, self.fixed)

    @property
    def to_peft(self) -> float:
        """Return two stages by the published baseline: N images at the seconds of `peft_step`."""
        images = self.prompts * self.counts.candidates
        return self.two / (images * (self.counts.steps * self.peft_step + self.finish))

    def row(self) -> dict[str, Any]:
        """Return a row for programs; LABELS has the names for people."""
        counts = asdict(self.counts)
        return {
            "device": self.device,
            "prompts": self.prompts,
            "batch": self.batch,
            **counts,
            **{name: getattr(self, name) for name in SECONDS},
            "q": self.gain,
            "phi": self.fixed,
            "measured": self.measured,
            "predicted": self.predicted,
            "of_predicted": self.measured / self.predicted,
            "allowed": ALLOWED,
            "q_to_break_even": break_even_gain(**counts, fixed=self.fixed),
            "to_adapter_beside": self.to_peft,
            "recompiled": self.graphs,
            "peak_memory_gb": self.memory and self.memory / 1e9,
            "split": [
                {"part": name, "seconds": seconds, "share": seconds / self.two}
                for name, seconds in self.split.items()
            ],
        }


@contextmanager
def name_own_options() -> Iterator[None]:
    """Name the bench's own option where no layer is left to be quantised."""
    try:
        yield
    except UserError as error:
        text, nothing, _ = str(error).partition("is left to be quantised")
        if not nothing:
            raise
        raise UserError(f"{text}{nothing}: give --min-dim 0, or a precision of bf16") from error


def full_batch(most: int, *counts: int) -> int:
    """Return the largest batch of at most `most` rows that divides all counts of images.

    The cost model knows only full batches, and a compiled network only one size of them.
    """
    common = math.gcd(*counts)
    return max(size for size in range(1, min(most, common) + 1) if common % size == 0)


def measure(
    source: Sampler, peft: RolloutGenerator, learn: Callable[[], None], *, repeats: int
) -> list[Costs]:
    """Measure the costs of alternating rounds, see `in_turns`; the first one compiles.

    Args:
        source: explores and samples exactly, as in training; without audits.
        peft: samples with the network as it is trained.
        learn: changes the adapter, once a round, so that there are new weights to put in.
    """
    assert source.explorer is not None
    exact, preview, plan = source.generator, source.explorer.plan(0), source.plan(0)
    candidates = source.request(0, preview)
    low, _ = source.explorer.preview(0, candidates)
    every = replace(plan, roots=preview.roots)
    single = replace(source, explorer=None, plans=every)
    peaks: list[int] = []
    graphs: list[int] = []  # compiled when the first round is over, then later
    jobs: dict[str, Callable[[], Seconds]] = {
        "learn": lambda: learn() or {},
        "single": lambda: _collect(single, None, []),
        "two": lambda: _collect(source, low, peaks),
        "exact": lambda: _batch(exact, candidates, plan, finish=True),
        "low": lambda: _batch(low, candidates, preview),
        "peft": lambda: _batch(peft, candidates, plan),
        "graphs": lambda: graphs.append(counters["stats"]["unique_graphs"]) or {},
    }
    found = in_turns(jobs, repeats)
    steps = {"preview_steps": low.num_inference_steps, "steps": exact.num_inference_steps}
    return [
        Costs(
            device=device_name(exact.backbone.device),
            prompts=len(candidates.prompt) // preview.roots,
            counts=MeasuredCounts(keep=plan.roots, candidates=preview.roots, **steps),
            batch=exact.batch_size,
            single=single["total"],
            two=two.pop("total"),
            split=two,
            exact_step=whole["step"],
            low_step=cheap["step"],
            peft_step=trained["step"],
            finish=whole["finish"],
            graphs=counters["stats"]["unique_graphs"] - graphs[0],
            memory=max(peaks, default=None),
        )
        for single, two, whole, cheap, trained in zip(
            *(found[name] for name in ("single", "two", "exact", "low", "peft")), strict=True
        )
    ]


RATIOS = ("q", "phi", "measured", "predicted", "of_predicted", "to_adapter_beside")


def summary(rounds: Sequence[Costs]) -> dict[str, Any]:
    """Return the row of the round whose two stages took the median, with `middle_mean` of ratios.

    A ratio compares what one round took, so that what slows a round down slows down both sides.
    """
    rows = [costs.row() for costs in rounds]
    middle = sorted(rows, key=lambda row: row["two"])[len(rows) // 2]
    ratios = {name: middle_mean([row[name] for row in rows]) for name in RATIOS}
    pays = break_even_gain(**asdict(rounds[0].counts), fixed=ratios["phi"])
    between = spread([row["measured"] for row in rows])
    return middle | ratios | {"spread": between, "q_to_break_even": pays, "rounds": len(rows)}


def _collect(source: Sampler, low: RolloutGenerator | None, peaks: list[int]) -> Seconds:
    """Time a rollout, with candidates by `low` if any; add its peaks of memory to `peaks`."""
    timeline, generators = Timeline(source.generator.backbone.device), [source.generator]
    regenerate, names = _watched(source.generator, timeline, "regenerate")
    source = replace(source, generator=regenerate)
    if low is not None and source.explorer is not None:
        explore, previews = _watched(low, timeline, "explore")
        explorer = replace(source.explorer, preview=lambda iteration, candidates: (explore, {}))
        source, names = replace(source, explorer=explorer), [*previews, *names]
        generators.append(low)
    timeline.enter(OTHER)
    source.collect(0, _UntilScored(timeline, {generator.times[1] for generator in generators}))
    phases = timeline.phases()
    peaks += [phase.peak for phase in phases.values() if phase.peak is not None]
    found = {name: phases[name].seconds for name in [*names, OTHER]}
    return found | {"total": sum(found.values())}


def _watched(
    generator: RolloutGenerator, timeline: Timeline, stage: str
) -> tuple[RolloutGenerator, list[str]]:
    """Return the same generator, and the names of its phases."""
    names = {part: f"{stage}: {part}" for part in ("sync", "sample", "decode", "reward")}
    return watched(generator, timeline, **names), list(names.values())


class _UntilScored(Timer):
    """Ends a generator's last phase when all its scores are there: at these laps."""

    def __init__(self, timeline: Timeline, laps: set[str]):
        super().__init__()
        self._timeline, self._laps = timeline, laps

    def lap(self, name: str) -> None:
        super().lap(name)
        if name in self._laps:
            self._timeline.enter(OTHER)


@torch.no_grad()
def _batch(
    generator: RolloutGenerator, request: RolloutRequest, plan: TreePlan, *, finish: bool = False
) -> Seconds:
    """Time one full batch, by image: a "step" of sampling; "finish", decoding and scoring."""
    part = request.take(torch.arange(min(generator.batch_size, len(request.prompt))))
    timeline, schedule = Timeline(generator.backbone.device), generator.schedule()
    backbone, cond = generator.backbone, generator.encode_prompts(part)
    times, size = FINISHED if finish else 1, generator.batch_size
    with generator.network() as velocity:
        for _ in range(times):
            timeline.enter("sample")  # with new weights in place
            tree = sample_request(backbone, velocity, cond, part, plan, schedule, size)
            if finish:
                timeline.enter("finish")
                scoring = Scoring(specs=generator.specs, phase="rollout")
                images = decode(backbone, tree.leaves(), generator.decode_batch)
                submit_images(scoring, images, part, len(tree.leaf))
                scoring.result()
        phases, rows = timeline.phases(), times * len(part.prompt)
    found = {"step": phases["sample"].seconds / generator.num_inference_steps / rows}
    return found | ({"finish": phases["finish"].seconds / rows} if finish else {})


def _beside_weights(generator: RolloutGenerator, policy: Policy, adapter: str) -> RolloutGenerator:
    """Return the generator with the network as it is trained: the adapter beside the weights."""
    network = functools.partial(
        policy_velocity, policy, policy.backbone, adapter, merged=False, runtime=generator.runtime
    )
    return replace(generator, backbone=policy.backbone, network=network)


# --- on a pipeline, by the options that training has --------------------------------------------

# At the built-in pipeline's width only the image's feed-forward layers stand four bits.
TINY_MIN_DIM = 128


def bench_solrl(
    *,
    model: str,
    counts: MeasuredCounts,
    prompts: int,
    precision: str,
    min_dim: int | None,
    batch: int,
    compile: bool | None,
    threads: int,
    repeats: int,
    device: str,
) -> dict[str, Any]:
    """Measure Sol-RL (2604.06916) trained by DiffusionNFT with brightness as its reward.

    Args:
        batch: most images in one forward; the largest that all batches can be full of is taken.
        min_dim: layers up to it stay exact; None for the backbone's own, 128 for built-in ones.
        compile: None compiles on a GPU.

    Raises:
        UserError: the device lacks the precision, the counts keep one image, or no layer is left
            to be quantised.
    """
    if counts.keep < 2:
        raise UserError(
            f"the counts {counts} keep one image of a prompt, which is compared with none: keep "
            "2 or more"
        )
    torch.set_num_threads(threads)
    resolved = resolve(precision, Runtime(device=device).device)
    size = full_batch(batch, prompts * counts.candidates, prompts * counts.keep)
    rollout = {
        "prompts_per_iteration": prompts,
        "group_size": counts.keep,
        "num_inference_steps": counts.steps,
        "merge_lora": True,
        "tree": {"kind": "ode"},
        "explore": {
            "candidates": counts.candidates,
            "num_inference_steps": counts.preview_steps,
            "precision": precision,
            "audit": {"every": 0},
        },
    }
    nft = {"kind": "nft", "noising": {"count": 1}}
    with tempfile.TemporaryDirectory() as folder, name_own_options():
        sections = {"objective": nft, "run": {"output_dir": folder}}
        compile = on_gpu(device) if compile is None else compile
        least = TINY_MIN_DIM if min_dim is None and model in TINY else min_dim
        learner = bench_learner(
            model, device, size, rollout, compile=compile, min_dim=least, **sections
        )
        policy, source = learner.policy, sampler(learner)

        def learn() -> None:
            move(policy)
            policy.update_old(0.5)

        peft = _beside_weights(source.generator, policy, OLD)
        found = summary(measure(source, peft, learn, repeats=repeats))
    what = {
        "model": model,
        "precision": resolved,
        "native": resolved != "nvfp4-emulated",
    }
    return what | {"compiled": compile} | found


# --- on networks of published sizes with random weights -----------------------------------------

RANK, ALPHA = 32, 64  # of Sol-RL (2604.06916)


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """A model on a device: the trained network, its exact copy and its low-bit one."""

    policy: Policy
    runtime: Runtime
    choices: Sequence[LayerChoice]
    exact: RolloutModel
    low: RolloutModel


def bench_sizes(
    *,
    name: str,
    precision: str,
    plans: Sequence[MeasuredCounts],
    prompts: int,
    batch: int,
    decode_batch: int,
    pixels: int | None,
    layers: int | None,
    min_dim: int | None,
    compile: bool | None,
    repeats: int,
    device: str,
) -> list[dict[str, Any]]:
    """Return one row a plan: see `summary`, and what is quantised.

    Raises:
        UserError: unknown name, a CPU for a network of full depth, a precision that the device
            lacks, or kernels that do not agree with their emulation.
    """
    model_spec(name)
    runtime = Runtime(device=device)
    if runtime.device.type == "cpu" and layers is None:
        raise UserError(
            f"{name} at its full depth would take a CPU hours: use a GPU, or give --layers 2 to "
            "see that everything runs, which says nothing of speed"
        )
    compile = on_gpu(device) if compile is None else compile
    resolved = resolve(precision, runtime.device)
    backbone = RandomBackbone(
        name, device=runtime.device, dtype=torch.bfloat16, pixels=pixels, layers=layers
    )
    networks = build_networks(backbone, resolved, runtime, min_dim, compile)
    quantised = sum(choice.quantised for choice in networks.choices)
    what = {
        "layers": "all" if layers is None else f"{layers} of each kind: says nothing of speed",
        "pixels": backbone.pixels,
        "precision": resolved,
        "native": resolved != "nvfp4-emulated",
        "compiled": compile,
        "quantised_layers": quantised,
        "quantised_share": quantised_share(networks.choices) if quantised else 0.0,
        "cheap_copy_gb": copy_bytes(networks.low) / 1e9,
        "exact_copy_gb": copy_bytes(networks.exact) / 1e9,
    }
    rows = []
    for plan in plans:
        source = sampler_of(networks, plan, prompts, batch, decode_batch)
        peft = _beside_weights(source.generator, networks.policy, POLICY)
        rounds = measure(source, peft, lambda: move(networks.policy), repeats=repeats)
        rows.append({"size": name, "plan": str(plan), **what, **summary(rounds)})
    torch.compiler.reset()  # which would hold on to this network beside the next
    return rows


def copy_bytes(model: RolloutModel) -> int:
    """Return the size of what a copy holds beside the policy's own tensors."""

    def storages(network: torch.nn.Module) -> dict[int, int]:
        parts = (t.untyped_storage() for t in (*network.parameters(), *network.buffers()))
        return {part.data_ptr(): part.nbytes() for part in parts}

    shared = storages(model.policy.network)
    return sum(size for at, size in storages(model.network).items() if at not in shared)


def build_networks(
    backbone: RandomBackbone,
    resolved: Precision,
    runtime: Runtime,
    min_dim: int | None,
    compile: bool,
) -> Networks:
    """Build the copies of a network with a LoRA whose second factor is not 0, as after training."""
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    move(policy)
    with name_own_options():
        choices, backend = prepare(
            policy.network, resolved, dtype=backbone.dtype, device=runtime.device, min_dim=min_dim
        )
    return Networks(
        policy=policy,
        runtime=runtime,
        choices=choices,
        exact=RolloutModel(policy, compile=compile),
        low=RolloutModel(policy, choices, backend, compile=compile),
    )


def sampler_of(
    networks: Networks, plan: MeasuredCounts, prompts: int, batch: int, decode_batch: int
) -> Sampler:
    """Build a sampler as training has it; brightness is its reward, the text is noise."""
    records = [PromptRecord(uid=str(i), text=f"prompt {i}") for i in range(prompts)]
    size = full_batch(batch, prompts * plan.candidates, prompts * plan.keep)
    exact = _generator(networks, networks.exact, plan.steps, size, decode_batch)
    low = _generator(networks, networks.low, plan.preview_steps, size, decode_batch)
    low = replace(low, times=EXPLORING)
    return Sampler(
        generator=exact,
        plans=chains(plan.steps, plan.keep, noisy=()),
        prompts=PromptSampler(records, prompts, seed=0),
        seed=0,
        explorer=Explorer(
            preview=lambda iteration, candidates: (low, {}),
            plan=lambda iteration: chains(plan.preview_steps, plan.candidates, noisy=()),
            select="best_worst",
        ),
    )


def _generator(
    networks: Networks, model: RolloutModel, steps: int, batch: int, decode_batch: int
) -> RolloutGenerator:
    own = networks.policy.backbone
    backbone = with_network(own, model.network)
    return RolloutGenerator(
        backbone=backbone,
        network=functools.partial(
            rollout_model_velocity, model, backbone, POLICY, runtime=networks.runtime
        ),
        text_cache=RandomTexts(own),
        specs=[RewardSpec(name="brightness", reward=load_reward("brightness"))],
        runtime=networks.runtime,
        num_inference_steps=steps,
        kernel=KERNELS["flow_sde"],
        noise_level=0.0,  # no plan here has noise
        batch_size=batch,
        decode_batch=decode_batch,
        whole_prompts=False,
    )
