"""Time and memory of jobs that take turns, and of the phases of one of them."""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from flowrl.sampling.rollout import RolloutGenerator

Seconds = dict[str, float]
Moment = torch.cuda.Event | float


Job = TypeVar("Job")


def in_turns(jobs: Mapping[str, Callable[[], Job]], repeats: int) -> dict[str, list[Job]]:
    """Return what each job returned in each round.

    Every round runs all jobs, there and back, so that a busy machine and one that becomes slower
    disturb all alike; a first one warms up. Python's garbage is collected between rounds alone.
    """
    rounds: dict[str, list[Job]] = {name: [] for name in jobs}
    gc.collect()
    gc.freeze()  # what was there before is not looked through each time
    gc.disable()
    try:
        for number in range(repeats + 1):
            gc.collect()  # between rounds: within one it would fall on any job
            for name in list(jobs)[:: -1 if number % 2 else 1]:
                found = jobs[name]()
                if number:
                    rounds[name].append(found)
    finally:
        gc.enable()
        gc.unfreeze()
    return rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTurn:
    """What one turn of a job took."""

    wall: float  # seconds
    cpu: float  # seconds of all threads of this process


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTurns:
    """What a job took in each round of `time_turns`."""

    turns: tuple[TimedTurn, ...]
    on_gpu: bool  # whose work does not show in the CPU's seconds

    @property
    def seconds(self) -> tuple[float, ...]:
        """Return the CPU's seconds, which other work stretches less, or on a GPU the clock's."""
        return self.wall if self.on_gpu else self.cpu

    @property
    def wall(self) -> tuple[float, ...]:
        return tuple(turn.wall for turn in self.turns)

    @property
    def cpu(self) -> tuple[float, ...]:
        return tuple(turn.cpu for turn in self.turns)


def time_turns(
    jobs: Mapping[str, Callable[[], object]], repeats: int, device: torch.device
) -> dict[str, TimedTurns]:
    """Time jobs that take turns: see `in_turns`."""
    on_gpu = device.type == "cuda"

    def timed(job: Callable[[], object]) -> TimedTurn:
        wall, cpu = time.perf_counter(), time.process_time()
        job()
        if on_gpu:
            torch.cuda.synchronize(device)
        return TimedTurn(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)

    found = in_turns({name: lambda job=job: timed(job) for name, job in jobs.items()}, repeats)
    return {name: TimedTurns(turns=tuple(turns), on_gpu=on_gpu) for name, turns in found.items()}


def compare_turns(job: TimedTurns, other: TimedTurns) -> dict[str, float | str]:
    """Return what a job took, and its ratio to another in the same round, as a row.

    Each is the mean of the middle half of the rounds, and the spread is that half.
    """
    ratios = [a / b for a, b in zip(job.seconds, other.seconds, strict=True)]
    return {
        "seconds": middle_mean(job.seconds),
        "ratio": middle_mean(ratios),
        "spread": spread(ratios),
        "wall seconds": middle_mean(job.wall),
        "wall ratio": middle_mean([a / b for a, b in zip(job.wall, other.wall, strict=True)]),
    }


def middle_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half: as deaf to a disturbed round as a median, and steadier.

    Of three values it is the median.
    """
    cut = (len(values) + 1) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def spread(values: Sequence[float]) -> str:
    """Return where the middle half of the rounds' values lies."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return f"{low:.3f} to {high:.3f}"


def best_of(jobs: Mapping[str, Callable[[], object]], repeats: int) -> Seconds:
    """Return the best seconds of each job on the clock, which take turns: see `in_turns`."""
    turns = time_turns(jobs, repeats, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {name: min(found.wall) for name, found in turns.items()}


@dataclass(slots=True)
class Phase:
    """What a phase took."""

    seconds: float = 0.0
    forward_seconds: float = 0.0  # inside the transformer's forwards
    forwards: int = 0
    peak: int | None = None  # most bytes of a GPU in use at once, None elsewhere


@dataclass(slots=True)
class _Stretch:
    name: str
    began: Moment
    ended: Moment | None = None
    forwards: list[tuple[Moment, Moment]] = field(default_factory=list)


class Timeline:
    """Phases that follow one another.

    On a GPU their ends are events in its own queue, read at the end, so that nothing waits to be
    measured; seconds in which it waits for the host count where they fall. On a CPU it is the
    processor's own time, which other work on the machine does not stretch.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._past: list[_Stretch] = []
        self._now: _Stretch | None = None
        self._peaks: dict[str, int] = {}
        self._forward: Moment | None = None

    def enter(self, name: str | None) -> None:
        """Count what follows for this phase, None for no phase."""
        moment, on_cuda = self._moment(), self.device.type == "cuda"
        if self._now is not None:
            self._now.ended = moment
            self._past.append(self._now)
            if on_cuda:
                peak = torch.cuda.max_memory_allocated(self.device)
                self._peaks[self._now.name] = max(peak, self._peaks.get(self._now.name, 0))
        self._now = None if name is None else _Stretch(name, moment)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def forwards_of(self, network: nn.Module) -> Iterator[None]:
        """Count this network's forwards apart from all else."""

        def before(*_: object) -> None:
            self._forward = self._moment()

        def after(*_: object) -> None:
            if self._now is not None and self._forward is not None:
                self._now.forwards.append((self._forward, self._moment()))

        handles = network.register_forward_pre_hook(before), network.register_forward_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def phases(self) -> dict[str, Phase]:
        """End the last phase, wait for the GPU, and return what each phase took."""
        self.enter(None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found: dict[str, Phase] = {}
        for stretch in self._past:
            own = Phase(peak=self._peaks.get(stretch.name))
            phase = found.setdefault(stretch.name, own)
            phase.seconds += _between(stretch.began, stretch.ended)
            phase.forward_seconds += sum(_between(*pair) for pair in stretch.forwards)
            phase.forwards += len(stretch.forwards)
        return found

    def _moment(self) -> Moment:
        if self.device.type != "cuda":
            return time.process_time() if self.device.type == "cpu" else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(began: Moment, ended: Moment | None) -> float:
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        return began.elapsed_time(ended) / 1000
    assert isinstance(began, float) and isinstance(ended, float)
    return ended - began


def watched(
    generator: RolloutGenerator,
    timeline: Timeline,
    *,
    sync: str,
    sample: str,
    decode: str,
    reward: str,
) -> RolloutGenerator:
    """Return the same generator, whose phases have these names.

    sync: new weights are put in, before and after. decode: ends when the images are on the CPU.
    reward: begins when all is sampled, and nothing here ends it.
    """
    backbone, own = copy.copy(generator.backbone), generator.backbone

    def decoded(x0: Tensor) -> Tensor:
        timeline.enter(decode)
        images = own.decode(x0).cpu()
        timeline.enter(sample)
        return images

    @contextmanager
    def network() -> Iterator:
        with ExitStack() as stack:
            timeline.enter(sync)
            velocity = stack.enter_context(generator.network())
            timeline.enter(sample)
            yield velocity
            timeline.enter(sync)
        timeline.enter(reward)

    backbone.decode = decoded  # type: ignore[method-assign]
    return replace(generator, backbone=backbone, network=network)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def on_gpu(device: str) -> bool:
    """Return whether this name of a device, auto among them, becomes a CUDA device here."""
    return device in ("auto", "cuda") and torch.cuda.is_available()
