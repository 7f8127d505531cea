"""What two stages cost beside one stage that draws all candidates exactly, measured in one run."""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from flowrl.backbones.policy import Policy
from flowrl.bench.bench_costs import Costs, Counts, Seconds
from flowrl.quantization.compiling import recompilations
from flowrl.sampling.rollout import Request, Stopwatch, decode, draw, hand_in
from flowrl.sampling.source import Sampler
from flowrl.sampling.stage import Stage
from flowrl.scoring.scorer import Scoring
from flowrl.trees.plan import TreePlan

SMALL = 1e-3  # standard deviation of what a round adds to the adapter


def full_batch(most: int, *counts: int) -> int:
    """The largest batch of at most `most` rows that divides all counts of pictures.

    The cost model knows only full batches, and a compiled network only one size of them.
    """
    common = math.gcd(*counts)
    return max(size for size in range(1, min(most, common) + 1) if common % size == 0)


def measure(source: Sampler, peft: Stage, learn: Callable[[], None], *, repeats: int) -> Costs:
    """Rounds of every job in turn, so that a busy machine disturbs all alike; the best counts.

    source: explores and draws exactly, as it trains; without audits. peft: the stage that draws
    with the network as it is trained. learn: changes the adapter, once a round, so that there are
    new weights to put in. A first round warms up, and compiles.
    """
    assert source.explorer is not None
    exact, preview, plan = source.stage, source.explorer.plan(0), source.plan(0)
    candidates = source.request(0, preview)
    low, _ = source.explorer.stage(0, candidates)
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
        counts=Counts(
            keep=plan.roots, candidates=preview.roots, preview_steps=low.steps, steps=exact.steps
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


def _collect(source: Sampler, low: Stage | None) -> Seconds:
    """A whole rollout as training draws it. low: the stage that explores; None explores nothing."""
    clock = Clock(source.stage.backbone.device)
    watch = Watch(clock)
    timed = replace(source, stage=clocked(source.stage, clock, "regenerate"))
    stages = {"regenerate": source.stage}
    if low is not None and source.explorer is not None:
        explore = clocked(low, clock, "explore")
        explorer = replace(source.explorer, stage=lambda iteration, candidates: (explore, {}))
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
def _batch(stage: Stage, request: Request, plan: TreePlan, *, finish: bool = False) -> Seconds:
    """One full batch, by picture: a "step" of drawing it, and to "finish" it, decoding and scoring,
    where asked for. New weights are in place before."""
    part = request.take(torch.arange(min(stage.batch_size, len(request.prompt))))
    clock, schedule, scoring = (
        Clock(stage.backbone.device),
        stage.schedule(),
        Scoring(specs=stage.specs),
    )
    with stage.runtime.autocast():
        cond = stage.encode(part.prompts)
    with stage.network() as velocity:
        with clock.of("draw"):
            tree = draw(stage.backbone, velocity, cond, part, plan, schedule, stage.batch_size)
        if finish:
            with clock.of("finish"):
                pictures = decode(stage.backbone, tree.leaves(), stage.decode_batch)
                hand_in(scoring, pictures, part, len(tree.leaf))
                scoring.result()
    rows = len(part.prompt)
    found = {"step": clock.seconds["draw"] / stage.steps / rows}
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


class Watch(Stopwatch):
    """A stopwatch that goes by a clock."""

    def __init__(self, clock: Clock):
        self.seconds = {}
        self._clock, self._last = clock, clock.now()

    def lap(self, name: str) -> None:
        now = self._clock.now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def clocked(stage: Stage, clock: Clock, part: str) -> Stage:
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
