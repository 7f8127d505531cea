"""Read a run's `metrics.jsonl`, in bounded memory.

A look reads a file that has changed anew: of a long one the beginning and the last TAIL bytes.
Beyond LIMIT iterations they are thinned out evenly; evaluations are kept.
"""

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO

from flowrl.utils.journal import open_line
from flowrl.utils.untrusted import RefusedFile, open_regular

LIMIT = 1000  # iterations of a run in memory
HEAD = 2**16  # bytes at the beginning, where the base's evaluation is
TAIL = 2**22  # bytes at the end
MAX_STEP = 2**53

Values = dict[str, float | None]  # metrics of one iteration by name; None is a missing value


class MetricsLog:
    """The metrics of one run; several threads may use it."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._file: tuple[int, ...] | None = None  # what changes with the file
        self._parse(b"")

    def read(self) -> None:
        """Read the file where it has changed since the last call."""
        with self._lock:
            try:
                with open_regular(self.path, inside=self.path.parent) as file:
                    status = os.fstat(file.fileno())
                    stamp = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
                    data = b"" if stamp == self._file else self._ends(file, status.st_size)
            except (OSError, RefusedFile):
                stamp, data = None, b""
            if stamp != self._file:
                self._file = stamp
                self._parse(data)

    def _ends(self, file: BinaryIO, size: int) -> bytes:
        """Return whole lines at the beginning and the end of a file."""
        head = file.read(HEAD if size > HEAD + TAIL else size)
        head = head[: head.rfind(b"\n") + 1]
        if size <= HEAD + TAIL:
            return head
        file.seek(size - TAIL)
        end = file.read(TAIL)
        return head + end[end.find(b"\n") + 1 : end.rfind(b"\n") + 1]

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
        self._thin_out()

    def _add(self, step: int, row: dict[str, Any]) -> None:
        values = self._rows.setdefault(step, {})
        for name, value in row.items():
            if value is not None and type(value) not in (int, float):
                continue
            self._names[name] = None
            values[name] = float(value) if value is not None and abs(value) < 1e300 else None

    def _thin_out(self) -> None:
        evaluated = {step for step, values in self._rows.items() if any(map(_held_out, values))}
        if len(evaluated) > LIMIT // 2:
            evaluated = set()
        last, every = max(self._rows, default=0), 1
        while len(self._rows) > LIMIT:
            every *= 2
            self._rows = {
                step: values for step, values in self._rows.items()
                if step % every == 0 or step == last or step in evaluated
            }  # fmt: skip

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
        """Return the mean of what is held and the last value of each metric, None for no value."""
        curves, means = self.points(self.names, LIMIT), {}
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
        "policy/", "book/", "explore/", "grad/", "loss", "image/", "latent/", "tree/", "time/",
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
