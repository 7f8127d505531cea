"""Where the loop gets its rollouts: `Sampler` samples them with the policy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from flowrl.backbones.policy import Policy
from flowrl.functional.noise import noise_seed
from flowrl.prompts.records import PromptSampler
from flowrl.sampling.rollout import (
    RolloutGenerator,
    RolloutRequest,
    Samples,
    Timer,
    group_request,
)
from flowrl.sampling.two_stage import Explorer
from flowrl.scoring.combine import train_weights
from flowrl.trajectory import Explored, Rollout, Tree
from flowrl.trees.plan import TreePlan


class Source(Protocol):
    """A source of rollouts: `Sampler` samples them, `StoredGroups` reads them from disk."""

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Return this process's share of an iteration's images, with the scores of all images."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples rollouts with the policy. All randomness is a function of seed and iteration."""

    generator: RolloutGenerator  # of the images that are learned from
    plan: Callable[[int], TreePlan]  # of an iteration
    prompts: PromptSampler
    seed: int
    explorer: Explorer | None = None  # selects the trees among more candidates; None samples all
    retained: int | None = None  # trees of a prompt that keep its own words, see `group_request`

    def request(self, iteration: int, plan: TreePlan) -> RolloutRequest:
        """Return all processes' trees of an iteration."""
        prompts = self.prompts.at(iteration)
        return group_request(
            prompts, plan, seed=self.seed, iteration=iteration, retained=self.retained
        )

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Sample trees of the iteration's prompts, decode and score their images."""
        plan, explored = self.plan(iteration), None
        if self.explorer is None:
            request = self.request(iteration, plan)
        else:
            candidates = self.request(iteration, self.explorer.plan(iteration))
            request, explored = self.explorer.explore(iteration, candidates, plan.roots, timer)
        samples = self.generator.sample(request, plan, timer)
        return self.rollout(iteration, samples, timer, explored)

    def rollout(
        self, iteration: int, samples: Samples, timer: Timer, explored: Explored | None = None
    ) -> Rollout:
        """Return the rollout of an iteration's samples, with the scores of all processes."""
        scores = self.generator.score(samples, timer)
        tree = Tree.cat([tree for tree, _ in scores.images])
        timer.seconds |= {f"time/reward/{n}": s for n, s in scores.result.seconds.items()}
        return Rollout(
            tree=tree,
            cond=samples.cond,
            prompts=tuple(p.text for p in samples.local.prompts),
            metadata=tuple(p.metadata for p in samples.local.prompts),
            images=torch.cat([images for _, images in scores.images]),
            trees=samples.trees,
            scores=scores.result.scores,
            applicable=scores.result.applicable,
            terms=scores.terms,
            names=scores.result.names,
            weights=torch.tensor(train_weights(self.generator.specs)),
            reward=scores.reward,
            valid=scores.valid,
            group=scores.group,
            log_prob=self.generator.runtime.gather(tree.log_prob),
            seed=learning_seed(self.seed, iteration),
            explored=explored,
        )


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


def learning_seed(seed: int, iteration: int) -> int:
    """Return the seed of the randomness in learning from an iteration's rollout."""
    return noise_seed(seed=seed, iteration=iteration, prompt="", root=0, step=0, role="learn")
