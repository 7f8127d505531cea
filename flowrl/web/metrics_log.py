"""Read a run's `metrics.jsonl`; a look reads a file that has changed anew."""

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.utils.journal import open_line
from flowrl.utils.untrusted import RefusedFile, read_bytes

MOST_BYTES = 64 * 2**20  # of some 40,000 iterations; a longer file has no curves
MAX_STEP = 2**53

Values = dict[str, float | None]  # metrics of one iteration by name; None is a missing value


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Return what changes with a file: time, size and number; zeros for none."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return status.st_mtime_ns, status.st_size, status.st_ino


class MetricsLog:
    """The metrics of one run; several threads may use it."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._file = (0, 0, 0)  # its stamp
        self._parse(b"")

    def read(self) -> None:
        """Read the file where it has changed since the last call."""
        with self._lock:
            stamp = stamp_of(self.path)  # before: what is added meanwhile is read the next time
            if stamp == self._file:
                return
            try:
                data = read_bytes(self.path, inside=self.path.parent, limit=MOST_BYTES)
            except (OSError, RefusedFile):
                data = b""
            self._file = stamp
            self._parse(data[: data.rfind(b"\n") + 1])  # whole lines

    def _parse(self, data: bytes) -> None:
        self._rows: dict[int, Values] = {}
        self._names: dict[str, None] = {}
        self.damaged = 0  # lines that are not metrics
        for line in filter(bytes.strip, data.splitlines()):
            row = open_line(line) or {}
            step = row.pop("step", None)
            if type(step) is int and 0 <= step < MAX_STEP:
                self._add(step, row)
            else:
                self.damaged += 1

    def _add(self, step: int, row: dict[str, Any]) -> None:
        values = self._rows.setdefault(step, {})
        for name, value in row.items():
            if value is not None and type(value) not in (int, float):
                continue
            self._names[name] = None
            values[name] = float(value) if value is not None and abs(value) < 1e300 else None

    # --- what was read --------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return list(self._names)

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
        """Return the mean and the last value of each metric, None for no value."""
        curves, means = self.points(self.names, len(self._rows)), {}
        for name, curve in curves.items():
            values = [value for value in curve["y"] if value is not None]
            means[name] = {"mean": fmean(values) if values else None, "last": curve["y"][-1]}
        return means

    def ends(self) -> dict[str, Any]:
        """Return the last step and training metrics, and first and last held-out scores."""
        with self._lock:
            held_out: dict[int, Values] = {}
            latest: Values = {}
            for step, values in sorted(self._rows.items()):
                scores = {name: value for name, value in values.items() if _held_out(name)}
                if scores:
                    held_out[step] = scores
                if len(scores) < len(values):
                    latest = {name: value for name, value in values.items() if name not in scores}
            return {
                "step": max(self._rows, default=0),
                "latest": latest,
                "base": held_out[min(held_out)] if held_out else {},
                "held_out": held_out[max(held_out)] if held_out else {},
                "held_out_step": max(held_out, default=None),
            }


def _held_out(name: str) -> bool:
    return name.startswith("eval/")


# --- the order of metrics ------------------------------------------------------------------------


def held_out_first(names: Iterable[str]) -> list[str]:
    """Return names of metrics in the order in which people should look at them."""
    order = (
        "eval/", "hacking/score", "hacking/", "reward/mean", "reward/", "groups/", "policy/kl",
        "policy/", "book/", "refiner/", "explore/", "grad/", "loss", "image/", "latent/",
        "tree/", "time/",
    )  # fmt: skip

    def place(name: str) -> tuple[int, int, str]:
        rank = next((i for i, start in enumerate(order) if name.startswith(start)), len(order))
        return rank, name.count("/"), name

    return sorted(names, key=place)


def chosen_first(names: Sequence[str]) -> list[str]:
    """Return the metrics to show before anybody has chosen: held-out scores, then training's."""
    held_out = [n for n in names if _held_out(n) and n.count("/") == 1]
    usual = (
        "hacking/score", "reward/mean", "reward/std_in_group", "groups/no_signal", "policy/kl",
        "grad/norm",
    )  # fmt: skip
    return [n for n in [*held_out[:4], *usual] if n in names]
