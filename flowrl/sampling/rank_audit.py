"""Does a cheap preview rank candidates as their exact images do, and in which precision to go on?

`audit_ranks` compares the scores of N candidates per prompt with those of exact images of the same
noise. `PrecisionController` runs it every few iterations of a two-stage rollout and moves the
previews to a higher precision where they rank too badly; `AuditLog` keeps the reports.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from torch import Tensor

from flowrl.errors import UserError
from flowrl.quantization.backends import (
    Capability,
    Resolved,
    next_lower,
    precision_name,
    precision_text,
)
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, Timer
from flowrl.sampling.two_stage import (
    SelectRule,
    best_and_worst,
    score_candidates,
    select_candidates,
)
from flowrl.trees.plan import TreePlan
from flowrl.utils.files import write_text

LOG = logging.getLogger(__name__)

# JSON has no NaN: it is written as null.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAudit:
    """How well one prompt's candidates are ranked. NaN: the number does not exist.

    Of the K selected, the floor(K/2) with the highest proxies are the best, the others the worst.
    Where all exact scores are equal only `pairs` is a number.
    """

    pairs: int  # candidates with both scores; the others count nowhere
    tau: Number  # Kendall's
    rho: Number  # Spearman's
    # Share of the best and worst that a selection by exact scores has on the same side. Of equal
    # scores it takes the first: with few distinct ones `retention` says more.
    overlap_best: Number
    overlap_worst: Number
    rank_best: Number  # mean exact rank of the best, 1 the highest, ties averaged
    rank_worst: Number
    perfect_best: Number  # the same of a selection by exact scores
    perfect_worst: Number
    rank_random: Number  # the same of a random selection, (pairs + 1) / 2
    retention: Number  # see `contrast_retention`


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """P prompts with N candidates each, of which `keep` are selected by the rule `mode`."""

    candidates: int
    keep: int
    mode: str
    prompts: tuple[PromptAudit, ...]
    # Over the pairs of all prompts together. They also see that some prompts score higher than
    # others, which no selection within a prompt can use.
    pooled_tau: Number
    pooled_rho: Number

    def mean(self, name: str) -> float:
        """Return the mean of a number of `PromptAudit` over the prompts that have it, or NaN."""
        return nan_mean([getattr(prompt, name) for prompt in self.prompts])

    @property
    def rho(self) -> float:
        """Mean within-prompt Spearman's rho, by which `decide` judges."""
        return self.mean("rho")

    @property
    def without_rho(self) -> int:
        """Number of prompts left out of the mean: equal scores on a side, or fewer than 2 pairs."""
        return sum(math.isnan(prompt.rho) for prompt in self.prompts)

    @property
    def missing(self) -> int:
        """Number of candidates of all prompts that lack their own or an exact score."""
        return self.candidates * len(self.prompts) - sum(p.pairs for p in self.prompts)

    def summary(self) -> dict[str, Any]:
        """Return means over prompts and the counts of what was left out, named for display."""
        names = ("overlap_best", "overlap_worst", "rank_best", "rank_worst", "retention")
        return {
            "tau": self.mean("tau"),
            "rho": self.rho,
            "pooled rho": self.pooled_rho,
            **{name.replace("_", " "): self.mean(name) for name in names},
            "no rho": self.without_rho,
            "missing": self.missing,
        }


def audit_ranks(
    proxy: Tensor, true: Tensor, keep: int, select: SelectRule = "best_worst"
) -> AuditReport:
    """Compare candidates' scores with the exact ones of the same noises.

    A random selection is the same for both. Raises ValueError for unequal shapes.

    Args:
        proxy, true: (P, N), NaN where a score is missing: that candidate is left out of both.
    """
    both = paired(proxy, true)
    if proxy.ndim != 2:
        raise ValueError(f"proxies have shape {tuple(proxy.shape)}, expected (prompts, candidates)")
    pooled = proxy[both], true[both]
    return AuditReport(
        candidates=proxy.shape[1],
        keep=keep,
        mode=select,
        prompts=tuple(_audit_prompt(p, t, keep, select) for p, t in zip(proxy, true, strict=True)),
        pooled_tau=kendall_tau(*pooled),
        pooled_rho=spearman_rho(*pooled),
    )


