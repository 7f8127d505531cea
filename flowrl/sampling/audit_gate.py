"""What an audit decides: candidates' precision stays, gives way to a better one, or all stops."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from flowrl.quantization.precision import Capability, Resolved, named, next_lower, shown
from flowrl.sampling.rank_audit import AuditReport

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
    steps there can be. unseen: exact pictures have noise on their way that candidates have not,
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
    return "candidates have as many steps as exact pictures already"


def _ways_out(resolved: Resolved, lower: Resolved | None, steps: int, most: int) -> str:
    ways = [f"raise {STEPS}, now {steps} of {most}"] if steps < most else []
    if lower is not None:
        change = f"to {named(lower)} instead of {named(resolved)}"
        ways.append(f"set rollout.explore.precision {change}")
    return ", or ".join(ways) or _left(steps, most)
