"""Which candidates tell the most about a prompt: those that the second stage draws exactly."""

from typing import Literal, get_args

import torch
from torch import Tensor

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