def _audit_prompt(proxy: Tensor, true: Tensor, keep: int, select: SelectRule) -> PromptAudit:
    both = paired(proxy, true)
    proxy, true = (score.double().masked_fill(~both, math.nan) for score in (proxy, true))
    chosen, perfect = (
        halves(score, select_candidates(score, keep, select, torch.Generator().manual_seed(0)))
        for score in (proxy, true)
    )
    pairs = int(both.sum())
    found = {
        "overlap_best": overlap(chosen[0], perfect[0]),
        "overlap_worst": overlap(chosen[1], perfect[1]),
        "rank_best": mean_true_rank(true, chosen[0]),
        "rank_worst": mean_true_rank(true, chosen[1]),
        "perfect_best": mean_true_rank(true, perfect[0]),
        "perfect_worst": mean_true_rank(true, perfect[1]),
        "rank_random": (pairs + 1) / 2,
    }
    if len(true[both].unique()) < 2:  # nothing to find, hence no way to miss it
        found = dict.fromkeys(found, math.nan)
    return PromptAudit(
        pairs=pairs,
        tau=kendall_tau(proxy, true),
        rho=spearman_rho(proxy, true),
        retention=contrast_retention(true, chosen, perfect),
        **found,
    )


def paired(proxy: Tensor, true: Tensor) -> Tensor:
    """Return which candidates have both scores: bool, like both. Raises ValueError otherwise."""
    if proxy.shape != true.shape:
        raise ValueError(
            f"proxies have shape {tuple(proxy.shape)} and true scores {tuple(true.shape)}: "
            "expected one of each for every candidate"
        )
    return proxy.isfinite() & true.isfinite()


def kendall_tau(proxy: Tensor, true: Tensor) -> float:
    """Kendall's tau-b (1945), which takes ties out of its norm; NaN where `spearman_rho` is."""
    from scipy.stats import kendalltau

    return _correlation(kendalltau, proxy, true)


def spearman_rho(proxy: Tensor, true: Tensor) -> float:
    """Spearman's rho (1904) on average ranks; NaN when a side is constant or fewer than 2 pairs."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, proxy, true)


def regenerated_rank(proxy: Tensor, true: Tensor) -> float:
    """Return the mean within-prompt rho over the K candidates sampled exactly anyway, (P, K) each.

    It costs nothing, but only extremes were selected: their rho is not that of all candidates
    (restriction of range). Watch how it drifts; decide nothing by it.
    """
    if proxy.ndim != 2:
        raise ValueError(f"proxies have shape {tuple(proxy.shape)}, expected (prompts, kept)")
    paired(proxy, true)
    return nan_mean([spearman_rho(p, t) for p, t in zip(proxy, true, strict=True)])


def ranks(score: Tensor) -> Tensor:
    """Return average ranks (N,) float64, 1 the highest score; NaN where there is no score."""
    from scipy.stats import rankdata

    finite = score.isfinite()
    found = torch.full(score.shape, math.nan, dtype=torch.float64)
    found[finite] = torch.from_numpy(rankdata(-score[finite].double().numpy()))
    return found


def halves(score: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the floor(K/2) best of the `chosen` (K,) and the others, both long, best first.

    Equal scores by index, as in the selection itself: of best_worst these are its two ends.
    """
    ranked = chosen[score[chosen].argsort(descending=True, stable=True)]
    best, worst = best_and_worst(len(ranked), len(ranked))
    return ranked[best], ranked[worst]


def overlap(found: Tensor, wanted: Tensor) -> float:
    """Return the share of the rows `found` (M,) that are among `wanted`; NaN without rows."""
    return _mean(torch.isin(found, wanted))


def mean_true_rank(true: Tensor, rows: Tensor) -> float:
    """Return the mean of the true `ranks` of the `rows` (M,) long; NaN without rows."""
    return _mean(ranks(true)[rows])


def contrast_retention(
    true: Tensor, chosen: tuple[Tensor, Tensor], perfect: tuple[Tensor, Tensor]
) -> float:
    """Return how much of the best possible contrast the selection keeps; 1 for a perfect proxy.

    The contrast is mean(true of the best) - mean(true of the worst). NaN when the perfect one is 0
    or has an empty half.

    Args:
        chosen, perfect: `halves` by proxy and by true score.
    """
    found, best = (_mean(true[top]) - _mean(true[low]) for top, low in (chosen, perfect))
    return found / best if best else math.nan


