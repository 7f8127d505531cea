"""Compare methods: held-out scores against wall time, forwards and images, as curves and tables."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import flowrl
from flowrl.config import Config
from flowrl.training.checkpoint import CONFIG
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.plots import (
    LIGHT,
    Band,
    Points,
    Theme,
    new_figure,
    plot_line,
    png_bytes,
    style_axes,
)

TIMES = tuple(
    f"time/{part}" for part in ("audit", "explore", "explore_reward", "rollout", "reward", "train")
)
PASSES = ("explore/forwards", "tree/forwards", "tree/train_forwards")
SHARE = 0.6  # of the first method's wall time, the mark that a tree is asked to beat


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: its method, its seed, and its metrics as `read_metrics` gives them."""

    method: str
    seed: int
    metrics: Sequence[Mapping[str, Any]]
    seconds: float = 0.0  # spent before it began, on the offline data set that it learns from
    images: float = 0.0  # sampled for that


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An evaluation, and what training had cost until then; evaluations are not counted."""

    step: int
    seconds: float
    forwards: float  # of rollouts, candidates and training; no backwards, no audits
    images: float  # sampled to learn from
    candidates: float  # sampled only to choose by
    scores: Mapping[str, float]


# What a chart has on its horizontal axis, by the chart's file.
AXES: dict[str, tuple[str, Callable[[Point], float]]] = {
    "iterations": ("iterations", lambda p: p.step),
    "wall-time": ("minutes of training", lambda p: p.seconds / 60),
    "forwards": (
        "thousand forwards, of rollouts and training",
        lambda p: p.forwards / 1e3,
    ),
    "images": ("thousand images sampled to learn from", lambda p: p.images / 1e3),
}


def train(config: Config) -> None:
    """Train to the end, from where an earlier call was stopped; leave a finished run alone."""
    folder, iterations = Path(config.run.output_dir), config.run.iterations
    if finished(folder, iterations):
        return
    flowrl.align(config, resume="latest" if (folder / CONFIG).exists() else None)
    if not finished(folder, iterations):
        raise SystemExit(f"{folder} was interrupted: the same command goes on with it")


def finished(folder: Path, iterations: int) -> bool:
    """Return whether the run's last iteration was evaluated."""
    evaluated = points(Run(method="", seed=0, metrics=read_metrics(folder)))
    return bool(evaluated) and evaluated[-1].step == iterations


def points(run: Run) -> list[Point]:
    """The evaluations of a run, in order."""
    seconds, images, candidates, forwards = run.seconds, run.images, 0.0, 0.0
    found = []
    for line in run.metrics:
        seconds += sum(line.get(name) or 0.0 for name in TIMES)
        forwards += sum(line.get(name) or 0.0 for name in PASSES)
        sampled = line.get("tree/forwards")  # none where images are read from a data set
        images += (line.get("tree/leaves") or 0.0) if sampled else 0.0
        candidates += line.get("explore/candidates") or 0.0
        scores = {name: value for name, value in line.items() if name.startswith("eval/")}
        if scores:
            found.append(
                Point(
                    step=line["step"], seconds=seconds, forwards=forwards, images=images,
                    candidates=candidates, scores=scores,
                )
            )  # fmt: skip
    return found


def mean_curve(runs: Sequence[Run]) -> list[Point]:
    """The mean over runs of one method, evaluated at the same iterations."""
    curves = [points(run) for run in runs]
    return [
        Point(
            step=together[0].step,
            seconds=mean(p.seconds for p in together),
            forwards=mean(p.forwards for p in together),
            images=mean(p.images for p in together),
            candidates=mean(p.candidates for p in together),
            scores={name: mean(p.scores[name] for p in together) for name in together[0].scores},
        )
        for together in zip(*curves, strict=True)
    ]


def seconds_of(point: Point) -> float:
    return point.seconds


