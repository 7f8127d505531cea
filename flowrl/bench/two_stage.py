"""Two stages against one on a pipeline that is there, by the options that training has."""

import copy
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flowrl.backbones.loading import TINY
from flowrl.backbones.policy import OLD, POLICY, Policy
from flowrl.backbones.text_cache import TextCache
from flowrl.bench.random_model import RandomBackbone
from flowrl.build.learner import ProvidedObjects, build_learner
from flowrl.build.rollout import EXPLORING
from flowrl.config import parse_config
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.planning.model_specs import model_spec
from flowrl.prompts.records import PromptRecord, PromptSampler
from flowrl.quantization.backends import precision_name
from flowrl.quantization.backends import Plain, Resolved, capability_of, resolve
from flowrl.quantization.layer_rules import LayerChoice, quantised_share
from flowrl.quantization.rollout_model import RolloutModel, prepare, recompilations
from flowrl.sampling.rollout import Timer
from flowrl.sampling.rollout import sample_request
from flowrl.sampling.rollout import submit_images
from flowrl.sampling.rollout import policy_velocity
from flowrl.sampling.rollout import rollout_model_velocity
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, decode, with_network
from flowrl.sampling.source import Sampler
from flowrl.sampling.two_stage import Explorer, break_even_gain, two_stage_ratio
from flowrl.scoring.combine import FailureLimit
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.training.loop import Learner
from flowrl.trees import presets
from flowrl.trees.plan import TreePlan
from flowrl.utils.distributed import Runtime

# --- What a run of two stages cost, beside what the cost model says of it ----------------------

ALLOWED = 1.10  # the measured ratio by the predicted one: what the cost model leaves out
SECONDS = ("single", "two", "exact_step", "low_step", "peft_step", "finish")
Seconds = dict[str, float]

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
    "predicted": "predicted ratio",
    "q_to_break_even": "q from which two stages pay",
    "to_uncompiled_peft": "ratio to N with uncompiled PEFT",
    "recompiled": "graphs compiled again",
    "peak_memory_gb": "peak memory, GB",
}


