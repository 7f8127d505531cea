"""Sources of rollouts for the loop, and sampling ahead of it (`rollout.staleness`)."""

from dataclasses import dataclass, field
from typing import Protocol

from flowrl.backbones.policy import Policy
from flowrl.sampling.rollout import Sampler, Samples, Timer
from flowrl.trajectory import Rollout


class Source(Protocol):
    """A source of rollouts: `Sampler` samples them, `StoredGroups` reads them from disk."""

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Return this process's share of an iteration's images, with the scores of all images."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Samples one iteration ahead of learning (`rollout.staleness: 1`).

    While an iteration is learned from, the rewards score the images of the next one, which were
    sampled with the weights of then. These are kept until they were learned from, so that a resumed
    run samples the same images again.
    """

    sampler: Sampler
    policy: Policy
    adapter: str  # that samples
    last: int  # iteration, before which the run ends
    _samples: dict[int, Samples] = field(init=False, default_factory=dict)

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Sample the next iteration, then return this one."""
        self.policy.forget_weights(before=iteration)
        samples = self._samples.pop(iteration, None)
        if samples is None:  # the first of a session
            with self.policy.weights_of(iteration, self.adapter):
                samples = self._sample(iteration, timer)
        self.policy.keep_weights(iteration + 1, self.adapter)
        if iteration + 1 < self.last:
            self._samples[iteration + 1] = self._sample(iteration + 1, timer)
        return self.sampler.rollout(iteration, samples, timer)

    def _sample(self, iteration: int, timer: Timer) -> Samples:
        plan = self.sampler.plan(iteration)
        return self.sampler.generator.sample(self.sampler.request(iteration, plan), plan, timer)
