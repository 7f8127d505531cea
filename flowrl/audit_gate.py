"""What an audit decides: the previews' precision stays, gives way to a better one, or all stops."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from flowrl.audit import AuditReport
from flowrl.lowbit.precision import Capability, Resolved, named, next_lower

OnMiss = Literal["degrade", "stop", "warn"]
Action = Literal["keep", "degrade", "warn", "stop"]
MIN_RHO = "rollout.explore.audit.min_rho"
STEPS = "rollout.explore.steps"


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
    min_rho: float,
    on_miss: OnMiss,
    resolved: Resolved,
    capability: Capability,
    steps: int,
) -> Verdict:
    """Accept the previews if their mean within-prompt rho is at least `min_rho`.

    resolved: the precision that drew them, in `steps` steps. Where none is lower on the ladder
    (nvfp4, fp8 if the device has it, bf16) or no prompt has a rho, a warning is all there is.
    """
    if on_miss not in get_args(OnMiss):
        raise ValueError(f"on_miss is {on_miss!r}, expected one of {', '.join(get_args(OnMiss))}")
    more = f"more preview steps are what is left ({STEPS}, now {steps})"
    drawn = f"previews in {named(resolved)} with {steps} steps"
    if math.isnan(report.rho):
        return _warning(f"audit: {_no_rho(report, drawn)}; {more}")
    found = f"audit: {drawn} have rho {report.rho:.3f} within prompt{_basis(report)}"
    if report.rho >= min_rho:
        text = f"{found}, at least {MIN_RHO} = {min_rho:g}"
        return Verdict(passed=True, action="keep", next=None, text=text)
    missed = f"{found}, below {MIN_RHO} = {min_rho:g}"
    lower = next_lower(resolved, capability)
    if on_miss == "stop":
        text = f"{missed}: {_ways_out(resolved, lower, steps)}, or set on_miss to warn"
        return Verdict(passed=False, action="stop", next=None, text=text)
    if on_miss == "warn":
        return _warning(f"{missed}: the gain is lower; {_ways_out(resolved, lower, steps)}")
    if lower is None:
        return _warning(f"{missed}, and {named(resolved)} is the last precision; {more}")
    text = f"{missed}: from now on previews are drawn in {named(lower)}"
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


def _basis(report: AuditReport) -> str:
    count = len(report.prompts)
    left_out = f", {report.without_rho} more have none" if report.without_rho else ""
    missing = f", {report.missing} scores missing" if report.missing else ""
    return f" (mean of {count - report.without_rho} prompts{left_out}{missing})"


def _no_rho(report: AuditReport, drawn: str) -> str:
    return (
        f"none of the {len(report.prompts)} prompts can tell how {drawn} rank, because their "
        "scores or the exact ones are all equal within each"
    )


def _ways_out(resolved: Resolved, lower: Resolved | None, steps: int) -> str:
    ways = f"raise {STEPS}, now {steps}"
    if lower is not None:
        ways += f", or set rollout.explore.precision to {named(lower)} instead of {named(resolved)}"
    return ways