def nan_mean(values: Sequence[float]) -> float:
    """Return the mean of the numbers that are not NaN; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _mean(values: Tensor) -> float:
    return values.double().mean().item()  # torch's mean of nothing is NaN


def _correlation(measure: Callable[..., Any], proxy: Tensor, true: Tensor) -> float:
    """Apply one of scipy's measures; NaN where a side is constant or has fewer than 2 pairs."""
    both = paired(proxy, true)
    sides = [side[both].double().cpu().numpy() for side in (proxy, true)]
    if any(len(side) < 2 or side.min() == side.max() for side in sides):
        return math.nan
    return float(measure(*sides)[0])


OnMiss = Literal["degrade", "stop", "warn"]
Action = Literal["keep", "degrade", "warn", "stop"]
MIN_RHO = "rollout.explore.audit.min_rho"
STEPS = "rollout.explore.num_inference_steps"
ON_MISS = "rollout.explore.audit.on_miss"
UNSEEN = f"candidates without noise cannot see the noise of the rollout's tree: set {STEPS} to null"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDecision:
    """What to do after an audit."""

    passed: bool
    action: Action
    next: Resolved | None  # the precision to go on in, where it changes
    text: str  # for people


def decide(
    report: AuditReport,
    *,
    iteration: int,
    min_rho: float,
    on_miss: OnMiss,
    resolved: Resolved,
    capability: Capability,
    steps: int,
    most: int,
    unseen: bool,
) -> AuditDecision:
    """Accept the candidates if their mean within-prompt rho is at least `min_rho`.

    Otherwise do as `on_miss` says; but only warn where no precision can help: no prompt has a rho,
    nothing is quantised any more, or `unseen`.

    Args:
        iteration: the next one, from 0.
        resolved: the precision of the candidates, which took `steps` steps of at most `most`.
        unseen: exact images have noise on their way that candidates lack.
    """
    if on_miss not in get_args(OnMiss):
        raise ValueError(f"on_miss is {on_miss!r}, expected one of {', '.join(get_args(OnMiss))}")
    start = f"audit before iteration {iteration + 1}"
    candidates = f"candidates ({steps} steps, {precision_text(resolved)})"
    if math.isnan(report.rho):
        why = (
            f"none of the {len(report.prompts)} prompts can tell how {candidates} rank, because "
            "their scores or the exact ones are all equal within each"
        )
        return _warning(f"{start}: {why}; {_left(steps, most)}")
    found = f"{start}: {candidates} have rho {report.rho:.3f} within prompt{_basis(report)}"
    if report.rho >= min_rho:
        text = f"{found}, at least {MIN_RHO} = {min_rho:g}"
        return AuditDecision(passed=True, action="keep", next=None, text=text)
    missed = f"{found}, below {MIN_RHO} = {min_rho:g}"
    lower = next_lower(resolved, capability)
    ways = UNSEEN if unseen else _ways_out(resolved, lower, steps, most)
    if on_miss == "stop":
        text = f"{missed}: {ways}, or set {ON_MISS} to warn"
        return AuditDecision(passed=False, action="stop", next=None, text=text)
    if on_miss == "warn" or unseen:
        return _warning(f"{missed}: the gain may be lower; {ways}")
    if lower is None:
        return _warning(f"{missed}, and nothing is quantised any more: {_left(steps, most)}")
    name = precision_text(lower)
    in_precision = name if lower.format == "bf16" else f"in {name}"
    text = f"{missed}: from now on candidates are {in_precision}"
    return AuditDecision(passed=False, action="degrade", next=lower, text=text)


def replay_precision(
    moves: Iterable[tuple[str, str | None]], resolved: Resolved, capability: Capability
) -> Resolved:
    """Return the precision that a run which began with `resolved` has come to.

    A move that left another precision than the run is at by then belongs to a recipe that has
    changed, and is ignored; on a device that lacks the next precision it is the first below.

    Args:
        moves: `precision` and `next` of the audits, in order.
    """
    for precision, following in moves:
        if following is None or precision != precision_name(resolved):
            continue
        while precision_name(resolved) != following:
            lower = next_lower(resolved, capability)
            if lower is None:
                break
            resolved = lower
    return resolved


