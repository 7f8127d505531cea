"""What processes that ask one judge must know of each other: answers, spending, turns and rests.

An SQLite file in a folder that they share, also with later runs; without one, the same in memory.
"""

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .messages import Reply

FILE = "judge.sqlite"
WAIT = 30.0  # seconds for another process that writes
SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, reply TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS numbers (name TEXT PRIMARY KEY, value REAL NOT NULL);
"""
now = time.time  # a clock that processes share


class BudgetSpent(RuntimeError):
    """What a judge may cost is used up: no further question is sent, and the run ends."""

    ends_run = True  # flowrl stops a run for it, with a checkpoint


class Account:
    """Answers by key, and numbers by name that several processes change.

    folder: where the file lies; None keeps all in memory, for this process.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder
        self._lock = threading.Lock()
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        place = ":memory:" if folder is None else str(Path(folder) / FILE)
        self._file = sqlite3.connect(
            place, timeout=WAIT, isolation_level=None, check_same_thread=False
        )
        with contextlib.suppress(sqlite3.OperationalError):  # a disk that cannot do it
            self._file.execute("PRAGMA journal_mode=WAL")
        self._file.executescript(SCHEMA)

    def known(self, key: str) -> Reply | None:
        """The answer that is kept under this key."""
        with self._lock:
            row = self._file.execute("SELECT reply FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        kept = json.loads(row[0])
        return Reply(text=kept["text"], first=tuple((t, p) for t, p in kept["first"]))

    def keep(self, key: str, reply: Reply) -> None:
        said = {name: value for name, value in asdict(reply).items() if name in ("text", "first")}
        with self._lock:
            self._file.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(said))
            )

    def number(self, name: str) -> float:
        """A number, 0 until it is set."""
        with self._lock:
            return self._read(name)

    def add(self, name: str, value: float, *, most: float | None = None) -> bool:
        """Adds to a number, unless it would be more than `most` then; says whether it did."""
        with self._lock, self._alone():
            after = self._read(name) + value
            if most is not None and after > most:
                return False
            self._write(name, after)
            return True

    def raise_to(self, name: str, value: float) -> None:
        """Makes a number at least so large."""
        with self._lock, self._alone():
            self._write(name, max(value, self._read(name)))

    def take_turn(self, name: str, interval: float) -> float:
        """The seconds until a turn of one's own, `interval` after the one before it."""
        with self._lock, self._alone():
            at = max(now(), self._read(name))
            self._write(name, at + interval)
        return at - now()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process reads or writes meanwhile."""
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            self._file.execute("COMMIT")

    def _read(self, name: str) -> float:
        row: Any = self._file.execute(
            "SELECT value FROM numbers WHERE name = ?", (name,)
        ).fetchone()
        return 0.0 if row is None else row[0]

    def _write(self, name: str, value: float) -> None:
        self._file.execute("INSERT OR REPLACE INTO numbers VALUES (?, ?)", (name, value))
