"""Where rollouts come from: the policy grows groups of trees, and rewards judge the images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from flowrl.functional.noise import noise_seed
from flowrl.prompts.records import PromptSampler
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, Stopwatch, group_request
from flowrl.sampling.two_stage import Explorer
from flowrl.scoring.combine import train_weights
from flowrl.trajectory import Rollout, Tree
from flowrl.trees.plan import TreePlan


class Source(Protocol):
    """Where the loop gets its rollouts: `Sampler` draws them, `StoredGroups` reads them."""

    def collect(self, iteration: int, watch: Stopwatch) -> Rollout:
        """This process's share of an iteration's images, with the scores of all of them."""
        ...

    def keep(self) -> None:
        """Write down what another session can use. All processes call it together."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The policy draws. All randomness is a function of seed and iteration.

    stage: draws what is learned from; plan: of an iteration. explorer: names the trees that are
    worth it among many more; None draws them all. retained: trees of a prompt that keep its own
    words, see `group_request`; `Rollout.prompts` are the prompts' own words in any case.
    """

    stage: RolloutGenerator
    plan: Callable[[int], TreePlan]
    prompts: PromptSampler
    seed: int
    explorer: Explorer | None = None
    retained: int | None = None

    def request(self, iteration: int, plan: TreePlan) -> RolloutRequest:
        """The plan's trees for the prompts of an iteration, of all processes."""
        return group_request(
            self.prompts.at(iteration),
            plan,
            seed=self.seed,
            iteration=iteration,
            retained=self.retained,
        )

    def collect(self, iteration: int, watch: Stopwatch) -> Rollout:
        """Grow this process's share of the trees, score it, and learn all processes' scores."""
        plan, explored = self.plan(iteration), None
        if self.explorer is None:
            request = self.request(iteration, plan)
        else:
            candidates = self.request(iteration, self.explorer.plan(iteration))
            request, explored = self.explorer(iteration, candidates, plan.roots, watch)
        drawn = self.stage(request, plan, watch)
        tree = Tree.cat([tree for tree, _ in drawn.parts])
        watch.note({f"time/reward/{name}": took for name, took in drawn.result.seconds.items()})
        return Rollout(
            tree=tree,
            cond=drawn.cond,
            prompts=tuple(p.text for p in drawn.own.prompts),
            metadata=tuple(p.metadata for p in drawn.own.prompts),
            images=torch.cat([images for _, images in drawn.parts]),
            trees=drawn.trees,
            scores=drawn.result.scores,
            applicable=drawn.result.applicable,
            terms=drawn.terms,
            names=drawn.result.names,
            weights=torch.tensor(train_weights(self.stage.specs)),
            reward=drawn.reward,
            valid=drawn.valid,
            group=drawn.group,
            log_prob=self.stage.runtime.gather(tree.log_prob),
            seed=learning_seed(self.seed, iteration),
            explored=explored,
        )

    def keep(self) -> None:
        """Nothing: what it draws is a function of seed, iteration and policy."""


def learning_seed(seed: int, iteration: int) -> int:
    """Of what learning from an iteration's rollout draws, apart from what the rollout drew."""
    return noise_seed(seed=seed, iteration=iteration, prompt="", root=0, step=0, role="learn")
