"""Methods side by side: held-out scores against wall time and forwards, as curves and a table."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from flowrl.curves import draw_comparison
from flowrl.pictures import png
from flowrl.storage import write_bytes, write_text

TIMES = ("time/rollout", "time/reward", "time/train")
PASSES = ("tree/forwards", "tree/train_forwards")
SHARE = 0.6  # of the first method's wall time, the mark that a tree is asked to beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: its method, its seed, and its metrics as `read_metrics` gives them."""

    method: str
    seed: int
    metrics: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An evaluation: the score after so many seconds of iterations and so many forwards.

    Evaluations themselves take no part in either. forwards: velocities of rollouts and of
    training, whose backwards are not counted.
    """

    step: int
    seconds: float
    forwards: float
    scores: Mapping[str, float]


def points(run: Run) -> list[Point]:
    """The evaluations of a run, in order."""
    seconds = forwards = 0.0
    found = []
    for line in run.metrics:
        seconds += sum(line.get(name) or 0.0 for name in TIMES)
        forwards += sum(line.get(name) or 0.0 for name in PASSES)
        scores = {name: value for name, value in line.items() if name.startswith("eval/")}
        if scores:
            point = Point(step=line["step"], seconds=seconds, forwards=forwards, scores=scores)
            found.append(point)
    return found


def mean_curve(runs: Sequence[Run]) -> list[Point]:
    """The mean over runs of one method, evaluated at the same iterations."""
    curves = [points(run) for run in runs]
    return [
        Point(
            step=together[0].step,
            seconds=mean(p.seconds for p in together),
            forwards=mean(p.forwards for p in together),
            scores={name: mean(p.scores[name] for p in together) for name in together[0].scores},
        )
        for together in zip(*curves, strict=True)
    ]


def time_to_reach(curve: Sequence[Point], name: str, level: float) -> float | None:
    """Seconds until a score stands at `level`, straight between evaluations; None if never."""
    for before, after in zip(curve[:-1], curve[1:], strict=True):
        low, high = before.scores[name], after.scores[name]
        if low >= level:
            return before.seconds
        if high >= level:
            share = (level - low) / (high - low)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def time_to_stay(curve: Sequence[Point], name: str, level: float) -> float | None:
    """Seconds at the first evaluation from which on none falls below `level`; None if the last
    does."""
    above = [point.scores[name] >= level for point in curve]
    if not above[-1]:
        return None
    return curve[len(above) - above[::-1].index(False) if False in above else 0].seconds


def rows(runs: Sequence[Run], score: str) -> list[dict[str, str]]:
    """A table row a method; all are measured by the first one's final score, and by its time."""
    methods = dict.fromkeys(run.method for run in runs)
    by_method = {m: [run for run in runs if run.method == m] for m in methods}
    first = next(iter(by_method.values()))
    goal = mean_curve(first)[-1]
    own_goals = {run.seed: points(run)[-1] for run in first}
    found = []
    for method, own in by_method.items():
        curve = mean_curve(own)
        iterations, last = curve[-1].step, curve[-1]
        finals = [points(run)[-1].scores[score] for run in own]
        crossings = [
            _share(time_to_reach(points(run), score, own_goals[run.seed].scores[score]),
                   own_goals[run.seed].seconds)
            for run in own
        ]  # fmt: skip
        found.append(
            {
                "method": method,
                "s / iteration": f"{last.seconds / iterations:.2f}",
                "forwards / iteration": f"{last.forwards / iterations:.0f}",
                "iterations": f"{iterations}",
                "seconds": f"{last.seconds:.0f}",
                "base": f"{curve[0].scores[score]:.3f}",
                "final": f"{last.scores[score]:.3f}"
                + (f" ± {stdev(finals):.3f}" if finals[1:] else ""),
                "reaches": _share(time_to_reach(curve, score, goal.scores[score]), goal.seconds),
                "stays above": _share(time_to_stay(curve, score, goal.scores[score]), goal.seconds),
                "reaches, by seed": ", ".join(crossings),
            }
        )
    return found


def _share(seconds: float | None, whole: float) -> str:
    return "never" if seconds is None else f"{seconds / whole:.0%}"


def markdown(table: Sequence[Mapping[str, str]]) -> str:
    names = list(table[0])
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_curves(folder: Path, runs: Sequence[Run], score: str) -> None:
    """`curves.csv` with every evaluation, `wall-time.png` and `forwards.png` with the means."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = sorted(points(runs[0])[0].scores)
    table.writerow(["method", "seed", "iteration", "seconds", "forwards", *names])
    for run in runs:
        for p in points(run):
            numbers = [f"{p.seconds:.1f}", f"{p.forwards:.0f}"]
            scores = [f"{p.scores[name]:.4f}" for name in names]
            table.writerow([run.method, run.seed, p.step, *numbers, *scores])
    write_text(folder / "curves.csv", text.getvalue())
    methods = dict.fromkeys(run.method for run in runs)
    curves = {m: mean_curve([run for run in runs if run.method == m]) for m in methods}
    level = next(iter(curves.values()))[-1].scores[score]
    for file, label, axis in (
        ("wall-time.png", "minutes of training", lambda p: p.seconds / 60),
        ("forwards.png", "thousand forwards, of rollouts and training", lambda p: p.forwards / 1e3),
    ):
        lines = {m: [(axis(p), p.scores[score]) for p in curve] for m, curve in curves.items()}
        title = f"{score.removeprefix('eval/')}, held-out prompts, mean over seeds"
        chart = draw_comparison(lines, title=title, x_label=label, level=level)
        write_bytes(folder / file, png(chart))
