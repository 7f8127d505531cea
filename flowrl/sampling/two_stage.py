"""The first of two stages: many candidates are drawn cheaply, and the telling ones are named.

Sol-RL (2604.06916). A candidate is the root of a tree, hence a name of noise: the second stage
grows trees from the very same noise, and only their scores are learned from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.functional.noise import noise_seed
from flowrl.sampling.rollout import Request, Stopwatch
from flowrl.sampling.stage import Stage
from flowrl.sampling.telling import Mode, telling
from flowrl.trajectory import Explored
from flowrl.trees.plan import TreePlan
from flowrl.trees.shape import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer:
    """Draws the candidates of each group as the stage of an iteration does, and keeps some.

    stage: of an iteration and its candidates, any network in any precision, which scores by what is
    learned from alone; with it, what is known of how well it ranks, by name. plan: of an iteration,
    what is grown from each candidate; it has as many roots as a group has candidates. mode: which
    are kept, see `telling`. A candidate with several leaves is worth their mean.
    """

    stage: Callable[[int, Request], tuple[Stage, Mapping[str, float]]]
    plan: Callable[[int], TreePlan]
    mode: Mode

    def __call__(
        self, iteration: int, candidates: Request, keep: int, watch: Stopwatch
    ) -> tuple[Request, Explored]:
        """Keep `keep` candidates of each group -> the request for them, in their order.

        candidates: as many trees of each group as the plan has roots, side by side.
        """
        plan = self.plan(iteration)
        stage, audit = self.stage(iteration, candidates)
        watch.lap("time/audit")
        proxy = score_candidates(stage, candidates, plan, watch)
        generator = torch.Generator().manual_seed(selection_seed(candidates.seed, iteration))
        chosen = torch.stack([choose(row, keep, self.mode, generator) for row in proxy])
        rows = chosen + torch.arange(len(proxy))[:, None] * proxy.shape[1]
        forwards = count(plan).times(len(proxy)).forwards
        explored = Explored(proxy=proxy, chosen=chosen, forwards=forwards, audit=audit)
        return candidates.only(rows.flatten()), explored


def score_candidates(stage: Stage, candidates: Request, plan: TreePlan, watch: Stopwatch) -> Tensor:
    """Rewards of candidates, N of each of P groups: (P, N) fp32, NaN where there is none."""
    reward = stage(candidates, plan, watch, keep=False).reward
    return reward.view(-1, plan.roots, len(reward) // len(candidates.prompt)).nanmean(-1)


def choose(proxy: Tensor, keep: int, mode: Mode, generator: torch.Generator) -> Tensor:
    """The telling candidates of one group, (keep,) long, ascending.

    proxy: (N,). Where fewer than `keep` have one, the first of those without make up the number:
    nothing is known of them, and their own score decides what they are worth.
    """
    known = telling(proxy, keep, mode, generator)
    unknown = (~proxy.isfinite()).nonzero().squeeze(1)
    return torch.cat([known, unknown[: keep - len(known)]]).sort().values


def selection_seed(seed: int, iteration: int) -> int:
    """Of what a selection draws at random, apart from pictures and learning."""
    return noise_seed(seed=seed, iteration=iteration, prompt="", root=0, step=0, role="select")