def cost_to_reach(
    curve: Sequence[Point],
    name: str,
    level: float,
    cost: Callable[[Point], float] = seconds_of,
) -> float | None:
    """What it cost until a score stood at `level`, straight between evaluations; None if never."""
    for before, after in zip(curve[:-1], curve[1:], strict=True):
        low, high = before.scores[name], after.scores[name]
        if low >= level:
            return cost(before)
        if high >= level:
            share = (level - low) / (high - low)
            return cost(before) + share * (cost(after) - cost(before))
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
            _share(cost_to_reach(points(run), score, own_goals[run.seed].scores[score]),
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
                "reaches": _share(cost_to_reach(curve, score, goal.scores[score]), goal.seconds),
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


def write_table(path: Path, runs: Sequence[Run]) -> None:
    """Every evaluation of every run, as CSV; with candidates where any run draws them."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = sorted({name for run in runs for name in points(run)[0].scores})
    explored = ["candidates"] if any(points(run)[-1].candidates for run in runs) else []
    costs = ["seconds", "forwards", "images", *explored]
    table.writerow(["method", "seed", "iteration", *costs, *names])
    for run in runs:
        for p in points(run):
            numbers = [f"{p.seconds:.1f}", f"{p.forwards:.0f}", f"{p.images:.0f}"]
            numbers += [f"{p.candidates:.0f}"] if explored else []
            scores = [_cell(p.scores.get(name)) for name in names]
            table.writerow([run.method, run.seed, p.step, *numbers, *scores])
    write_text(path, text.getvalue())


def _cell(score: float | None) -> str:
    return "" if score is None else f"{score:.4f}"


def write_charts(
    folder: Path,
    runs: Sequence[Run],
    score: str,
    *,
    axes: Sequence[str],
    prefix: str = "",
    level: float | None = None,
) -> None:
    """A chart for each of `axes`, names in AXES: the methods' means over seeds between the lowest
    and the highest seed, and the level to reach: the first method's last score if not given."""
    by_method: dict[str, list[Run]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    curves = {m: mean_curve(own) for m, own in by_method.items()}
    seeds = {m: zip(*map(points, own), strict=True) for m, own in by_method.items() if own[1:]}
    bands = {
        m: [(min(p.scores[score] for p in at), max(p.scores[score] for p in at)) for at in together]
        for m, together in seeds.items()
    }
    if level is None:
        level = next(iter(curves.values()))[-1].scores[score]
    for axis in axes:
        label, place = AXES[axis]
        lines = {m: [(place(p), p.scores[score]) for p in curve] for m, curve in curves.items()}
        title = f"{score.removeprefix('eval/')}, held-out prompts, mean over seeds"
        chart = draw_comparison(lines, title=title, x_label=label, level=level, bands=bands)
        write_bytes(folder / f"{prefix}{axis}.png", chart)


def draw_comparison(
    lines: Mapping[str, Points],
    *,
    title: str,
    x_label: str,
    y_label: str = "score",
    level: float | None = None,
    bands: Mapping[str, Band] | None = None,
    theme: Theme = LIGHT,
) -> bytes:
    """Draw several named lines in one panel, with a legend beside it.

    Args:
        level: value to reach, drawn as a dashed line across.
        bands: intervals around the lines that have one, for example over seeds.
    """
    if not 0 < len(lines) <= len(theme.lines):
        raise ValueError(f"a comparison needs 1 to {len(theme.lines)} lines, got {len(lines)}")
    figure = new_figure(9, 4, theme)
    axes = figure.subplots()
    style_axes(axes, theme, title=title, x_label=x_label, y_label=y_label)
    if level is not None:
        axes.axhline(level, color=theme.soft, linestyle="--", linewidth=1, label="to reach")
    for (name, points), color in zip(lines.items(), theme.lines, strict=False):
        plot_line(axes, points, color, (bands or {}).get(name), marker="o", label=name)
    figure.legend(loc="outside right upper", frameon=False, labelcolor=theme.ink, fontsize=9)
    return png_bytes(figure)
