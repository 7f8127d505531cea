"""The event log of a run: an append-only `ledger.jsonl` in its folder.

    start, resume   the recipe in force, what changed since the last one, the iteration it begins at
    checkpoint      its iteration and the digests of its files
    aside           where later checkpoints went when the run went back to an older one
    stop            the iteration, the reason, and whether LoRA, gallery and card were finished

Each line carries a digest (`flowrl.utils.journal`); a line that a killed process left unfinished is
no event.
"""

from collections.abc import Mapping
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

    def begin(
        self,
        *,
        version: str,
        recipe: Mapping[str, Any],
        facts: Mapping[str, Any],
        step: int | None,
        changed: Mapping[str, Any],
    ) -> None:
        """Write the event that begins a session.

        Args:
            recipe, facts: what is trained now, see `flowrl.training.resume`.
            step: the iteration of the checkpoint it resumes from; None for a new run.
            changed: options that differ from the session before, as [before, now].
        """
        name = "start" if step is None else "resume"
        self.append(name, flowrl=version, step=step, recipe=dict(recipe),
                    facts=dict(facts), changed=dict(changed))  # fmt: skip
