"""How well candidates rank: the scores they are chosen by beside the exact ones of all of them."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import Tensor

from flowrl.sampling.ranking import (
    contrast_retention,
    halves,
    kendall_tau,
    mean_true_rank,
    nan_mean,
    overlap,
    paired,
    spearman_rho,
)
from flowrl.sampling.telling import Mode, telling

# JSON has no NaN: it is written as null.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAudit:
    """One prompt's candidates. NaN: there is no such number.

    pairs: candidates with both scores; the others count nowhere. tau, rho: Kendall's and
    Spearman's. Of the K chosen, the floor(K/2) with the highest proxies are the best, the others
    the worst. overlap_*: share of them that a choice by exact scores puts on the same side; of
    equal ones it takes the first, so that with few distinct scores the contrast (`retention`, see
    `contrast_retention`) says more. rank_*: their mean exact rank, 1 the highest, ties averaged;
    perfect_*: that of a choice by exact scores; rank_random: that of one at random, (pairs + 1) /
    2. Where all exact scores are equal only `pairs` is a number.
    """

    pairs: int
    tau: Number
    rho: Number
    overlap_best: Number
    overlap_worst: Number
    rank_best: Number
    rank_worst: Number
    perfect_best: Number
    perfect_worst: Number
    rank_random: Number
    retention: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """P prompts with N candidates each, of which `keep` are chosen by `mode`.

    pooled_tau, pooled_rho: over the pairs of all prompts together. They also see that some prompts
    score higher than others, which no choice within a prompt can use.
    """

    candidates: int
    keep: int
    mode: str
    prompts: tuple[PromptAudit, ...]
    pooled_tau: Number
    pooled_rho: Number

    def mean(self, name: str) -> float:
        """Mean of a number of `PromptAudit` over the prompts that have it; NaN if none has."""
        return nan_mean([getattr(prompt, name) for prompt in self.prompts])

    @property
    def rho(self) -> float:
        """Mean within-prompt Spearman's rho, by which the gate decides."""
        return self.mean("rho")

    @property
    def without_rho(self) -> int:
        """Prompts left out of the mean: a side all equal, or fewer than 2 pairs."""
        return sum(math.isnan(prompt.rho) for prompt in self.prompts)

    @property
    def missing(self) -> int:
        """Candidates that lack their own or an exact score, of all prompts."""
        return self.candidates * len(self.prompts) - sum(p.pairs for p in self.prompts)

    def summary(self) -> dict[str, Any]:
        """The numbers for people, by name: means over prompts, and what was left out."""
        return {
            "tau": self.mean("tau"),
            "rho": self.rho,
            "pooled rho": self.pooled_rho,
            "overlap best": self.mean("overlap_best"),
            "overlap worst": self.mean("overlap_worst"),
            "rank best": self.mean("rank_best"),
            "rank worst": self.mean("rank_worst"),
            "retention": self.mean("retention"),
            "no rho": self.without_rho,
            "missing": self.missing,
        }


def audit(proxy: Tensor, true: Tensor, keep: int, mode: Mode = "best_worst") -> AuditReport:
    """Compare candidates' scores with the exact ones of the same noises.

    proxy, true: (P, N), NaN where a score is missing: that candidate is left out of both, and
    counted. A choice at random is the same for both. Raises ValueError for unequal shapes.
    """
    both = paired(proxy, true)
    if proxy.ndim != 2:
        raise ValueError(f"proxies have shape {tuple(proxy.shape)}, expected (prompts, candidates)")
    pooled = proxy[both], true[both]
    return AuditReport(
        candidates=proxy.shape[1],
        keep=keep,
        mode=mode,
        prompts=tuple(_of_prompt(p, t, keep, mode) for p, t in zip(proxy, true, strict=True)),
        pooled_tau=kendall_tau(*pooled),
        pooled_rho=spearman_rho(*pooled),
    )


def _of_prompt(proxy: Tensor, true: Tensor, keep: int, mode: Mode) -> PromptAudit:
    both = paired(proxy, true)
    proxy, true = (score.double().masked_fill(~both, math.nan) for score in (proxy, true))
    chosen, perfect = (
        halves(score, telling(score, keep, mode, torch.Generator().manual_seed(0)))
        for score in (proxy, true)
    )
    # Where all exact scores are equal there is nothing to find, hence no way to miss it.
    decided = len(true[both].unique()) > 1
    return PromptAudit(
        pairs=int(both.sum()),
        tau=kendall_tau(proxy, true),
        rho=spearman_rho(proxy, true),
        overlap_best=overlap(chosen[0], perfect[0]) if decided else math.nan,
        overlap_worst=overlap(chosen[1], perfect[1]) if decided else math.nan,
        rank_best=mean_true_rank(true, chosen[0]) if decided else math.nan,
        rank_worst=mean_true_rank(true, chosen[1]) if decided else math.nan,
        perfect_best=mean_true_rank(true, perfect[0]) if decided else math.nan,
        perfect_worst=mean_true_rank(true, perfect[1]) if decided else math.nan,
        rank_random=(int(both.sum()) + 1) / 2 if decided else math.nan,
        retention=contrast_retention(true, chosen, perfect),
    )
