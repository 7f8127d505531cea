"""The audits of a run on disk, so that a resumed run repeats what an uninterrupted one does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from flowrl.errors import UserError
from flowrl.sampling.audit_gate import Action
from flowrl.sampling.rank_audit import AuditReport
from flowrl.utils.files import write_text

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
