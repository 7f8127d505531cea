"""Where an iteration's time and memory go, told apart without making a GPU wait for the host."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from flowrl.bench.rollout import with_random_rewards
from flowrl.sampling.rollout import Stopwatch
from flowrl.sampling.source import Sampler
from flowrl.trajectory import Rollout

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

    def collect(self, iteration: int, watch: Stopwatch) -> Rollout:
        self.timeline.enter("encode")
        rollout = self.own.collect(iteration, watch)
        self.timeline.enter("training")
        return with_random_rewards(rollout)

    def keep(self) -> None:
        pass


def watched(sampler: Sampler, timeline: Timeline) -> WatchedSampler:
    """The same sampler: drawing begins when its network is made ready, decoding with each batch of
    latents and ends when their pictures are on the CPU, rewards are asked when all is drawn."""
    stage = sampler.stage
    backbone, own = copy.copy(stage.backbone), stage.backbone

    def decode(x0: Tensor) -> Tensor:
        timeline.enter("decode")
        pictures = own.decode(x0).cpu()
        timeline.enter("rollout")
        return pictures

    @contextmanager
    def network() -> Iterator:
        timeline.enter("rollout")
        with stage.network() as velocity:
            yield velocity
        timeline.enter("rewards")

    backbone.decode = decode  # type: ignore[method-assign]
    told = replace(stage, backbone=backbone, network=network)
    return WatchedSampler(own=replace(sampler, stage=told), timeline=timeline)
