"""Where rollouts come from: the policy grows groups of trees, and rewards judge the pictures."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowrl.aggregate import FailureLimit, combine, train_weights
from flowrl.backbones.base import Backbone
from flowrl.encode import TextCache
from flowrl.functional.sde import StepKernel
from flowrl.noise import noise_seed
from flowrl.policy import POLICY, Policy
from flowrl.prompts import PromptSampler
from flowrl.reward import RewardSpec
from flowrl.rollout import (
    Request,
    Stopwatch,
    decode,
    draw,
    gathered,
    group_request,
    hand_in,
)
from flowrl.runtime import Runtime
from flowrl.samplers.schedule import Schedule
from flowrl.scoring import Scoring
from flowrl.trajectory import Conditioning, Rollout, Tree
from flowrl.trees.plan import TreePlan


class Source(Protocol):
    """Where the loop gets its rollouts: `Sampler` draws them, `StoredGroups` reads them."""

    def collect(self, iteration: int, watch: Stopwatch) -> Rollout:
        """This process's share of an iteration's pictures, with the scores of all of them."""
        ...

    def keep(self) -> None:
        """Write down what another session can use. All processes call it together."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """How images are drawn: see the options of the same names under `rollout`."""

    plan: Callable[[int], TreePlan]  # of a training iteration
    steps: int
    kernel: StepKernel
    noise_level: float
    batch_size: int
    decode_batch: int
    merge_lora: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The policy draws. All randomness is a function of seed and iteration.

    adapter: who draws, the policy or the old one. whole_prompts: all trees of a prompt are drawn by
    one process, for objectives and rewards that compare them. retained: trees of a prompt that keep
    its own words, see `group_request`; `Rollout.prompts` are the prompts' own words in any case.
    """

    backbone: Backbone
    policy: Policy
    encode: TextCache
    prompts: PromptSampler
    specs: Sequence[RewardSpec]
    runtime: Runtime
    rollout: RolloutSettings
    failures: FailureLimit
    seed: int
    adapter: str = POLICY
    whole_prompts: bool = False
    retained: int | None = None

    def schedule(self) -> Schedule:
        r = self.rollout
        return Schedule(sigmas=self.backbone.sigmas(r.steps), kernel=r.kernel, level=r.noise_level)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """The adapter that draws, folded into the weights where that is wanted."""
        merged, policy = self.rollout.merge_lora, self.policy
        # Folded before autocast begins, which would compute the change of the weights in 16 bits.
        network = policy.merged(self.adapter) if merged else policy.using(self.adapter)
        with torch.no_grad(), network, self.runtime.autocast():
            yield

    def request(self, iteration: int, plan: TreePlan) -> Request:
        """The trees of all processes."""
        return group_request(
            self.prompts.at(iteration),
            plan,
            seed=self.seed,
            iteration=iteration,
            retained=self.retained,
        )

    def collect(self, iteration: int, watch: Stopwatch) -> Rollout:
        """Grow this process's share of the trees, score it, and learn all processes' scores."""
        plan, scoring = self.rollout.plan(iteration), Scoring(specs=self.specs)
        request = self.request(iteration, plan)
        unit = plan.roots if self.whole_prompts else 1
        trees = self.runtime.share(len(request.prompt), unit)
        own = request.take(trees)
        with torch.no_grad(), self.runtime.autocast():
            cond = self.encode(own.prompts)
        with self.runtime.together():
            tree, images = self._drawn(own, plan, cond, scoring)
            watch.lap("time/rollout")
            result = scoring.result()
        result = gathered(result, self.runtime)
        watch.lap("time/reward")
        watch.note({f"time/reward/{name}": took for name, took in result.seconds.items()})
        group = request.group.repeat_interleave(len(tree.leaf))
        reward, valid, terms = combine(self.specs, result, group)
        self.failures.check(valid, result.errors)
        return Rollout(
            tree=tree,
            cond=cond,
            prompts=tuple(p.text for p in own.prompts),
            metadata=tuple(p.metadata for p in own.prompts),
            images=images,
            trees=trees,
            scores=result.scores,
            applicable=result.applicable,
            terms=terms,
            names=result.names,
            weights=torch.tensor(train_weights(self.specs)),
            reward=reward,
            valid=valid,
            group=group,
            log_prob=self.runtime.gather(tree.log_prob),
            seed=learning_seed(self.seed, iteration),
        )

    def _drawn(
        self, own: Request, plan: TreePlan, cond: Conditioning, scoring: Scoring
    ) -> tuple[Tree, Tensor]:
        """This process's trees and their pictures, which rewards get as soon as they are decoded.

        A batch of roots at a time, which makes batches as full as all at once: whatever the width
        of a tree at some step, so many of them make whole batches.
        """
        r, backbone, schedule = self.rollout, self.backbone, self.schedule()
        trees, images = [], []
        with self.drawing():
            for rows in torch.arange(len(own.prompt)).split(r.batch_size):
                part = own.only(rows)
                tree = draw(
                    backbone, backbone.velocity, cond, part, plan, schedule, r.batch_size
                )  # fmt: skip
                pictures = decode(backbone, tree.leaves(), r.decode_batch)
                images.append(hand_in(scoring, pictures, part, len(tree.leaf)))
                trees.append(tree)
        return Tree.cat(trees), torch.cat(images)

    def keep(self) -> None:
        """Nothing: what it draws is a function of seed, iteration and policy."""


def learning_seed(seed: int, iteration: int) -> int:
    """Of what learning from an iteration's rollout draws, apart from what the rollout drew."""
    return noise_seed(seed=seed, iteration=iteration, prompt="", root=0, step=0, role="learn")
