"""The data of a page, sorted by method and seed, and what is computed from its images."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.training.evaluate import Interval
from scripts.compare import statistics
from scripts.compare.data import Image, Line, read_curves, read_images
from scripts.compare.page import Page
from scripts.compare.runs import rates, stages
from scripts.compare.statistics import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The data of a page, sorted."""

    page: Page
    lines: dict[str, dict[int, list[Line]]]  # by method and seed
    images: dict[str, dict[int, list[Image]]]  # first images by method, under seed -1; last by seed
    rates: dict[str, float]  # seconds of an iteration
    stages: dict[str, dict[str, float]]  # of each of its stages, by method

    @staticmethod
    def read(page: Page, data: Path) -> "Results":
        lines: dict[str, dict[int, list[Line]]] = {}
        for line in read_curves(data):
            lines.setdefault(line.method, {}).setdefault(line.seed, []).append(line)
        images: dict[str, dict[int, list[Image]]] = {}
        for image in read_images(data):
            seed = image.seed if image.iteration else -1
            images.setdefault(image.method, {}).setdefault(seed, []).append(image)
        order = [method.name for method in page.methods if method.name in lines]
        return Results(
            page=page,
            lines={name: dict(sorted(lines[name].items())) for name in order},
            images=images,
            rates=rates(data),
            stages=stages(data) if page.exact else {},
        )

    def curves(self, method: str, measure: str, cost: Callable[[Line], float]) -> list[Curve]:
        """Return a curve for each seed, of the evaluations that have the measure."""
        return [
            [(cost(line), line.scores[measure]) for line in lines if measure in line.scores]
            for lines in self.lines[method].values()
        ]

    def seconds(self, line: Line) -> float:
        return line.iteration * self.rates.get(line.method, math.nan)

    def last(self, method: str, measure: str) -> list[float]:
        """Return the last score of each seed; NaN where it has none."""
        runs = self.lines[method].values()
        return [lines[-1].scores.get(measure, math.nan) for lines in runs]

    def base(self, method: str, measure: str) -> float:
        first = next(iter(self.lines[method].values()))[0]
        return first.scores.get(measure, math.nan)

    def change_of_images(self, method: str, measure: str) -> Interval | None:
        """Return the change over images: each one's mean over seeds, its requests resampled."""
        return _over_images(self._of_images(method, measure), self._of_images(method, measure, -1))

    def difference_of_images(self, method: str, other: str, measure: str) -> Interval | None:
        """Return how far a method ends above another over images, their means over seeds."""
        return _over_images(self._of_images(method, measure), self._of_images(other, measure))

    def _of_images(
        self, method: str, measure: str, seed: int | None = None
    ) -> list[tuple[int, float]]:
        """Return (request, score) of each image: of the base for seed -1, else the seeds' mean."""
        kept = self.images.get(method, {})
        runs = [own for s, own in kept.items() if (s >= 0 if seed is None else s == seed)]
        return [
            (
                each[0].request,
                statistics.mean([image.scores.get(measure, math.nan) for image in each]),
            )
            for each in zip(*runs, strict=True)
        ]


def _over_images(
    after: Sequence[tuple[int, float]], before: Sequence[tuple[int, float]]
) -> Interval | None:
    """Return the mean difference over images that have both scores, requests resampled whole."""
    pairs = zip(after, before, strict=True) if after and before else ()
    found = [(request, a - b) for (request, a), (_, b) in pairs if math.isfinite(a - b)]
    if not found:
        return None
    return statistics.over_requests([c for _, c in found], [r for r, _ in found])


COSTS = {"iterations": "iterations", "seconds": "wall time", "forwards": "forwards"}


def costs(results: Results) -> dict[str, Callable[[Line], float]]:
    """Return what curves are compared at, by the keys of COSTS.

    Wall time where rates of all were measured, iterations where methods differ in what they draft
    and each iteration has as many updates.
    """
    found: dict[str, Callable[[Line], float]] = {}
    if results.page.longer:
        found["iterations"] = lambda line: line.iteration
    if all(name in results.rates for name in results.lines):
        found["seconds"] = results.seconds
    return {**found, "forwards": lambda line: line.forwards}
