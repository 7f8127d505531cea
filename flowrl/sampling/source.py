"""Where the loop gets its rollouts: `Sampler` samples them with the policy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from flowrl.backbones.policy import Policy
from flowrl.functional.noise import noise_seed
from flowrl.prompts.records import PromptSampler
from flowrl.sampling.rollout import (
    DrawnTrees,
    RolloutGenerator,
    RolloutRequest,
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
        """Sample and score this process's share of the trees; gather all processes' scores."""
        drawn, explored = self.draw(iteration, timer)
        return self.finish(iteration, drawn, timer, explored)

    def draw(self, iteration: int, timer: Timer) -> tuple[DrawnTrees, Explored | None]:
        """Sample this process's share of the trees, and ask the rewards of their images."""
        plan = self.plan(iteration)
        if self.explorer is None:
            return self.generator.draw(self.request(iteration, plan), plan, timer), None
        previews = self.explorer.plan(iteration)
        request, explored, _ = self.explorer.explore(
            iteration, self.request(iteration, previews), plan.roots, timer
        )
        return self.generator.draw(request, plan, timer), explored

    def finish(
        self, iteration: int, drawn: DrawnTrees, timer: Timer, explored: Explored | None = None
    ) -> Rollout:
        """Wait for the rewards of an iteration's trees; gather all processes' scores."""
        scored = self.generator.finish(drawn, timer)
        tree = Tree.cat([tree for tree, _ in scored.parts])
        timer.seconds |= {f"time/reward/{n}": s for n, s in scored.result.seconds.items()}
        return Rollout(
            tree=tree,
            cond=scored.cond,
            prompts=tuple(p.text for p in scored.own.prompts),
            metadata=tuple(p.metadata for p in scored.own.prompts),
            images=torch.cat([images for _, images in scored.parts]),
            trees=scored.trees,
            scores=scored.result.scores,
            applicable=scored.result.applicable,
            terms=scored.terms,
            names=scored.result.names,
            weights=torch.tensor(train_weights(self.generator.specs)),
            reward=scored.reward,
            valid=scored.valid,
            group=scored.group,
            log_prob=self.generator.runtime.gather(tree.log_prob),
            seed=learning_seed(self.seed, iteration),
            explored=explored,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Samples one iteration ahead of learning (`rollout.staleness: 1`).

    While an iteration is learned from, the rewards of the next one work, which was sampled before
    with the weights of then. These are kept until they were learned from, so that a resumed run
    samples the same images again.
    """

    own: Sampler
    policy: Policy
    adapter: str  # that samples
    last: int  # iteration, before which the run ends
    _drawn: dict[int, DrawnTrees] = field(init=False, default_factory=dict)

    def collect(self, iteration: int, timer: Timer) -> Rollout:
        """Sample the next iteration, then return this one."""
        self.policy.forget_weights(before=iteration)
        drawn = self._drawn.pop(iteration, None)
        if drawn is None:  # the first of a session
            with self.policy.weights_of(iteration, self.adapter):
                drawn, _ = self.own.draw(iteration, timer)
        self.policy.keep_weights(iteration + 1, self.adapter)
        if iteration + 1 < self.last:
            self._drawn[iteration + 1], _ = self.own.draw(iteration + 1, timer)
        return self.own.finish(iteration, drawn, timer)


def learning_seed(seed: int, iteration: int) -> int:
    """Return the seed of the randomness in learning from an iteration's rollout."""
    return noise_seed(seed=seed, iteration=iteration, prompt="", root=0, step=0, role="learn")