def labelled(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for people: a line for each of its numbers that has a label."""
    return [{"what": LABELS[name], "is": row[name]} for name in row if name in LABELS]


def verdict(row: Mapping[str, Any]) -> str:
    """One sentence: what was measured beside what the cost model predicted."""
    within = "within" if row["of_predicted"] <= row["allowed"] else "above"
    return (
        f"measured {row['measured']:.3f}, predicted {row['predicted']:.3f}: "
        f"{row['of_predicted']:.2f} times, {within} {row['allowed']:.2f}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCounts:
    """How many of how many images of a prompt are kept, and steps to explore and regenerate.

    Raises UserError for counts the cost model does not know.
    """

    keep: int
    candidates: int
    preview_steps: int
    steps: int

    def __post_init__(self) -> None:
        try:
            self.ratio(1.0, 0.0)
        except ValueError as error:
            raise UserError(str(error)) from error
        if not 2 <= self.preview_steps <= self.steps:
            raise UserError(
                f"the counts {self} draw candidates in {self.preview_steps} steps, expected 2 to "
                f"the {self.steps} of a kept image"
            )

    def ratio(self, gain: float, fixed: float) -> float:
        """By the cost model, see `two_stage_ratio`."""
        return two_stage_ratio(**asdict(self), gain=gain, fixed=fixed)

    def scaled(self, factor: float) -> "MeasuredCounts":
        """Fewer images in the same proportion. Raises UserError where they are not whole."""
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
    """24/96@6/10: kept / candidates @ steps of a candidate / of a kept one. Raises UserError."""
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
    """Best seconds of one run. single: drawing all candidates exactly; two: both stages; split: its
    parts, which add up. counts: of each of the prompts.

    Of one full batch, an image: exact_step, low_step, peft_step, a step of the exact network, of
    the one that explores, and of the network as it is trained, its adapter beside the weights and
    not compiled; finish, decoding and scoring. graphs: compiled after the first round, over several
    changes of the adapter. memory: most bytes at once during both stages, None on a CPU.
    """

    device: str
    prompts: int
    counts: MeasuredCounts
    batch: int
    single: float
    two: float
    split: Seconds
    exact_step: float
    low_step: float
    peft_step: float
    finish: float
    graphs: int
    memory: int | None

    @property
    def gain(self) -> float:
        """q: how many times as fast as an exact step one of exploring is."""
        return self.exact_step / self.low_step

    @property
    def fixed(self) -> float:
        """phi: decoding and scoring an image, by drawing it in exact steps."""
        return self.finish / (self.counts.steps * self.exact_step)

    @property
    def measured(self) -> float:
        return self.two / self.single

    @property
    def predicted(self) -> float:
        """By the cost model with the gain and the fixed cost of this run."""
        return self.counts.ratio(self.gain, self.fixed)

    @property
    def to_peft(self) -> float:
        """Two stages by one stage of the network as it is trained, which is computed from its
        seconds a step: the published baseline (2604.06916)."""
        images = self.prompts * self.counts.candidates
        return self.two / (images * (self.counts.steps * self.peft_step + self.finish))

    def row(self) -> dict[str, Any]:
        """For programs; LABELS has the names for people."""
        images, ratio = asdict(self.counts), self.measured / self.predicted
        seconds = {name: getattr(self, name) for name in SECONDS}
        found = {"q": self.gain, "phi": self.fixed, "measured": self.measured}
        found |= {"predicted": self.predicted, "of_predicted": ratio, "allowed": ALLOWED}
        found |= {"q_to_break_even": break_even_gain(**images, fixed=self.fixed)}
        found |= {"to_uncompiled_peft": self.to_peft, "recompiled": self.graphs}
        memory = {"peak_memory_gb": self.memory and self.memory / 1e9}
        where = {"device": self.device, "prompts": self.prompts, "batch": self.batch}
        return where | images | seconds | found | memory | {"split": self.parts()}

    def parts(self) -> list[dict[str, Any]]:
        """The split of both stages: seconds, and the share of them all."""
        return [
            {"part": name, "seconds": seconds, "share": seconds / self.two}
            for name, seconds in self.split.items()
        ]


def columns_of(resolved: Resolved) -> dict[str, Any]:
    """What a precision became, for a row."""
    return {"precision": precision_name(resolved), "native": resolved.native}


@contextmanager
def own_words() -> Iterator[None]:
    """Where no layer is left to be quantised, name the option of a bench that changes it."""
    try:
        yield
    except UserError as error:
        told, nothing, _ = str(error).partition("is left to be quantised")
        if not nothing:
            raise
        raise UserError(f"{told}{nothing}: give --min-dim 0, or a precision of bf16") from error


# --- What two stages cost beside one stage that draws all candidates exactly, measured in one --

SMALL = 1e-3  # standard deviation of what a round adds to the adapter


def full_batch(most: int, *counts: int) -> int:
    """The largest batch of at most `most` rows that divides all counts of images.

    The cost model knows only full batches, and a compiled network only one size of them.
    """
    common = math.gcd(*counts)
    return max(size for size in range(1, min(most, common) + 1) if common % size == 0)


def measure(
    source: Sampler, peft: RolloutGenerator, learn: Callable[[], None], *, repeats: int
) -> Costs:
    """Rounds of every job in turn, so that a busy machine disturbs all alike; the best counts.

    source: explores and draws exactly, as it trains; without audits. peft: the stage that draws
    with the network as it is trained. learn: changes the adapter, once a round, so that there are
    new weights to put in. A first round warms up, and compiles.
    """
    assert source.explorer is not None
    exact, preview, plan = source.generator, source.explorer.plan(0), source.plan(0)
    candidates = source.request(0, preview)
    low, _ = source.explorer.preview(0, candidates)
    every = replace(plan, roots=preview.roots)
    single = replace(source, explorer=None, plan=lambda iteration: every)
    graphs: list[int] = []
    peak = Peak(exact.backbone.device)
    best = best_parts(
        {
            "learn": lambda: learn() or {},
            "single": lambda: _collect(single, None),
            "two": lambda: peak.of(lambda: _collect(source, low)),
            "exact": lambda: _batch(exact, candidates, plan, finish=True),
            "low": lambda: _batch(low, candidates, preview),
            "peft": lambda: _batch(peft, candidates, plan),
            "graphs": lambda: graphs.append(recompilations()) or {},
        },
        repeats,
    )
    two = best["two"]
    return Costs(
        device=device_name(exact.backbone.device),
        prompts=len(candidates.prompt) // preview.roots,
        counts=MeasuredCounts(
            keep=plan.roots,
            candidates=preview.roots,
            preview_steps=low.num_inference_steps,
            steps=exact.num_inference_steps,
        ),
        batch=exact.batch_size,
        single=best["single"]["total"],
        two=two.pop("total"),
        split=two,
        exact_step=best["exact"]["step"],
        low_step=best["low"]["step"],
        peft_step=best["peft"]["step"],
        finish=best["exact"]["finish"],
        graphs=graphs[-1] - graphs[0],
        memory=peak.bytes,
    )


def best_parts(jobs: dict[str, Callable[[], Seconds]], repeats: int) -> dict[str, Seconds]:
    """Of each job the seconds of its parts: all of them from its best round where it has a total,
    else each the best. Every round runs all jobs; a first one warms up."""
    rounds: dict[str, list[Seconds]] = {name: [] for name in jobs}
    for number in range(repeats + 1):
        for name, job in jobs.items():
            found = job()
            if number:
                rounds[name].append(found)
    return {
        name: min(found, key=lambda parts: parts["total"])
        if "total" in found[0]
        else {part: min(each[part] for each in found) for part in found[0]}
        for name, found in rounds.items()
    }


@torch.no_grad()
def move(policy: Policy) -> None:
    """Change the adapter as an update would, so that there are new weights to put in."""
    for parameter in policy.parameters():
        parameter += SMALL * torch.randn_like(parameter)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def on_gpu(device: str) -> bool:
    """Whether that name of a device, auto among them, becomes a CUDA device here."""
    return device in ("auto", "cuda") and torch.cuda.is_available()


# --- jobs ---------------------------------------------------------------------------------------


def _collect(source: Sampler, low: RolloutGenerator | None) -> Seconds:
    """A whole rollout as training draws it. low: the stage that explores; None explores nothing."""
    clock = Clock(source.generator.backbone.device)
    watch = Watch(clock)
    timed = replace(source, generator=clocked(source.generator, clock, "regenerate"))
    stages = {"regenerate": source.generator}
    if low is not None and source.explorer is not None:
        explore = clocked(low, clock, "explore")
        explorer = replace(source.explorer, preview=lambda iteration, candidates: (explore, {}))
        timed = replace(timed, explorer=explorer)
        stages = {"explore": low} | stages
    began = clock.now()
    timed.collect(0, watch)
    total = clock.now() - began
    split: Seconds = {}
    for part, stage in stages.items():
        drawing, scoring = (watch.seconds[name] for name in stage.times)
        sync, decoding = (clock.seconds[f"{part}: {what}"] for what in ("sync", "decode"))
        split |= {f"{part}: sync": sync, f"{part}: draw": drawing - sync - decoding}
        split |= {f"{part}: decode": decoding, f"{part}: reward": scoring}
    return split | {"select and other": total - sum(split.values()), "total": total}


@torch.no_grad()
def _batch(
    stage: RolloutGenerator, request: RolloutRequest, plan: TreePlan, *, finish: bool = False
) -> Seconds:
    """One full batch, by image: a "step" of drawing it, and to "finish" it, decoding and scoring,
    where asked for. New weights are in place before."""
    part = request.take(torch.arange(min(stage.batch_size, len(request.prompt))))
    clock, schedule, scoring = (
        Clock(stage.backbone.device),
        stage.schedule(),
        Scoring(specs=stage.specs),
    )
    with stage.runtime.autocast():
        cond = stage.text_cache(part.prompts)
    with stage.network() as velocity:
        with clock.of("sample_request"):
            tree = sample_request(
                stage.backbone, velocity, cond, part, plan, schedule, stage.batch_size
            )
        if finish:
            with clock.of("finish"):
                images = decode(stage.backbone, tree.leaves(), stage.decode_batch)
                submit_images(scoring, images, part, len(tree.leaf))
                scoring.result()
    rows = len(part.prompt)
    found = {"step": clock.seconds["sample_request"] / stage.num_inference_steps / rows}
    return found | ({"finish": clock.seconds["finish"] / rows} if finish else {})


class Peak:
    """The most memory of a GPU that was in use at once, over all that was run in it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.bytes: int | None = None

    def of(self, job: Callable[[], Seconds]) -> Seconds:
        if self.device.type != "cuda":
            return job()
        torch.cuda.reset_peak_memory_stats(self.device)
        found = job()
        self.bytes = max(self.bytes or 0, torch.cuda.max_memory_allocated(self.device))
        return found


class Clock:
    """Seconds of named parts, none at the beginning.

    Of a GPU, which is waited for at both ends of each; on a CPU of its own time, which other work
    on the machine does not stretch.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: Seconds = {}

    def now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = self.now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - began


class Watch(Timer):
    """A stopwatch that goes by a clock."""

    def __init__(self, clock: Clock):
        self.seconds = {}
        self._clock, self._last = clock, clock.now()

    def lap(self, name: str) -> None:
        now = self._clock.now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def clocked(stage: RolloutGenerator, clock: Clock, part: str) -> RolloutGenerator:
    """The same stage; the clock learns what new weights, "sync", and decoding take of it."""
    backbone, own = copy.copy(stage.backbone), stage.backbone

    def decoded(x0: torch.Tensor) -> torch.Tensor:
        with clock.of(f"{part}: decode"):
            return own.decode(x0)

    @contextmanager
    def network() -> Iterator:
        with ExitStack() as stack:
            with clock.of(f"{part}: sync"):
                velocity = stack.enter_context(stage.network())
            yield velocity
            with clock.of(f"{part}: sync"):
                stack.close()

    backbone.decode = decoded  # type: ignore[method-assign]
    return replace(stage, backbone=backbone, network=network)


# --- Two stages against one on a pipeline that is there, by the options that training has ------

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
    """24-of-96 and the like as Sol-RL (2604.06916) draws it, trained by NFT, brightness its reward.

    batch: most images in one forward; the largest that all batches can be full of is taken.
    min_dim: of layers that are quantised, None for the backbone's or, built in, 128. compile: None
    does on a GPU. -> see `Costs.row`. Raises UserError for a precision that the device lacks, for
    counts that keep one image, and where no layer is left to be quantised.
    """
    if counts.keep < 2:
        raise UserError(
            f"the counts {counts} keep one image of a prompt, which is compared with none: keep "
            "2 or more"
        )
    torch.set_num_threads(threads)
    runtime = Runtime(device=device)
    resolved = resolve(precision, capability_of(runtime.device))
    if min_dim is None and model in TINY:
        min_dim = TINY_MIN_DIM
    explore = {
        "candidates": counts.candidates,
        "num_inference_steps": counts.preview_steps,
        "precision": precision,
        "min_dim": min_dim,
        "audit": {"every": 0},
    }
    rollout = {
        "prompts_per_iteration": prompts,
        "group_size": counts.keep,
        "num_inference_steps": counts.steps,
        "batch_size": full_batch(batch, prompts * counts.candidates, prompts * counts.keep),
        "merge_lora": True,
        "compile": on_gpu(device) if compile is None else compile,
        "explore": explore,
    }
    with _learner(model, runtime, rollout) as learner:
        source = learner.source
        assert isinstance(source, Sampler)  # a bench never reads a store
        peft = peft_stage(learner, source.generator)
        costs = measure(source, peft, lambda: update(learner.policy), repeats=repeats)
    what = {"model": model, **columns_of(resolved), "compiled": rollout["compile"]}
    return what | costs.row()


def peft_stage(learner: Learner, exact: RolloutGenerator) -> RolloutGenerator:
    """The stage that draws with the network as it is trained: the adapter beside the weights."""
    backbone = learner.policy.backbone
    network = functools.partial(
        policy_velocity, learner.policy, backbone, OLD, merged=False, runtime=exact.runtime
    )
    return replace(exact, backbone=backbone, network=network)


def update(policy: Policy) -> None:
    """A change of the adapter, which the old policy follows."""
    move(policy)
    policy.update_old(0.5)


@contextmanager
def _learner(model: str, runtime: Runtime, rollout: dict[str, Any]) -> Iterator[Learner]:
    """Its run folder is gone afterwards; only what a precision became is written there."""
    with tempfile.TemporaryDirectory() as folder:
        config = parse_config(
            {
                "pipeline": {
                    "path": model,
                    "device": runtime.device.type,
                    "max_sequence_length": 12,
                },
                "prompts": {"train": "tiny:geneval:train"},
                "rewards": [{"name": "brightness"}],
                "objective": {"kind": "nft", "noising": {"count": 1}},
                "rollout": {"tree": {"kind": "ode"}} | rollout,
                "optim": {"micro_batch": rollout["batch_size"]},
                "run": {"output_dir": folder},
            }
        )
        with own_words():
            learner = build_learner(config, runtime, ProvidedObjects())
        yield learner


# --- Two stages against one on networks of published sizes with random weights -----------------

RANK, ALPHA = 32, 64  # of Sol-RL (2604.06916)


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """A size on a device, ready to draw: the trained one, its exact copy and its cheap one."""

    name: str
    backbone: RandomBackbone
    policy: Policy
    runtime: Runtime
    resolved: Resolved
    choices: Sequence[LayerChoice]
    exact: RolloutModel
    low: RolloutModel
    compiled: bool


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
    """One row a plan: `Costs.row`, and what is quantised.

    Raises UserError for an unknown name, on a CPU for a network of full depth, for a precision
    that the device lacks, and for kernels that do not agree with their emulation.
    """
    model_spec(name)
    runtime = Runtime(device=device)
    if runtime.device.type == "cpu" and layers is None:
        raise UserError(
            f"{name} at its full depth would take a CPU hours: use a GPU, or give --layers 2 to "
            "see that everything runs, which says nothing of speed"
        )
    compile = on_gpu(device) if compile is None else compile
    networks = build_networks(
        name, precision, runtime, pixels=pixels, layers=layers, min_dim=min_dim, compile=compile
    )
    rows = []
    for plan in plans:
        source = sampler_of(networks, plan, prompts, batch, decode_batch)
        rows.append(_row(networks, plan, source, repeats, layers))
    torch.compiler.reset()  # which would hold on to this network beside the next
    return rows


def build_networks(
    name: str,
    precision: str,
    runtime: Runtime,
    *,
    pixels: int | None,
    layers: int | None,
    min_dim: int | None,
    compile: bool,
) -> Networks:
    """bf16, with a LoRA of rank 32 whose second factor is not 0, as after some training."""
    resolved = resolve(precision, capability_of(runtime.device))
    backbone = RandomBackbone(
        name, device=runtime.device, dtype=torch.bfloat16, pixels=pixels, layers=layers
    )
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    move(policy)
    with own_words():
        choices, backend = prepare(
            policy.network, resolved, dtype=backbone.dtype, device=runtime.device, min_dim=min_dim
        )
    return Networks(
        name=name,
        backbone=backbone,
        policy=policy,
        runtime=runtime,
        resolved=resolved,
        choices=choices,
        exact=RolloutModel(policy, (), Plain(backbone.dtype), compile=compile),
        low=RolloutModel(policy, choices, backend, compile=compile),
        compiled=compile,
    )


def sampler_of(
    networks: Networks, plan: MeasuredCounts, prompts: int, batch: int, decode_batch: int
) -> Sampler:
    """Draws and explores as training does; brightness is its reward, the text is noise."""
    records = [PromptRecord(uid=str(i), text=f"prompt {i}") for i in range(prompts)]
    size = full_batch(batch, prompts * plan.candidates, prompts * plan.keep)
    exact = _stage(networks, networks.exact, plan.steps, size, decode_batch)
    low = _stage(networks, networks.low, plan.preview_steps, size, decode_batch)
    low = replace(low, times=EXPLORING)
    preview = presets.ode(plan.preview_steps, plan.candidates)
    return Sampler(
        generator=exact,
        plan=lambda iteration: presets.ode(plan.steps, plan.keep),
        prompts=PromptSampler(records, prompts, seed=0),
        seed=0,
        explorer=Explorer(
            preview=lambda iteration, candidates: (low, {}),
            plan=lambda iteration: preview,
            mode="best_worst",
        ),
    )


def _stage(
    networks: Networks, twin: RolloutModel, steps: int, batch: int, decode_batch: int
) -> RolloutGenerator:
    backbone = with_network(networks.backbone, twin.network)
    return RolloutGenerator(
        backbone=backbone,
        network=functools.partial(
            rollout_model_velocity, twin, backbone, POLICY, runtime=networks.runtime
        ),
        text_cache=TextCache(networks.backbone),
        specs=[RewardSpec(name="brightness", reward=load_reward("brightness"))],
        runtime=networks.runtime,
        failures=FailureLimit(max_invalid_fraction=0.0),
        num_inference_steps=steps,
        kernel=KERNELS["flow_sde"],
        noise_level=0.0,  # no plan here has noise
        batch_size=batch,
        decode_batch=decode_batch,
        whole_prompts=False,
    )


def _row(
    networks: Networks, plan: MeasuredCounts, source: Sampler, repeats: int, layers: int | None
) -> dict[str, Any]:
    network = functools.partial(
        policy_velocity, networks.policy, networks.backbone, POLICY,
        merged=False, runtime=networks.runtime,
    )  # fmt: skip
    peft = replace(source.generator, backbone=networks.backbone, network=network)
    costs = measure(source, peft, lambda: move(networks.policy), repeats=repeats)
    made = [choice for choice in networks.choices if choice.format]
    return {
        "size": networks.name,
        "plan": str(plan),
        "layers": "all" if layers is None else f"{layers} of each kind: says nothing of speed",
        "pixels": networks.backbone.pixels,
        **columns_of(networks.resolved),
        "compiled": networks.compiled,
        "quantised_layers": len(made),
        "quantised_share": quantised_share(networks.choices) if made else 0.0,
        "cheap_copy_gb": networks.low.nbytes() / 1e9,
        "exact_copy_gb": networks.exact.nbytes() / 1e9,
    } | costs.row()
