"""What methods achieved: held-out measures before and after over seeds, and what it cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flowrl.training.evaluate import Evaluation, Interval, paired_bootstrap
from scripts.compare.runs import Point, Run, cost_to_reach, mean_curve, seconds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One method over its seeds. change: of the score, image by image, each averaged over the
    seeds first. before, after: means by measure. curve: the mean over seeds."""

    method: str
    seeds: int
    change: Interval
    before: dict[str, float]
    after: dict[str, float]
    curve: Sequence[Point]


def images_of(point: Point) -> float:
    return point.images


def outcome(
    runs: Sequence[Run], folders: Sequence[Path], score: str, quality: str | None
) -> Outcome:
    """Of runs of one method, whose folders hold the evaluations of its first and last step."""
    curve = mean_curve(runs)
    first, last = (_measures(folders, step, quality) for step in (0, curve[-1].step))
    return Outcome(
        method=runs[0].method,
        seeds=len(runs),
        change=paired_bootstrap(first[score], last[score]),
        before={name: values.nanmean().item() for name, values in first.items()},
        after={name: values.nanmean().item() for name, values in last.items()},
        curve=curve,
    )


def differences(
    folders: Sequence[Path], others: Sequence[Path], step: int, score: str
) -> list[Interval]:
    """How far the score of some runs lies above that of others after so many iterations.

    Seed by seed, then of the means over seeds; image by image, which both drew from one noise.
    The intervals know how images differ, not how seeds do.
    """
    alone = [([a], [b]) for a, b in zip(folders, others, strict=True)]
    return [
        paired_bootstrap(_measures(b, step, None)[score], _measures(a, step, None)[score])
        for a, b in (*alone, (folders, others))
    ]


def _measures(folders: Sequence[Path], step: int, quality: str | None) -> dict[str, Tensor]:
    """(N,) of each measure, the mean over runs of each held-out image."""
    found = [
        Evaluation.load(folder / "evaluations" / f"step-{step:06d}.safetensors").measures(quality)
        for folder in folders
    ]
    return {name: torch.stack([m[name] for m in found]).nanmean(0) for name in found[0]}


def table(
    outcomes: Sequence[Outcome], score: str, quality: str, goal: Sequence[Point] | None = None
) -> list[dict[str, str]]:
    """A row a method: score, its change with a 95 % interval, quality, corrected score, and what
    it cost, candidates apart where there are any. With the curve of another method as a goal also
    the images and seconds until the mean curve first stood at its last score, and these as shares
    of what it took."""
    rows = []
    explored = any(o.curve[-1].candidates for o in outcomes)
    for o in outcomes:
        corrected, last = f"corrected/{score}", o.curve[-1]
        row = {
            "method": o.method,
            "seeds": str(o.seeds),
            "score": _change(o, score),
            "change [95 %]": f"{o.change.mean:+.3f} [{o.change.low:.3f}, {o.change.high:.3f}]",
            "quality": _change(o, quality, 2),
            "corrected": _change(o, corrected),
            "iterations": str(last.step),
            "images": f"{last.images:.0f}",
            **({"candidates": f"{last.candidates:.0f}"} if explored else {}),
            "seconds": f"{last.seconds:.0f}",
        }
        if goal is not None:
            level = goal[-1].scores[f"eval/{score}"]
            for name, cost in (("images", images_of), ("seconds", seconds_of)):
                reached = cost_to_reach(o.curve, f"eval/{score}", level, cost)
                row[f"{name} to {level:.3f}"] = (
                    "never"
                    if reached is None
                    else f"{reached:.0f} ({reached / cost(goal[-1]):.0%})"
                )
        rows.append(row)
    return rows


def _change(o: Outcome, name: str, digits: int = 3) -> str:
    return f"{o.before[name]:.{digits}f} → {o.after[name]:.{digits}f}"
