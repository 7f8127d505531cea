"""How well candidates rank: the scores they are chosen by beside the exact ones of all of them."""

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
from flowrl.quantization.backends import Capability, Resolved, named, next_lower, shown
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, Stopwatch
from flowrl.sampling.two_stage import Mode, best_and_worst, score_candidates, telling
from flowrl.trees.plan import TreePlan
from flowrl.utils.files import write_text

# --- Does a cheap score rank images as the true one does? Measures of one prompt's N candid --


def paired(proxy: Tensor, true: Tensor) -> Tensor:
    """Which candidates have both scores. (N,) bool; any shape. Raises ValueError if they differ."""
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


def mean_rho(proxies: Sequence[Tensor], trues: Sequence[Tensor]) -> float:
    """Mean `spearman_rho` over prompts, those without one left out; NaN when none has one."""
    found = [spearman_rho(p, t) for p, t in zip(proxies, trues, strict=True)]
    return nan_mean(found)


def regenerated_rank(proxy: Tensor, true: Tensor) -> float:
    """Mean within-prompt rho over the K candidates that were drawn exactly anyway.

    proxy, true: (P, K). It costs nothing, but only extremes were chosen: their rho is not that of
    all candidates (restriction of range). Watch how it drifts; decide nothing by it.
    """
    if proxy.ndim != 2:
        raise ValueError(f"proxies have shape {tuple(proxy.shape)}, expected (prompts, kept)")
    paired(proxy, true)
    return mean_rho(proxy.unbind(0), true.unbind(0))


def ranks(score: Tensor) -> Tensor:
    """Average ranks, 1 the highest score: (N,) -> (N,) float64, NaN where there is no score."""
    from scipy.stats import rankdata

    finite = score.isfinite()
    found = torch.full(score.shape, math.nan, dtype=torch.float64)
    found[finite] = torch.from_numpy(rankdata(-score[finite].double().numpy()))
    return found


