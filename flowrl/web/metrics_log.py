"""Read a run's `metrics.jsonl` as it grows, in bounded memory.

A look reads what was added since the last one, at most `tail` bytes: of a longer file the beginning
and the end. Beyond LIMIT iterations they are thinned out evenly; evaluations are kept.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from flowrl.utils.journal import open_line
from flowrl.utils.untrusted import RefusedFile, open_regular

LIMIT = 2000  # iterations of a run in memory
MOST_NAMES = 1000  # metrics of a run; further ones are left out
HEAD = 2**16  # bytes at the beginning, where the base's evaluation is
TAIL = 2**23  # bytes, for curves
GLANCE = 2**19  # bytes, for a list of runs
MAX_STEP = 2**53

Values = dict[str, float | None]  # metrics of one iteration by name; None is a missing value


class MetricsLog:
    """The metrics of one run; several threads may use it."""

    def __init__(self, path: Path, tail: int = TAIL):
        self.path, self.tail, self.version = path, tail, 0
        self._lock = threading.Lock()
        self._reset(None)

    def _reset(self, file: tuple[int, int] | None) -> None:
        self._file = file  # device and inode: a resumed run writes a new file
        self._offset = self._size = 0
        self._rows: dict[int, Values] = {}
        self._sums: dict[str, tuple[float, int]] = {}  # sum and number of a metric's values
        self._every = 1  # iterations are held whose number is a multiple of it
        self.damaged = 0  # lines that are not metrics
        self.version += 1  # changes with everything else here

    # --- reading --------------------------------------------------------------------------------

    def read(self) -> None:
        """Read what was added since the last call."""
        with self._lock:
            try:
                with open_regular(self.path, inside=self.path.parent) as file:
                    self._read(file)
            except (OSError, RefusedFile):
                if self._file is not None:
                    self._reset(None)

    def _read(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        identity, size = (status.st_dev, status.st_ino), status.st_size
        if identity != self._file or size < self._offset:
            self._reset(identity)
            self._take(file.read(HEAD))
        elif size == self._size:
            return
        self._size = size
        start = max(self._offset, size - self.tail)
        file.seek(start)
        data = file.read(size - start)
        if start > self._offset:  # inside of a line
            cut = data.find(b"\n") + 1
            start, data = start + cut, data[cut:]
        self._offset = start
        self._take(data)

    def _take(self, data: bytes) -> None:
        """Add the whole lines of `data`, which begins at the offset."""
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            if not line.strip():
                continue
            row = open_line(line)
            step = row.get("step") if isinstance(row, dict) else None
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MAX_STEP:
                self.damaged += 1
                continue
            assert isinstance(row, dict)
            self._add(step, row)
        self._thin_out()
        self.version += 1

    def _add(self, step: int, row: dict[str, Any]) -> None:
        values = self._rows.setdefault(step, {})
        for name, value in row.items():
            if name == "step" or not (value is None or type(value) in (int, float)):
                continue
            if name not in self._sums and len(self._sums) >= MOST_NAMES:
                continue
            number = None if value is None or not abs(value) < 1e300 else float(f"{value:.7g}")
            values[name] = number
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + (number or 0.0), count + (number is not None))

    def _thin_out(self) -> None:
        evaluated = {step for step, values in self._rows.items() if any(map(_held_out, values))}
        if len(evaluated) > LIMIT // 2:
            evaluated = set()
        last = max(self._rows, default=0)
        while True:
            self._rows = {
                step: values for step, values in self._rows.items()
                if step % self._every == 0 or step == last or step in evaluated
            }  # fmt: skip
            if len(self._rows) <= LIMIT:
                return
            self._every *= 2

    # --- what was read --------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return list(self._sums)

    def points(self, names: Iterable[str], most: int) -> dict[str, dict[str, list[Any]]]:
        """Return at most `most` points of each metric: x (steps), and y, None where missing."""
        with self._lock:
            steps = sorted(self._rows)
            curves = {}
            for name in names:
                x = [step for step in steps if name in self._rows[step]]
                x = x[:: -max(1, -(-len(x) // most))][::-1]  # the last point stays
                if x:
                    curves[name] = {"x": x, "y": [self._rows[step][name] for step in x]}
            return curves

    def means(self) -> dict[str, dict[str, float | None]]:
        """Return the mean and the last value of each metric, None where there is none."""
        with self._lock:
            last: Values = {}
            for step in sorted(self._rows):
                last |= self._rows[step]
            return {
                name: {"mean": total / count if count else None, "last": last.get(name)}
                for name, (total, count) in self._sums.items()
            }

    def ends(self) -> dict[str, Any]:
        """Return the last step and training metrics, and first and last held-out scores."""
        with self._lock:
            steps = sorted(self._rows)
            held_out = {s: {n: v for n, v in self._rows[s].items() if _held_out(n)} for s in steps}
            evaluated = [step for step in steps if held_out[step]]
            trained = [step for step in steps if len(held_out[step]) < len(self._rows[step])]
            latest = self._rows[trained[-1]] if trained else {}
            return {
                "step": steps[-1] if steps else 0,
                "latest": {n: v for n, v in latest.items() if not _held_out(n)},
                "base": held_out[evaluated[0]] if evaluated else {},
                "held_out": held_out[evaluated[-1]] if evaluated else {},
                "held_out_step": evaluated[-1] if evaluated else None,
            }


def _held_out(name: str) -> bool:
    return name.startswith("eval/")


# --- the order of metrics ------------------------------------------------------------------------


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
    held_out = [n for n in names if _held_out(n) and n.count("/") == 1]
    usual = ("reward/mean", "reward/std_in_group", "groups/no_signal", "policy/kl", "grad/norm")
    return [n for n in [*held_out[:4], *usual] if n in names]
