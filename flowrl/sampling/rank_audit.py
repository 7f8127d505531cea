"""Compare the scores of cheap candidates with those of exact images of the same noise.

`RankAuditor` does so every few iterations of a two-stage rollout, and warns where candidates rank
too badly. Its numbers are metrics of the iteration, `explore/audit/...`.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.config.rollout import ExploreOptions, SamplingOptions
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, Timer
from flowrl.sampling.two_stage import (
    SelectRule,
    score_candidates,
    select_candidates,
)
from flowrl.trees.plan import TreePlan

LOG = logging.getLogger(__name__)

# Mean of Spearman's rho within prompts that is enough; Sol-RL publishes 0.9 to 0.94, pooled.
MIN_RHO = 0.8
AUDITED_PROMPTS = 2  # of an iteration, whose candidates are also all sampled exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAudit:
    """How well candidates rank within their prompt: means over prompts, NaN where none has one."""

    rho: float  # Spearman's rank correlation
    contrast: float  # exact scores, best minus worst half: share of that of an exact selection
    missing: int  # candidates of all prompts that lack one of their scores


def audit_ranks(
    proxy: Tensor, true: Tensor, keep: int, select: SelectRule = "best_worst"
) -> RankAudit:
    """Compare the scores of N candidates of each of P prompts with the exact ones.

    Args:
        proxy, true: (P, N), NaN where a score is missing: that candidate is left out of both.
        keep: candidates of a prompt that are selected.
    """
    pairs = list(zip(proxy.double(), true.double(), strict=True))
    rho = [spearman_rho(p, t) for p, t in pairs]
    contrast = [contrast_share(p, t, keep, select) for p, t in pairs]
    means = torch.tensor([rho, contrast], dtype=torch.float64).nanmean(1).tolist()
    missing = int((~(proxy.isfinite() & true.isfinite())).sum())
    return RankAudit(rho=means[0], contrast=means[1], missing=missing)


def spearman_rho(proxy: Tensor, true: Tensor) -> float:
    """Return Spearman's rho of two sets of scores (N,) over the pairs that are finite.

    NaN when a side is constant or there are fewer than two pairs.
    """
    from scipy.stats import spearmanr

    both = proxy.isfinite() & true.isfinite()
    a, b = (side[both].double().cpu().numpy() for side in (proxy, true))
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return math.nan
    return float(spearmanr(a, b).statistic)  # type: ignore[attr-defined]


def contrast_share(proxy: Tensor, true: Tensor, keep: int, select: SelectRule) -> float:
    """Return the contrast of a selection by `proxy`, as a share of that of one by `true`, (N,).

    The contrast is the mean exact score of the best half of a selection minus that of its rest; of
    most_mixed, whose scores are contrasts, the mean of all.
    """
    both = proxy.isfinite() & true.isfinite()

    def contrast(score: Tensor) -> float:
        score, rng = score.masked_fill(~both, math.nan), torch.Generator().manual_seed(0)
        chosen = select_candidates(score, keep, select, rng)
        ranked = true[chosen[score[chosen].argsort(descending=True, stable=True)]]
        if select == "most_mixed":
            return ranked.mean().item()
        half = len(ranked) // 2
        return (ranked[:half].mean() - ranked[half:].mean()).item()

    largest = contrast(true)
    return contrast(proxy) / largest if largest else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAuditor:
    """Returns the generator of candidates, after an audit where one is due.

    All processes call it together.
    """

    preview: Callable[[], RolloutGenerator]  # built at its first call
    precision: str  # of the candidates
    exact: RolloutGenerator
    rollout: SamplingOptions
    explore: ExploreOptions
    seed: int

    def __call__(
        self, iteration: int, candidates: RolloutRequest
    ) -> tuple[RolloutGenerator, Mapping[str, float]]:
        """Return the generator and the metrics of an audit, {} without one."""
        generator, every = self.preview(), self.explore.audit.every
        if not every or iteration % every:
            return generator, {}
        plan = self.rollout.plan(iteration, self.seed)
        exact_plan = replace(plan, roots=self.explore.candidates)
        plans = self.rollout.candidates(iteration, self.seed), exact_plan
        audit = audit_ranks(
            *self._score(generator, plans, candidates), plan.roots, self.explore.select
        )
        steps = self.explore.forwards(self.rollout.num_inference_steps)
        if self.exact.runtime.is_main:
            level = logging.INFO if audit.rho >= MIN_RHO else logging.WARNING
            LOG.log(level, "%s", self._text(audit.rho, iteration, steps, plans))
        return generator, {"rho": audit.rho, "contrast": audit.contrast}

    def _score(
        self,
        generator: RolloutGenerator,
        plans: tuple[TreePlan, TreePlan],
        candidates: RolloutRequest,
    ) -> tuple[Tensor, Tensor]:
        """Score all candidates of the first prompts, by previews and by exact images: (P, N)."""
        # All prompts' texts at once, as without an audit: the last bits depend on their batch.
        generator.encode_prompts(candidates.take(generator.share(candidates, plans[0])))
        first = (candidates.group < AUDITED_PROMPTS).nonzero().squeeze(1)
        exact = replace(
            self.exact,
            specs=generator.specs,
            whole_prompts=generator.whole_prompts,  # these images are not compared in training
        )
        proxy, true = (
            score_candidates(stage, candidates.only(first), plan, Timer(), self.explore.select)
            for stage, plan in zip((generator, exact), plans, strict=True)
        )
        return proxy, true

    def _text(
        self, rho: float, iteration: int, steps: int, plans: tuple[TreePlan, TreePlan]
    ) -> str:
        """Return the result in a sentence, and what to do where candidates rank too badly."""
        where = f"audit before iteration {iteration + 1}: candidates ({steps} steps, "
        where += f"{self.precision})"
        if math.isnan(rho):
            return (
                f"{where} have no rank correlation: all their scores, or the exact ones, are equal"
            )
        result = f"{where} have rho {rho:.3f} within prompts"
        if rho >= MIN_RHO:
            return f"{result}, at least {MIN_RHO}"
        noise, exact_noise = (any(move.noise for move in plan.moves) for plan in plans)
        option = "num_inference_steps" if self.explore.stop_at is None else "stop_at"
        remedy = f"raise rollout.explore.{option}, or set rollout.explore.precision to bf16"
        if exact_noise and not noise:  # more bits or steps do not help
            remedy = "rollout.tree has noise that candidates lack: set "
            remedy += f"rollout.explore.{option} to null"
        return f"{result}, below {MIN_RHO}: {remedy}"
