"""One way to make scored pictures: a network in some precision, a schedule, rewards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.backbones.base import Backbone, VelocityField
from flowrl.backbones.text_cache import TextCache
from flowrl.functional.sde import StepKernel
from flowrl.sampling.rollout import Request, Stopwatch, decode, draw, gathered, hand_in
from flowrl.sampling.schedule import Schedule
from flowrl.scoring.combine import FailureLimit, combine
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardResult, RewardSpec
from flowrl.trajectory import Conditioning, Tree
from flowrl.trees.plan import TreePlan
from flowrl.utils.distributed import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """This process's share of a request, and the scores of all processes' pictures.

    own: its trees, of which `trees` (R,) long are the places in the whole request; cond: of the
    prompts of `own`. parts: trees and pictures (n, 3, H, W) as they were drawn, unless they were
    dropped. result: of all G pictures; reward, valid (G,) and terms (G, K): see `combine`; group
    (G,) long.
    """

    own: Request
    trees: Tensor
    cond: Conditioning
    parts: Sequence[tuple[Tree, Tensor]]
    result: RewardResult
    reward: Tensor
    valid: Tensor
    terms: Tensor
    group: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Draws, decodes and scores what it is asked for.

    network: makes a context in which the network stands as it draws, and gives its velocity.
    steps, kernel, level: the schedule and its noise. batch_size: most rows in a forward;
    decode_batch: in the decoder. whole_prompts: all trees of a prompt are drawn by one process.
    times: names of the seconds spent drawing, and then waiting for scores.
    """

    backbone: Backbone
    network: Callable[[], AbstractContextManager[VelocityField]]
    encode: TextCache
    specs: Sequence[RewardSpec]
    runtime: Runtime
    failures: FailureLimit
    steps: int
    kernel: StepKernel
    level: float
    batch_size: int
    decode_batch: int
    whole_prompts: bool
    times: tuple[str, str] = ("time/rollout", "time/reward")

    def schedule(self) -> Schedule:
        sigmas = self.backbone.sigmas(self.steps)
        return Schedule(sigmas=sigmas, kernel=self.kernel, level=self.level)

    def __call__(
        self, request: Request, plan: TreePlan, watch: Stopwatch, *, keep: bool = True
    ) -> Scored:
        """Grow this process's share of the request's trees, and learn all processes' scores.

        The request has the plan's trees for each of its groups, side by side. keep: whether the
        trees and pictures are wanted, or only their scores. Raises UserError when too many
        pictures have no reward.
        """
        trees = self.share(request, plan)
        own = request.take(trees)
        cond = self.read(own)
        scoring, parts = Scoring(specs=self.specs), []
        with self.runtime.together():
            for part in self._draw(own, plan, cond, scoring):
                if keep:
                    parts.append(part)
            watch.lap(self.times[0])
            result = scoring.result()
        result = gathered(result, self.runtime)
        watch.lap(self.times[1])
        group = request.group.repeat_interleave(len(result.scores) // len(request.prompt))
        reward, valid, terms = combine(self.specs, result, group)
        self.failures.check(valid, result.errors)
        return Scored(
            own=own, trees=trees, cond=cond, parts=parts, result=result, reward=reward,
            valid=valid, terms=terms, group=group,
        )  # fmt: skip

    def share(self, request: Request, plan: TreePlan) -> Tensor:
        """This process's trees of the request: (R,) long, none where others take them all."""
        unit = plan.roots if self.whole_prompts else 1
        return self.runtime.share(len(request.prompt), unit)

    @torch.no_grad()
    def read(self, own: Request) -> Conditioning:
        """The texts of this process's trees, encoded at once."""
        with self.runtime.autocast():
            return self.encode(own.prompts) if own.prompts else Conditioning(tensors={})

    def _draw(
        self, own: Request, plan: TreePlan, cond: Conditioning, scoring: Scoring
    ) -> Iterator[tuple[Tree, Tensor]]:
        """Trees and their pictures, which rewards get as soon as they are decoded.

        A batch of roots at a time, which makes batches as full as all at once: whatever the width
        of a tree at some step, so many of them make whole batches.
        """
        if not len(own.prompt):
            return
        schedule = self.schedule()
        with torch.no_grad(), self.network() as velocity:
            for rows in torch.arange(len(own.prompt)).split(self.batch_size):
                part = own.only(rows)
                tree = draw(self.backbone, velocity, cond, part, plan, schedule, self.batch_size)
                pictures = decode(self.backbone, tree.leaves(), self.decode_batch)
                yield tree, hand_in(scoring, pictures, part, len(tree.leaf))
