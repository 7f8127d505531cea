"""What processes that use one judge share: replies, and requests sent.

An SQLite file in a folder, also for later runs; without a folder, requests in memory.
"""

import contextlib
import json
import math
import sqlite3
import threading
from dataclasses import asdict
from pathlib import Path

from .messages import Reply

FILE = "judge.sqlite"
WAIT_S = 30.0  # for another process that writes
SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, reply TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS requests (id INTEGER PRIMARY KEY, sent REAL NOT NULL);
INSERT OR IGNORE INTO requests VALUES (0, 0);
"""
ADD = "UPDATE requests SET sent = sent + :count WHERE sent + :count <= :limit"


class BudgetSpent(RuntimeError):
    """The judge's budget is used up: no further request is sent, and the run ends."""

    ends_run = True  # flowrl stops a run for it, with a checkpoint


class Account:
    """Replies by key, and the number of requests, which several processes change.

    folder: of the file; None keeps all in memory, for this process.
    """

    def __init__(self, folder: str | None = None):
        self._lock = threading.Lock()
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = ":memory:" if folder is None else str(Path(folder) / FILE)
        self._file = sqlite3.connect(
            self.path, timeout=WAIT_S, isolation_level=None, check_same_thread=False
        )
        try:
            with contextlib.suppress(sqlite3.OperationalError):  # a disk that cannot do it
                self._file.execute("PRAGMA journal_mode=WAL")
            self._file.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{self.path} cannot be used ({error}): remove it; its questions are asked again"
            ) from error

    def reply(self, key: str) -> Reply | None:
        """Return the stored reply, None where there is none."""
        with self._lock:
            row = self._file.execute("SELECT reply FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        try:
            stored = json.loads(row[0])
            return Reply(text=stored["text"], first=tuple((t, p) for t, p in stored["first"]))
        except (ValueError, KeyError, TypeError):  # damaged: it is asked again
            return None

    def store(self, key: str, reply: Reply) -> None:
        fields = {name: value for name, value in asdict(reply).items() if name != "missing"}
        row = key, json.dumps(fields)
        with self._lock:
            self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", row)

    def add_requests(self, count: int, *, limit: int | None = None) -> bool:
        """Add to the requests sent, unless they would exceed `limit`; return whether they do not.

        One statement, so that other processes neither read nor write between.
        """
        with self._lock:
            values = {"count": count, "limit": math.inf if limit is None else limit}
            change = self._file.execute(ADD, values)
        return change.rowcount > 0
