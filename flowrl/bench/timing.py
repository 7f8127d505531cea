"""Time and memory of jobs that take turns, and of the phases of one of them."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from flowrl.sampling.rollout import RolloutGenerator

Seconds = dict[str, float]
Moment = torch.cuda.Event | float


def best_parts(jobs: Mapping[str, Callable[[], Seconds]], repeats: int) -> dict[str, Seconds]:
    """Return the best seconds of the parts of each job.

    Every round runs all jobs, so that a busy machine disturbs all alike; a first one warms up.
    Parts with a "total" all come from the round whose total is least; others are each the least.
    """
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


def best_of(jobs: Mapping[str, Callable[[], None]], repeats: int) -> Seconds:
    """Return the best seconds of each job, see `best_parts`."""

    def timed(job: Callable[[], None]) -> Seconds:
        began = time.perf_counter()
        job()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return {"total": time.perf_counter() - began}

    found = best_parts({name: lambda job=job: timed(job) for name, job in jobs.items()}, repeats)
    return {name: parts["total"] for name, parts in found.items()}


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