def _warning(text: str) -> AuditDecision:
    return AuditDecision(passed=False, action="warn", next=None, text=text)


def _basis(report: AuditReport) -> str:
    count = len(report.prompts) - report.without_rho
    left_out = f", {report.without_rho} more without" if report.without_rho else ""
    missing = f", {_counted(report.missing, 'score')} missing" if report.missing else ""
    return f" (mean of {_counted(count, 'prompt')}{left_out}{missing})"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _left(steps: int, most: int) -> str:
    if steps < most:
        return f"more steps of a candidate are what is left ({STEPS}, now {steps} of {most})"
    return "candidates have as many steps as exact images already"


def _ways_out(resolved: Resolved, lower: Resolved | None, steps: int, most: int) -> str:
    ways = [f"raise {STEPS}, now {steps} of {most}"] if steps < most else []
    if lower is not None:
        change = f"to {precision_name(lower)} instead of {precision_name(resolved)}"
        ways.append(f"set rollout.explore.precision {change}")
    return ", or ".join(ways) or _left(steps, most)


FILE = "audits.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """An audit before the rollout of an iteration, and its decision."""

    iteration: int  # from 0
    precision: str  # of the candidates
    steps: int  # of the candidates
    action: Action
    next: str | None  # the precision from this iteration on, None where it stays
    text: str  # the decision, for people
    report: AuditReport


_EVENT = TypeAdapter(AuditEvent)


class AuditLog:
    """`audits.jsonl` of a run folder, one line an audit, replaced whole at every change.

    A run resumed from an older checkpoint does not see audits of later iterations; its own replace
    them. One process of a run writes.
    """

    def __init__(self, folder: Path | str):
        self.path = Path(folder) / FILE

    def before(self, iteration: int) -> tuple[AuditEvent, ...]:
        """Return the audits of earlier iterations, in order."""
        return tuple(event for event in self.parse(self.data()) if event.iteration < iteration)

    def record(self, event: AuditEvent) -> None:
        """Add an audit; drop those of its iteration and later ones."""
        self._write([*self.before(event.iteration), event])

    def rewind(self, iteration: int) -> None:
        """Drop the audits of this and later iterations, where a resumed run begins."""
        events = self.parse(self.data())
        kept = [event for event in events if event.iteration < iteration]
        if len(kept) < len(events):
            self._write(kept)

    def data(self) -> bytes:
        """Return the file's bytes, none where there is no file."""
        return self.path.read_bytes() if self.path.exists() else b""

    def parse(self, data: bytes) -> list[AuditEvent]:
        """Return every audit. Raises UserError for a line that is none, or a wrong order."""
        found = []
        for number, line in enumerate(data.splitlines(), 1):
            try:
                found.append(_EVENT.validate_json(line, strict=True))
            except ValidationError as error:
                raise UserError(
                    f"line {number} of {self.path} is not the record of an audit: remove it and "
                    "resume from a checkpoint before it, or the run goes on in another precision"
                ) from error
        iterations = [event.iteration for event in found]
        if sorted(set(iterations)) != iterations:
            raise UserError(
                f"{self.path} has audits of iterations {iterations}, expected ascending numbers: "
                "remove the lines that do not belong to this run"
            )
        return found

    def _write(self, events: Sequence[AuditEvent]) -> None:
        write_text(self.path, "".join(_EVENT.dump_json(e).decode() + "\n" for e in events))


# Metrics that are logged, by their names in `AuditReport.summary`.
METRICS = {"tau": "tau", "rho": "rho", "pooled rho": "pooled_rho", "retention": "contrast"}


