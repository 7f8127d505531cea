"""Compare the scores of cheap candidates with those of exact images of the same noise.

`RankAuditor` does so every few iterations of a two-stage rollout, writes a line to `audits.jsonl`
of the run folder, and warns or stops the run where candidates rank too badly.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.rollout import AuditOptions
from flowrl.errors import UserError
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, Timer
from flowrl.sampling.two_stage import (
    SelectRule,
    best_and_worst,
    score_candidates,
    select_candidates,
)
from flowrl.trees.plan import TreePlan
from flowrl.utils.files import write_bytes
from flowrl.utils.journal import read_lines, seal_line

LOG = logging.getLogger(__name__)
FILE = "audits.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAudit:
    """How well candidates rank within their prompt: means over prompts, NaN where none has one."""

    rho: float  # Spearman's rank correlation
    best_kept: float  # share of the best half of an exact selection that is selected as best
    worst_kept: float
    contrast: float  # exact scores, best minus worst half: share of that of an exact selection
    flat: int  # prompts without rho: equal scores on a side, or fewer than two pairs
    missing: int  # candidates of all prompts that lack one of their scores


def audit_ranks(
    proxy: Tensor, true: Tensor, keep: int, select: SelectRule = "best_worst"
) -> RankAudit:
    """Compare the scores of N candidates of each of P prompts with the exact ones.

    Args:
        proxy, true: (P, N), NaN where a score is missing: that candidate is left out of both.
        keep: candidates of a prompt that are selected.

    Raises:
        ValueError: for unequal shapes.
    """
    if proxy.shape != true.shape or proxy.ndim != 2:
        raise ValueError(
            f"scores have shapes {tuple(proxy.shape)} and {tuple(true.shape)}, expected (prompts, "
            "candidates) for both"
        )
    numbers = [_audit_prompt(p, t, keep, select) for p, t in zip(proxy, true, strict=True)]
    rows = torch.tensor(numbers, dtype=torch.float64).view(-1, 4)
    return RankAudit(
        **dict(zip(("rho", "best_kept", "worst_kept", "contrast"), _means(rows), strict=True)),
        flat=int(rows[:, 0].isnan().sum()),
        missing=int((~(proxy.isfinite() & true.isfinite())).sum()),
    )


def _audit_prompt(
    proxy: Tensor, true: Tensor, keep: int, select: SelectRule
) -> tuple[float, float, float, float]:
    both = proxy.isfinite() & true.isfinite()
    rho = spearman_rho(proxy, true)
    if len(true[both].unique()) < 2:  # nothing to rank
        return rho, math.nan, math.nan, math.nan
    chosen, perfect = (
        _halves(score.double().masked_fill(~both, math.nan), keep, select)
        for score in (proxy, true)
    )
    best, worst = (
        torch.isin(mine, exact).double().mean().item()
        for mine, exact in zip(chosen, perfect, strict=True)
    )
    largest = _contrast(true, perfect)
    return rho, best, worst, _contrast(true, chosen) / largest if largest else math.nan


def _halves(score: Tensor, keep: int, select: SelectRule) -> list[Tensor]:
    """Return the best floor(K/2) of a selection by scores (N,), and the others: both long."""
    chosen = select_candidates(score, keep, select, torch.Generator().manual_seed(0))
    ranked = chosen[score[chosen].argsort(descending=True, stable=True)]
    return [ranked[half] for half in best_and_worst(len(ranked), len(ranked))]


def _contrast(true: Tensor, halves: list[Tensor]) -> float:
    best, worst = (true[half].double().mean().item() for half in halves)
    return best - worst


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


def regenerated_rank(proxy: Tensor, true: Tensor) -> float:
    """Return the mean within-prompt rho over the K candidates that are sampled exactly, (P, K).

    It costs nothing, but only extremes were selected: their rho is not that of all candidates
    (restriction of range). Watch how it drifts; decide nothing by it.
    """
    values = [spearman_rho(p, t) for p, t in zip(proxy, true, strict=True)]
    return _means(torch.tensor(values, dtype=torch.float64).view(-1, 1))[0]


def _means(rows: Tensor) -> list[float]:
    return rows.nanmean(0).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAuditor:
    """Returns the generator of candidates, after an audit where one is due.

    All processes call it together.
    """

    preview: Callable[[], RolloutGenerator]  # built at its first call
    precision: str  # of the candidates
    exact: RolloutGenerator
    plan: Callable[[int], TreePlan]  # of an iteration's candidates
    exact_plan: Callable[[int], TreePlan]  # of as many exact trees
    keep: Callable[[int], int]  # trees of a prompt that are selected
    select: SelectRule
    options: AuditOptions
    folder: Path  # of the run

    def __call__(
        self, iteration: int, candidates: RolloutRequest
    ) -> tuple[RolloutGenerator, Mapping[str, float]]:
        """Return the generator and the metrics of an audit, {} without one.

        Raises UserError when candidates rank too badly and the run is to stop then.
        """
        generator, o = self.preview(), self.options
        if not o.every or iteration % o.every:
            return generator, {}
        audit = self._audit(generator, iteration, candidates)
        passed = audit.rho >= o.min_rho
        action = "keep" if passed else "warn" if math.isnan(audit.rho) else o.on_miss
        text = self._text(audit, iteration, generator.num_inference_steps)
        if self.exact.runtime.is_main:
            entry = {"iteration": iteration, "precision": self.precision, "action": action}
            entry |= {"steps": generator.num_inference_steps, "text": text}
            numbers = {k: None if v != v else v for k, v in asdict(audit).items()}
            self._write(entry | numbers)
            if action != "stop":  # the error says it then
                LOG.log(logging.INFO if passed else logging.WARNING, "%s", text)
        if action == "stop":
            raise UserError(text)
        return generator, {"rho": audit.rho, "contrast": audit.contrast}

    def _audit(
        self, generator: RolloutGenerator, iteration: int, candidates: RolloutRequest
    ) -> RankAudit:
        """Generate all candidates of the first prompts both ways."""
        plan = self.plan(iteration)
        # All prompts' texts at once, as without an audit: the last bits depend on their batch.
        generator.encode_prompts(candidates.take(generator.share(candidates, plan)))
        few = candidates.only((candidates.group < self.options.prompts).nonzero().squeeze(1))
        exact = replace(
            self.exact,
            specs=generator.specs,
            failures=generator.failures,
            whole_prompts=generator.whole_prompts,  # these images are not compared in training
        )
        proxy = score_candidates(generator, few, plan, Timer())
        true = score_candidates(exact, few, self.exact_plan(iteration), Timer())
        return audit_ranks(proxy, true, self.keep(iteration), self.select)

    def _text(self, audit: RankAudit, iteration: int, steps: int) -> str:
        """Return the result in a sentence, and what to do where candidates rank too badly."""
        where = f"audit before iteration {iteration + 1}: candidates ({steps} steps, "
        where += f"{self.precision})"
        if math.isnan(audit.rho):
            return (
                f"{where} have no rank correlation: all their scores, or the exact ones, are equal"
            )
        result = f"{where} have rho {audit.rho:.3f} within prompts"
        limit = f"rollout.explore.audit.min_rho = {self.options.min_rho:g}"
        if audit.rho >= self.options.min_rho:
            return f"{result}, at least {limit}"
        noise, exact_noise = (
            any(move.noise for move in plan(iteration).moves)
            for plan in (self.plan, self.exact_plan)
        )
        remedy = (
            "raise rollout.explore.num_inference_steps, or set rollout.explore.precision to bf16"
        )
        if exact_noise and not noise:  # more bits or steps do not help
            remedy = "rollout.tree has noise that candidates lack: set "
            remedy += "rollout.explore.num_inference_steps to null"
        return f"{result}, below {limit}: {remedy}"

    def _write(self, entry: Mapping[str, Any]) -> None:
        """Add an audit; drop those of its iteration and later ones, of before a resume."""
        earlier = (e for e in read_audits(self.folder) if e["iteration"] < entry["iteration"])
        lines = [seal_line(each) + b"\n" for each in (*earlier, entry)]
        write_bytes(self.folder / FILE, b"".join(lines))


def read_audits(folder: Path) -> list[dict[str, Any]]:
    """Return the audits of a run, in order; damaged lines are logged and left out."""
    lines = read_lines(folder / FILE)
    lines.warn(folder / FILE)
    return lines.entries