def halves(score: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The floor(K/2) best of the `chosen` (K,) and the others, both long, best first.

    Equal scores by index, as in the choice itself: of best_worst these are its two ends.
    """
    ranked = chosen[score[chosen].argsort(descending=True, stable=True)]
    best, worst = best_and_worst(len(ranked), len(ranked))
    return ranked[best], ranked[worst]


def overlap(found: Tensor, wanted: Tensor) -> float:
    """Share of the rows `found` (M,) long that are among `wanted`; NaN when there are none."""
    return _mean(torch.isin(found, wanted))


def mean_true_rank(true: Tensor, rows: Tensor) -> float:
    """Mean of the true `ranks` of the `rows` (M,) long; NaN when there are none."""
    return _mean(ranks(true)[rows])


def contrast_retention(
    true: Tensor, chosen: tuple[Tensor, Tensor], perfect: tuple[Tensor, Tensor]
) -> float:
    """How much of the best possible contrast the choice keeps; 1 for a perfect proxy.

    chosen, perfect: `halves` by proxy and by true score. The contrast is mean(true of the best) -
    mean(true of the worst). NaN when the perfect one is 0 or has an empty half.
    """
    best = _contrast(true, perfect)
    return _contrast(true, chosen) / best if best else math.nan


def nan_mean(values: Sequence[float]) -> float:
    """Mean of the numbers that are no NaN; NaN when there are none."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _contrast(true: Tensor, ends: tuple[Tensor, Tensor]) -> float:
    best, worst = (_mean(true[rows]) for rows in ends)
    return best - worst


def _mean(values: Tensor) -> float:
    return values.double().mean().item()  # torch's mean of nothing is NaN


def _correlation(measure: Callable[..., Any], proxy: Tensor, true: Tensor) -> float:
    """One of scipy's, NaN where a side is constant or has fewer than 2 pairs."""
    both = paired(proxy, true)
    sides = [side[both].double().cpu().numpy() for side in (proxy, true)]
    if any(len(side) < 2 or side.min() == side.max() for side in sides):
        return math.nan
    return float(measure(*sides)[0])


# --- How well candidates rank ------------------------------------------------------------------

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


# --- What an audit decides ---------------------------------------------------------------------

OnMiss = Literal["degrade", "stop", "warn"]
Action = Literal["keep", "degrade", "warn", "stop"]
MIN_RHO = "rollout.explore.audit.min_rho"
STEPS = "rollout.explore.steps"
ON_MISS = "rollout.explore.audit.on_miss"
UNSEEN = f"candidates without noise cannot see the noise of the rollout's tree: set {STEPS} to null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do now. next: the precision to go on in, where it changes. text: for people."""

    passed: bool
    action: Action
    next: Resolved | None
    text: str


def verdict(
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
) -> Verdict:
    """Accept the candidates if their mean within-prompt rho is at least `min_rho`.

    iteration: the next, from 0. resolved: the precision that drew them, in `steps` of the `most`
    steps there can be. unseen: exact images have noise on their way that candidates have not,
    which no precision mends. Then, and where none is lower on the ladder (nvfp4, fp8 if the device
    has it, not quantised) or no prompt has a rho, a warning is all there is.
    """
    if on_miss not in get_args(OnMiss):
        raise ValueError(f"on_miss is {on_miss!r}, expected one of {', '.join(get_args(OnMiss))}")
    start = f"audit before iteration {iteration + 1}"
    drawn = f"candidates ({steps} steps, {shown(resolved)})"
    if math.isnan(report.rho):
        return _warning(f"{start}: {_no_rho(report, drawn)}; {_left(steps, most)}")
    found = f"{start}: {drawn} have rho {report.rho:.3f} within prompt{_basis(report)}"
    if report.rho >= min_rho:
        text = f"{found}, at least {MIN_RHO} = {min_rho:g}"
        return Verdict(passed=True, action="keep", next=None, text=text)
    missed = f"{found}, below {MIN_RHO} = {min_rho:g}"
    lower = next_lower(resolved, capability)
    ways = UNSEEN if unseen else _ways_out(resolved, lower, steps, most)
    if on_miss == "stop":
        text = f"{missed}: {ways}, or set {ON_MISS} to warn"
        return Verdict(passed=False, action="stop", next=None, text=text)
    if on_miss == "warn" or unseen:
        return _warning(f"{missed}: the gain may be lower; {ways}")
    if lower is None:
        return _warning(f"{missed}, and nothing is quantised any more: {_left(steps, most)}")
    text = f"{missed}: from now on candidates are {_drawn(lower)}"
    return Verdict(passed=False, action="degrade", next=lower, text=text)


def replayed(
    moves: Iterable[tuple[str, str | None]], resolved: Resolved, capability: Capability
) -> Resolved:
    """The precision that a run stands at which began with `resolved`.

    moves: `precision` and `next` of its audits in order. One that left another precision than the
    run is at by then belongs to a recipe that has changed, and is passed over; on a device that
    lacks the next precision it is the first below.
    """
    for drawn, following in moves:
        if following is None or drawn != named(resolved):
            continue
        while named(resolved) != following:
            lower = next_lower(resolved, capability)
            if lower is None:
                break
            resolved = lower
    return resolved


def _warning(text: str) -> Verdict:
    return Verdict(passed=False, action="warn", next=None, text=text)


def _drawn(resolved: Resolved) -> str:
    return shown(resolved) if resolved.format == "bf16" else f"drawn in {shown(resolved)}"


def _basis(report: AuditReport) -> str:
    count = len(report.prompts) - report.without_rho
    left_out = f", {report.without_rho} more without" if report.without_rho else ""
    missing = f", {_counted(report.missing, 'score')} missing" if report.missing else ""
    return f" (mean of {_counted(count, 'prompt')}{left_out}{missing})"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _no_rho(report: AuditReport, drawn: str) -> str:
    return (
        f"none of the {len(report.prompts)} prompts can tell how {drawn} rank, because their "
        "scores or the exact ones are all equal within each"
    )


def _left(steps: int, most: int) -> str:
    if steps < most:
        return f"more steps of a candidate are what is left ({STEPS}, now {steps} of {most})"
    return "candidates have as many steps as exact images already"


def _ways_out(resolved: Resolved, lower: Resolved | None, steps: int, most: int) -> str:
    ways = [f"raise {STEPS}, now {steps} of {most}"] if steps < most else []
    if lower is not None:
        change = f"to {named(lower)} instead of {named(resolved)}"
        ways.append(f"set rollout.explore.precision {change}")
    return ", or ".join(ways) or _left(steps, most)


# --- The audits of a run on disk, so that a resumed run repeats what an uninterrupted one doe --

FILE = "audits.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEvent:
    """An audit before the rollout of `iteration`, counted from 0, and what followed.

    precision: what candidates were drawn in, in `steps` steps; next: what they are drawn in from
    this iteration on, None where that stays. text: the verdict, for people.
    """

    iteration: int
    precision: str
    steps: int
    action: Action
    next: str | None
    text: str
    report: AuditReport


_EVENT = TypeAdapter(AuditEvent)


class AuditLog:
    """`audits.jsonl` of a run folder, one line an audit, replaced whole at every change.

    A run resumed from an older checkpoint finds audits there of iterations that it has yet to come
    to: it sees none of them, and its own take their place. One process of a run writes.
    """

    def __init__(self, folder: Path | str):
        self.path = Path(folder) / FILE

    def before(self, iteration: int) -> tuple[AuditEvent, ...]:
        """The audits of earlier iterations, in order: what an uninterrupted run knows by then."""
        return tuple(event for event in self._read() if event.iteration < iteration)

    def record(self, event: AuditEvent) -> None:
        """Add one; those of its and later iterations are dropped first."""
        self._write([*self.before(event.iteration), event])

    def rewind(self, iteration: int) -> None:
        """Drop the audits of this and later iterations, where a resumed run begins."""
        events = self._read()
        kept = [event for event in events if event.iteration < iteration]
        if len(kept) < len(events):
            self._write(kept)

    def _read(self) -> list[AuditEvent]:
        """Every audit, by iteration. Raises UserError for a line that is none."""
        if not self.path.exists():
            return []
        found = []
        for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
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
        lines = [_EVENT.dump_json(event).decode() for event in events]
        write_text(self.path, "".join(line + "\n" for line in lines))


# --- Explores in a cheap precision for as long as audits find that it ranks as the exact one  --

LOG = logging.getLogger(__name__)
# What is logged of an audit, by the names of its summary.
METRICS = {"tau": "tau", "rho": "rho", "pooled rho": "pooled_rho", "retention": "contrast"}


@dataclass(slots=True, kw_only=True)
class PrecisionController:
    """The stage that explores in an iteration: see the options under `rollout.explore.audit`.

    make: builds the stage of a precision, in which candidates are drawn since an iteration; `first`
    at the beginning. exact: what draws afterwards.
    plan, exact_plan: of an iteration, for candidates and for as many exact trees. keep: trees of a
    prompt that are kept. All processes call it together, and come to the same verdict.
    """

    make: Callable[[Resolved, int], RolloutGenerator]
    first: Resolved
    capability: Capability
    exact: RolloutGenerator
    plan: Callable[[int], TreePlan]
    exact_plan: Callable[[int], TreePlan]
    keep: Callable[[int], int]
    mode: Mode
    every: int
    prompts: int
    min_rho: float
    on_miss: OnMiss
    log: AuditLog
    _now: tuple[Resolved, RolloutGenerator] | None = field(init=False, default=None)

    def __call__(
        self, iteration: int, candidates: RolloutRequest
    ) -> tuple[RolloutGenerator, Mapping[str, float]]:
        """The stage of an iteration, and what an audit before it has found, if one was due.

        Raises UserError when an audit fails and the run is to stop then.
        """
        resolved, stage = self._standing(iteration)
        if not self.every or iteration % self.every:
            return stage, {}
        report = self._audit(stage, iteration, candidates)
        found, steps = self._judge(report, resolved, stage, iteration), stage.steps
        if self.exact.runtime.is_main and found.action != "stop":  # which raises the same sentence
            LOG.log(logging.INFO if found.passed else logging.WARNING, "%s", found.text)
        if found.next is not None:
            stage = self._now = None  # its memory is free before the next is built
            stage = self._stand_at(found.next, iteration)
        # Written down last: a precision that cannot be built is no precision to resume in.
        if self.exact.runtime.is_main:
            self.log.record(
                AuditEvent(
                    iteration=iteration,
                    precision=named(resolved),
                    steps=steps,
                    action=found.action,
                    next=None if found.next is None else named(found.next),
                    text=found.text,
                    report=report,
                )
            )
        if found.action == "stop":
            raise UserError(found.text)
        summary = report.summary()
        return stage, {name: float(summary[key]) for key, name in METRICS.items()}

    def _standing(self, iteration: int) -> tuple[Resolved, RolloutGenerator]:
        """Where earlier audits have left it, those of the session before included.

        Audits of candidates with another number of steps say nothing of these.
        """
        if self._now is None:
            if self.exact.runtime.is_main:
                self.log.rewind(iteration)
            steps = len(self.plan(iteration).steps)
            events = [event for event in self.log.before(iteration) if event.steps == steps]
            resolved, since = self.first, 0
            for event in events:
                after = replayed([(event.precision, event.next)], resolved, self.capability)
                if after != resolved:
                    resolved, since = after, event.iteration
            self._stand_at(resolved, since)
        assert self._now is not None
        return self._now

    def _stand_at(self, resolved: Resolved, since: int) -> RolloutGenerator:
        with self.exact.runtime.together():
            self._now = resolved, self.make(resolved, since)
        return self._now[1]

    def _audit(
        self, stage: RolloutGenerator, iteration: int, candidates: RolloutRequest
    ) -> AuditReport:
        """Draw all candidates of the first prompts both ways."""
        # All prompts' texts at once, as without an audit: the last bits depend on their batch.
        stage.read(candidates.take(stage.share(candidates, self.plan(iteration))))
        few = candidates.only((candidates.group < self.prompts).nonzero().squeeze(1))
        exact = replace(
            self.exact,
            specs=stage.specs,
            failures=stage.failures,
            whole_prompts=stage.whole_prompts,  # nothing is learned from them together
        )

        def scored(stage: RolloutGenerator, plan: TreePlan) -> Tensor:
            return score_candidates(stage, few, plan, Stopwatch())

        proxy = scored(stage, self.plan(iteration))
        true = scored(exact, self.exact_plan(iteration))
        return audit(proxy, true, self.keep(iteration), self.mode)

    def _judge(
        self, report: AuditReport, resolved: Resolved, stage: RolloutGenerator, iteration: int
    ) -> Verdict:
        noise, exact_noise = (
            any(move.noise for move in plan(iteration).moves)
            for plan in (self.plan, self.exact_plan)
        )
        return verdict(
            report,
            iteration=iteration,
            min_rho=self.min_rho,
            on_miss=self.on_miss,
            resolved=resolved,
            capability=self.capability,
            steps=stage.steps,
            most=self.exact.steps,
            unseen=exact_noise and not noise,
        )