@dataclass(slots=True, kw_only=True)
class PrecisionController:
    """Gives the generator of previews, in the precision that audits have come to so far.

    All processes call it together, and decide alike. The options are those under
    `rollout.explore.audit`.
    """

    make: Callable[[Resolved, int], RolloutGenerator]  # (precision, the iteration it begins at)
    first: Resolved  # precision at the beginning
    capability: Capability
    exact: RolloutGenerator  # of the second stage
    plan: Callable[[int], TreePlan]  # of an iteration's candidates
    exact_plan: Callable[[int], TreePlan]  # of as many exact trees
    keep: Callable[[int], int]  # trees of a prompt that are kept
    select: SelectRule
    every: int
    prompts: int
    min_rho: float
    on_miss: OnMiss
    log: AuditLog
    _now: tuple[Resolved, RolloutGenerator] | None = field(init=False, default=None)

    def current(
        self, iteration: int, candidates: RolloutRequest
    ) -> tuple[RolloutGenerator, Mapping[str, float]]:
        """Return the generator of an iteration, and the metrics of an audit if one is due.

        Raises UserError when an audit fails and the run is to stop then.
        """
        resolved, generator = self._now or self._restore(iteration)
        if not self.every or iteration % self.every:
            return generator, {}
        report = self._audit(generator, iteration, candidates)
        steps, decision = generator.num_inference_steps, self.decide(report, iteration)
        if self.exact.runtime.is_main and decision.action != "stop":  # the error says it then
            level = logging.INFO if decision.passed else logging.WARNING
            LOG.log(level, "%s", decision.text)
        if decision.next is not None:
            generator = self._now = None  # its memory is free before the next is built
            _, generator = self._switch_to(decision.next, iteration)
        # Recorded last: a precision that cannot be built is none to resume in.
        if self.exact.runtime.is_main:
            event = AuditEvent(
                iteration=iteration,
                precision=precision_name(resolved),
                steps=steps,
                action=decision.action,
                next=None if decision.next is None else precision_name(decision.next),
                text=decision.text,
                report=report,
            )
            self.log.record(event)
        if decision.action == "stop":
            raise UserError(decision.text)
        summary = report.summary()
        return generator, {name: float(summary[key]) for key, name in METRICS.items()}

    def decide(self, report: AuditReport, iteration: int) -> AuditDecision:
        """Decide on the current precision by an audit before this iteration."""
        assert self._now is not None
        resolved, generator = self._now
        noise, exact_noise = (
            any(move.noise for move in plan(iteration).moves)
            for plan in (self.plan, self.exact_plan)
        )
        return decide(
            report,
            iteration=iteration,
            min_rho=self.min_rho,
            on_miss=self.on_miss,
            resolved=resolved,
            capability=self.capability,
            steps=generator.num_inference_steps,
            most=self.exact.num_inference_steps,
            unseen=exact_noise and not noise,
        )

    def _restore(self, iteration: int) -> tuple[Resolved, RolloutGenerator]:
        """Switch to the precision that earlier audits of candidates with as many steps came to."""

        def earlier() -> bytes:
            self.log.rewind(iteration)
            return self.log.data()

        steps = len(self.plan(iteration).steps)
        resolved, since = self.first, 0
        for event in self.log.parse(self.exact.runtime.from_main(earlier)):
            if event.steps == steps:
                after = replay_precision([(event.precision, event.next)], resolved, self.capability)
                if after != resolved:
                    resolved, since = after, event.iteration
        return self._switch_to(resolved, since)

    def _switch_to(self, resolved: Resolved, since: int) -> tuple[Resolved, RolloutGenerator]:
        with self.exact.runtime.raise_on_all():
            self._now = resolved, self.make(resolved, since)
        return self._now

    def _audit(
        self, generator: RolloutGenerator, iteration: int, candidates: RolloutRequest
    ) -> AuditReport:
        """Generate all candidates of the first prompts both ways."""
        plan = self.plan(iteration)
        # All prompts' texts at once, as without an audit: the last bits depend on their batch.
        generator.encode_prompts(candidates.take(generator.share(candidates, plan)))
        few = candidates.only((candidates.group < self.prompts).nonzero().squeeze(1))
        exact = replace(
            self.exact,
            specs=generator.specs,
            failures=generator.failures,
            whole_prompts=generator.whole_prompts,  # nothing is learned from them together
        )
        proxy = score_candidates(generator, few, plan, Timer())
        true = score_candidates(exact, few, self.exact_plan(iteration), Timer())
        return audit_ranks(proxy, true, self.keep(iteration), self.select)
