"""A run's `metrics.jsonl`, read as it grows and kept in bounded memory.

A file is read from where the last look ended, in pieces. What is kept of a metric is at most LIMIT
buckets: each has as many values in a row as needed, their mean, lowest and highest; while it has
fewer values than that, every one is kept as it is.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flowrl.utils.journal import open_line
from flowrl.utils.untrusted import RefusedFile, open_regular

LIMIT = 1000  # buckets of a metric
MOST_NAMES = 2000  # metrics of a run; further ones are left out
PIECE = 2**20  # bytes that are parsed at a time
HEAD, TAIL = 2**16, 2**18  # bytes at a file's ends that a glance reads
LOOK_BACK = 2**25  # bytes before the tail in which it looks for held-out scores
MAX_STEP = 2**53


@dataclass(slots=True)
class Buckets:
    """Runs of values of one metric, in order."""

    first: np.ndarray  # (n,) int64, step of the first value
    last: np.ndarray  # (n,) int64, step of the last
    low: np.ndarray  # (n,) float32, inf without a value
    high: np.ndarray  # (n,) float32, -inf without a value
    total: np.ndarray  # (n,) float64, sum of the values
    count: np.ndarray  # (n,) int64, how many there are; missing ones are not counted

    @classmethod
    def of(cls, steps: np.ndarray, values: np.ndarray) -> "Buckets":
        """Return a bucket for each value (n,), NaN where it is missing."""
        known = np.isfinite(values)
        low, high = np.where(known, values, np.inf), np.where(known, values, -np.inf)
        with np.errstate(over="ignore"):
            bounds = low.astype(np.float32), high.astype(np.float32)
        return cls(steps, steps, *bounds, np.where(known, values, 0.0), known.astype(np.int64))

    def joined(self, starts: np.ndarray) -> "Buckets":
        """Return buckets (m,), each of those from one start (m,) up to the next."""
        ends = np.append(starts[1:], len(self.first)) - 1
        return Buckets(
            self.first[starts],
            self.last[ends],
            np.minimum.reduceat(self.low, starts),
            np.maximum.reduceat(self.high, starts),
            np.add.reduceat(self.total, starts),
            np.add.reduceat(self.count, starts),
        )

    def followed_by(self, other: "Buckets") -> "Buckets":
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Buckets(*(np.concatenate(pair) for pair in pairs))

    def means(self) -> np.ndarray:
        """Return (n,) float64, NaN where nothing is known."""
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1), np.nan)


class Series:
    """One metric over the steps of a run."""

    def __init__(self) -> None:
        self._buckets = Buckets.of(np.empty(0, np.int64), np.empty(0))
        self._values = 0  # so many have come
        self._width = 1  # values of a bucket; the last one may have fewer
        self._ends: list[tuple[int, float]] = []  # first and last (step, value), as they came

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Add values (n,) with their steps (n,). Of one step the value that came last holds.

        A step before the last one, as where the base is evaluated again, replaces a value only
        while every value is kept.
        """
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        held = np.append(steps[1:] != steps[:-1], True)
        steps, values = steps[held], values[held]
        late = steps <= (self._buckets.last[-1] if self._values else -1)
        if late.any():
            self._replace(steps[late], values[late])
            steps, values = steps[~late], values[~late]
        if len(steps):
            self._append(Buckets.of(steps, values))
            first, last = (int(steps[0]), values[0].item()), (int(steps[-1]), values[-1].item())
            self._ends = [self._ends[0] if self._ends else first, last]

    def _replace(self, steps: np.ndarray, values: np.ndarray) -> None:
        if self._width > 1:
            return
        known = self._buckets
        merged = dict(zip(known.last.tolist(), known.means().tolist(), strict=True))
        merged |= dict(zip(steps.tolist(), values.tolist(), strict=True))
        order = sorted(merged)
        self._values, self._buckets = 0, Buckets.of(np.empty(0, np.int64), np.empty(0))
        self._append(Buckets.of(np.array(order), np.array([merged[s] for s in order])))
        self._ends = [(step, merged[step]) for step in (order[0], order[-1])]

    def _append(self, new: Buckets) -> None:
        while -(-(self._values + len(new.first)) // self._width) > LIMIT:
            self._width *= 2
            if self._values:
                self._buckets = self._buckets.joined(np.arange(0, len(self._buckets.first), 2))
        number = (self._values + np.arange(len(new.first))) // self._width  # of each one's bucket
        both = self._buckets.followed_by(
            new.joined(np.flatnonzero(np.diff(number, prepend=number[0] - 1)))
        )
        place = len(self._buckets.first)
        if self._values % self._width:  # the last bucket goes on
            both = both.joined(np.delete(np.arange(len(both.first)), place))
        self._buckets, self._values = both, self._values + len(new.first)

    def points(self, most: int) -> dict[str, list[Any]]:
        """Return at most `most` points: x (steps), y (means), and low and high where joined.

        None stands for what is missing.
        """
        found = self._buckets
        group = -(-len(found.first) // most)
        if group > 1:
            found = found.joined(np.arange(0, len(found.first), group))
        points = {"x": found.last.tolist(), "y": _listed(found.means())}
        if self._width > 1 or group > 1:
            points |= {"low": _listed(found.low), "high": _listed(found.high)}
        return points

    def summary(self) -> dict[str, Any]:
        """Return first, last and mean value, None where missing, and the steps of the ends."""
        known = self._buckets
        count = int(known.count.sum())
        (first_step, first), (last_step, last) = self._ends
        mean = known.total.sum() / count if count else np.nan
        values = _listed(np.array([first, last, mean]))
        return dict(zip(("first", "last", "mean"), values, strict=True)) | {
            "first_step": first_step, "last_step": last_step, "values": self._values,
        }  # fmt: skip


def _listed(values: np.ndarray) -> list[float | None]:
    """Return numbers with 7 digits, None for what JSON does not have."""
    return [float(f"{v:.7g}") if np.isfinite(v) else None for v in values.tolist()]


@dataclass(slots=True)
class MetricsLog:
    """What is known of one `metrics.jsonl`; several threads may use it."""

    path: Path
    series: dict[str, Series] = field(default_factory=dict)
    damaged: int = 0  # lines that are none of metrics
    version: int = 0  # changes when what is known changes
    offset: int = 0  # bytes that are parsed
    _file: tuple[int, int] = (0, 0)  # device and inode: a resumed run writes a new file
    _skipping: bool = False  # inside of a line that is longer than a piece
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, budget: int) -> bool:
        """Parse up to `budget` further bytes; return whether the end was reached."""
        with self._lock:
            for _ in range(max(1, budget // PIECE)):
                if not self._read_piece():
                    return True
            return False

    def _read_piece(self) -> bool:
        """Parse one piece; return whether there may be more."""
        try:
            with open_regular(self.path, inside=self.path.parent) as file:
                status = os.fstat(file.fileno())
                known = (status.st_dev, status.st_ino)
                if known != self._file or status.st_size < self.offset:
                    self._forget(known)
                file.seek(self.offset)
                data = file.read(PIECE)
        except (OSError, RefusedFile):
            if self.offset:
                self._forget((0, 0))
            return False
        end = data.rfind(b"\n") + 1
        if not end:  # an unfinished line, or an endless one
            if len(data) == PIECE:
                self.damaged += not self._skipping
                self.offset, self._skipping = self.offset + len(data), True
            return len(data) == PIECE
        lines = data[:end].splitlines()
        if self._skipping:
            lines, self._skipping = lines[1:], False
        self.offset += end
        self._take(lines)
        self.version += 1
        return len(data) == PIECE

    def _forget(self, file: tuple[int, int]) -> None:
        self.series, self.damaged, self.offset, self._file = {}, 0, 0, file
        self._skipping = False
        self.version += 1

    def _take(self, lines: Sequence[bytes]) -> None:
        rows, bad = parse_lines(lines)
        self.damaged += bad
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for row in rows:
            step = row["step"]
            for name, value in row.items():
                if name == "step" or not _is_number(value):
                    continue
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        for name, (steps, values) in columns.items():
            if name not in self.series and len(self.series) >= MOST_NAMES:
                continue
            found = self.series.setdefault(name, Series())
            found.add(np.array(steps, np.int64), np.array(values, np.float64))

    def points(self, names: Iterable[str], most: int) -> dict[str, dict[str, list[Any]]]:
        """Return the points of these metrics, as far as the run has them."""
        with self._lock:
            return {n: self.series[n].points(most) for n in names if n in self.series}

    def summaries(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            return {name: series.summary() for name, series in self.series.items()}


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (float, int)) and not isinstance(value, bool))


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None


def parse_lines(lines: Sequence[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of metrics among `lines`, and how many are damaged."""
    lines = [line for line in lines if line.strip()]
    entries = [entry for line in lines if (entry := open_line(line)) is not None]
    rows = [_numbers(entry) for entry in entries if _has_step(entry)]
    return rows, len(lines) - len(rows)


def _has_step(row: Any) -> bool:
    step = row.get("step") if isinstance(row, dict) else None
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step < MAX_STEP


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Drop whole numbers that no float holds."""
    huge = [n for n, v in row.items() if isinstance(v, int) and abs(v) > 10**300]
    return row if not huge else {n: v for n, v in row.items() if n not in huge}


# --- a glance ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Glance:
    """The ends of a `metrics.jsonl`: enough for a list of runs, however long they are.

    What held-out prompts gave last is found if it lies in the last LOOK_BACK bytes at the first
    look, or was written since.
    """

    path: Path
    step: int | None = None
    latest: dict[str, float | None] = field(default_factory=dict)  # of the last iteration
    base: dict[str, float | None] = field(default_factory=dict)  # eval/... at the first evaluation
    held_out: dict[str, float | None] = field(default_factory=dict)  # at the last one
    held_out_step: int | None = None
    _offset: int = 0
    _file: tuple[int, int] = (0, 0)

    def look(self) -> None:
        """Read what was written since the last look."""
        try:
            with open_regular(self.path, inside=self.path.parent) as file:
                status = os.fstat(file.fileno())
                known = (status.st_dev, status.st_ino)
                if known != self._file or status.st_size < self._offset:
                    self._forget(known)
                    self._take(file.read(HEAD))
                    if self._offset < status.st_size - TAIL:
                        self._take(_line_before(file, status.st_size - TAIL, self._offset))
                    self._offset = max(self._offset, status.st_size - TAIL)
                elif status.st_size == self._offset:
                    return
                self._offset = max(self._offset, status.st_size - TAIL)
                file.seek(self._offset)
                self._take(file.read(TAIL))
        except (OSError, RefusedFile):
            self._forget((0, 0))

    def _forget(self, file: tuple[int, int]) -> None:
        self.step, self.held_out_step = None, None
        self.latest, self.base, self.held_out = {}, {}, {}
        self._offset, self._file = 0, file

    def _take(self, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        self._offset += end
        # A tail may begin inside of a line, which is none then.
        for row in parse_lines(data[:end].splitlines())[0]:
            step = row["step"]
            self.step = max(self.step or 0, step)
            found = {n: _finite(v) for n, v in row.items() if n != "step" and _is_number(v)}
            if held_out := {n: v for n, v in found.items() if n.startswith("eval/")}:
                self.base = self.base or held_out
                self.held_out, self.held_out_step = held_out, step
            if rest := {n: v for n, v in found.items() if n not in held_out}:
                self.latest = rest


def _line_before(file: BinaryIO, end: int, start: int) -> bytes:
    """Return the last line with held-out scores that begins before `end`, empty for none."""
    start = max(start, end - LOOK_BACK)
    while end > start:
        begin = max(start, end - PIECE)
        file.seek(begin)
        data = file.read(end - begin)
        place = data.rfind(b'"eval/')
        if place >= 0:
            line = data.rfind(b"\n", 0, place) + 1
            if line or begin == start:
                file.seek(begin + line)
                return file.readline(PIECE)
            if place + len(b'"eval/') == end - begin == PIECE:
                return b""  # a line as long as a piece is none
            end = begin + place + len(b'"eval/')  # its beginning lies in the piece before
        else:
            end = begin + len(b'"eval') if begin > start else start  # which may be cut in two
    return b""


def held_out_first(names: Iterable[str]) -> list[str]:
    """Return names of metrics in the order in which people should look at them."""
    order = (
        "eval/", "reward/mean", "reward/", "groups/", "policy/kl", "policy/", "explore/",
        "grad/", "loss", "image/", "latent/", "tree/", "time/",
    )  # fmt: skip

    def place(name: str) -> tuple[int, int, str]:
        rank = next((i for i, start in enumerate(order) if name.startswith(start)), len(order))
        return rank, name.count("/"), name

    return sorted(names, key=place)


def chosen_first(names: Sequence[str]) -> list[str]:
    """Return the metrics to show before anybody has chosen: held-out scores, then training's."""
    held_out = [n for n in names if n.startswith("eval/") and n.count("/") == 1]
    usual = ("reward/mean", "reward/std_in_group", "groups/no_signal", "policy/kl", "grad/norm")
    return [n for n in [*held_out[:4], *usual] if n in names]
