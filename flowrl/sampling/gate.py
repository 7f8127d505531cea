"""Explores in a cheap precision for as long as audits find that it ranks as the exact one does."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from flowrl.errors import UserError
from flowrl.quantization.precision import Capability, Resolved, named
from flowrl.sampling.audit_gate import OnMiss, Verdict, replayed, verdict
from flowrl.sampling.audit_log import AuditEvent, AuditLog
from flowrl.sampling.rank_audit import AuditReport, audit
from flowrl.sampling.rollout import Request, Stopwatch
from flowrl.sampling.stage import Stage
from flowrl.sampling.telling import Mode
from flowrl.sampling.two_stage import score_candidates
from flowrl.trees.plan import TreePlan

LOG = logging.getLogger(__name__)
# What is logged of an audit, by the names of its summary.
METRICS = {"tau": "tau", "rho": "rho", "pooled rho": "pooled_rho", "retention": "contrast"}


@dataclass(slots=True, kw_only=True)
class Gate:
    """The stage that explores in an iteration: see the options under `rollout.explore.audit`.

    make: builds the stage of a precision, in which candidates are drawn since an iteration; `first`
    at the beginning. exact: what draws afterwards.
    plan, exact_plan: of an iteration, for candidates and for as many exact trees. keep: trees of a
    prompt that are kept. All processes call it together, and come to the same verdict.
    """

    make: Callable[[Resolved, int], Stage]
    first: Resolved
    capability: Capability
    exact: Stage
    plan: Callable[[int], TreePlan]
    exact_plan: Callable[[int], TreePlan]
    keep: Callable[[int], int]
    mode: Mode
    every: int
    prompts: int
    min_rho: float
    on_miss: OnMiss
    log: AuditLog
    _now: tuple[Resolved, Stage] | None = field(init=False, default=None)

    def __call__(self, iteration: int, candidates: Request) -> tuple[Stage, Mapping[str, float]]:
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

    def _standing(self, iteration: int) -> tuple[Resolved, Stage]:
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

    def _stand_at(self, resolved: Resolved, since: int) -> Stage:
        with self.exact.runtime.together():
            self._now = resolved, self.make(resolved, since)
        return self._now[1]

    def _audit(self, stage: Stage, iteration: int, candidates: Request) -> AuditReport:
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

        def scored(stage: Stage, plan: TreePlan) -> Tensor:
            return score_candidates(stage, few, plan, Stopwatch())

        proxy = scored(stage, self.plan(iteration))
        true = scored(exact, self.exact_plan(iteration))
        return audit(proxy, true, self.keep(iteration), self.mode)

    def _judge(
        self, report: AuditReport, resolved: Resolved, stage: Stage, iteration: int
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
