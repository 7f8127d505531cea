"""The first of two stages: many candidates are drawn cheaply, and the telling ones are named.

Sol-RL (2604.06916). A candidate is the root of a tree, hence a name of noise: the second stage
grows trees from the very same noise, and only their scores are learned from.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from flowrl.functional.noise import noise_seed
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, Stopwatch
from flowrl.trajectory import Explored
from flowrl.trees.plan import TreePlan, count

# --- Which candidates tell the most about a prompt: those that the second stage draws exactly --

Mode = Literal["best_worst", "mean_deviation", "extremes_random", "random"]
MODES: tuple[str, ...] = get_args(Mode)


def telling(proxy: Tensor, keep: int, mode: Mode, generator: torch.Generator) -> Tensor:
    """The `keep` candidates that are kept: (keep,) long, ascending; fewer if fewer have a proxy.

    proxy: (N,), NaN or infinite where a candidate has none; it is not kept then. Equal proxies are
    ranked by index. best_worst: the floor(K/2) highest and the K - floor(K/2) lowest (Sol-RL,
    2604.06916); mean_deviation: those furthest from the mean; extremes_random: the highest, the
    lowest and others at random; random: any. Raises ValueError if N < keep or keep < 1.
    """
    if not 1 <= keep <= len(proxy):
        raise ValueError(f"{keep} of {len(proxy)} candidates cannot be kept: at least 1, at most N")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    finite = proxy.isfinite().nonzero().squeeze(1)
    if len(finite) <= keep:
        return finite
    ranked = finite[proxy[finite].argsort(descending=True, stable=True)]
    return _CHOOSE[mode](ranked, proxy, keep, generator).sort().values


def best_and_worst(count: int, keep: int) -> tuple[slice, slice]:
    """Places of both ends among `count` ranked candidates, best first; they do not overlap."""
    best = keep // 2
    return slice(0, best), slice(count - (keep - best), count)


def _best_worst(ranked: Tensor, proxy: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    best, worst = best_and_worst(len(ranked), keep)
    return torch.cat([ranked[best], ranked[worst]])


def _mean_deviation(ranked: Tensor, proxy: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    ranked = ranked.sort().values
    score = proxy[ranked].double()
    return ranked[(score - score.mean()).abs().argsort(descending=True, stable=True)[:keep]]


def _extremes_random(
    ranked: Tensor, proxy: Tensor, keep: int, generator: torch.Generator
) -> Tensor:
    ends = ranked[[0, -1]][:keep]
    return torch.cat([ends, _random(ranked[1:-1], proxy, keep - len(ends), generator)])


def _random(ranked: Tensor, proxy: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    ranked = ranked.sort().values  # by index: what is drawn depends on no proxy
    return ranked[torch.randperm(len(ranked), generator=generator)[:keep]]


_CHOOSE = {
    "best_worst": _best_worst,
    "mean_deviation": _mean_deviation,
    "extremes_random": _extremes_random,
    "random": _random,
}


# --- The first of two stages -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer:
    """Draws the candidates of each group as the stage of an iteration does, and keeps some.

    stage: of an iteration and its candidates, any network in any precision, which scores by what is
    learned from alone; with it, what is known of how well it ranks, by name. plan: of an iteration,
    what is grown from each candidate; it has as many roots as a group has candidates. mode: which
    are kept, see `telling`. A candidate with several leaves is worth their mean.
    """

    stage: Callable[[int, RolloutRequest], tuple[RolloutGenerator, Mapping[str, float]]]
    plan: Callable[[int], TreePlan]
    mode: Mode

    def __call__(
        self, iteration: int, candidates: RolloutRequest, keep: int, watch: Stopwatch
    ) -> tuple[RolloutRequest, Explored]:
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


def score_candidates(
    stage: RolloutGenerator, candidates: RolloutRequest, plan: TreePlan, watch: Stopwatch
) -> Tensor:
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
    """Of what a selection draws at random, apart from images and learning."""
    return noise_seed(seed=seed, iteration=iteration, prompt="", root=0, step=0, role="select")


# --- What exploring cheaply and regenerating a few should cost, before anything is run ---------


def two_stage_ratio(
    *,
    candidates: int,
    keep: int,
    preview_steps: int,
    steps: int,
    gain: float = 1.0,
    fixed: float = 0.0,
) -> float:
    """Seconds of two stages by those of drawing all N in full: Sol-RL's (2604.06916) arithmetic.

    ((s_p / S) / q + phi) / (1 + phi) + K / N

    gain: q, seconds of an exact step by those of a low-precision one; below 1 where it is slower.
    fixed: phi, seconds to decode and score an image by those of its S exact steps.
    What takes time once an iteration, such as putting new weights in, is left out. Below 1 is
    cheaper than N full images; it can never be as cheap as drawing only K, which is K / N.
    Raises ValueError for what is not 1 <= K <= N, s_p >= 1, S >= 1, q > 0 and phi >= 0.
    """
    if not 1 <= keep <= candidates:
        raise ValueError(f"keep is {keep} of {candidates} candidates: from 1 to all of them")
    if preview_steps < 1 or steps < 1:
        raise ValueError(f"steps are {preview_steps} and {steps}: at least 1 each")
    if not (math.isfinite(gain) and gain > 0):
        raise ValueError(f"gain is {gain}, expected a positive number")
    if not (math.isfinite(fixed) and fixed >= 0):
        raise ValueError(f"fixed is {fixed}, expected 0 or more")
    explore = (preview_steps / steps / gain + fixed) / (1 + fixed)
    return explore + keep / candidates


def break_even_gain(
    *, candidates: int, keep: int, preview_steps: int, steps: int, fixed: float = 0.0
) -> float:
    """The q from which two stages are no dearer than drawing all N in full; inf if none is.

    The q at which `two_stage_ratio` is 1. Raises ValueError as it does.
    """
    args = {"candidates": candidates, "keep": keep, "preview_steps": preview_steps, "steps": steps}
    two_stage_ratio(**args, fixed=fixed)
    room = (1 - keep / candidates) * (1 + fixed) - fixed
    return preview_steps / steps / room if room > 0 else math.inf
