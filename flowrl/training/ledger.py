"""The event log of a run: an append-only `ledger.jsonl` in its folder.

    start, resume   the recipe in force, facts (see `flowrl.training.resume`), what changed since
                    the last one, as [before, now], and the iteration it begins at
    checkpoint      its iteration and the digests of its files
    rollback        the iteration, that of the weights that came back, and the penalty from there on
    hacking         the iteration whose evaluation looked hacked, and why
    aside           where later checkpoints went when the run went back to an older one
    stop            the iteration, the reason, and whether LoRA, gallery and card were finished

Each line carries a digest (`flowrl.utils.journal`); a line that a killed process left unfinished is
no event.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowrl.utils.journal import append_line, read_lines

FILE = "ledger.jsonl"
Event = dict[str, Any]


class Ledger:
    """The event log in a run's folder. Only the main process writes it, which has the lock."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / FILE
        self._events: list[Event] | None = None

    def events(self) -> list[Event]:
        """Return all events, oldest first."""
        if self._events is None:
            lines = read_lines(self.path)
            lines.warn(self.path)
            self._events = [entry for entry in lines.entries if "event" in entry]
        return self._events

    def append(self, event: str, **content: Any) -> None:
        """Write one event, flushed to disk before it returns."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        entry = {"event": event, "time": time, **content}
        events = self.events()
        append_line(self.path, entry)
        events.append(entry)

    def last(self, *names: str) -> Event | None:
        """Return the latest event of one of these names."""
        return next((e for e in reversed(self.events()) if e["event"] in names), None)
