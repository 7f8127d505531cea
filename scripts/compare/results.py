"""The data of a page, sorted by method and seed, and what is computed from its images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.functional.contrasts import Interval
from scripts.compare import intervals
from scripts.compare.data import Image, Line, read_curves, read_images
from scripts.compare.page import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The data of a page, sorted."""

    page: Page
    lines: dict[str, dict[int, list[Line]]]  # by method and seed
    base_images: dict[str, list[Image]]  # by method
    images: dict[str, dict[int, list[Image]]]  # the last ones, by method and seed

    @staticmethod
    def read(page: Page, data: Path) -> "Results":
        lines: dict[str, dict[int, list[Line]]] = {}
        for line in read_curves(data):
            lines.setdefault(line.method, {}).setdefault(line.seed, []).append(line)
        base_images: dict[str, list[Image]] = {}
        images: dict[str, dict[int, list[Image]]] = {}
        for image in read_images(data):
            if image.iteration:
                images.setdefault(image.method, {}).setdefault(image.seed, []).append(image)
            else:
                base_images.setdefault(image.method, []).append(image)
        order = [method.name for method in page.methods if method.name in lines]
        return Results(
            page=page,
            lines={name: dict(sorted(lines[name].items())) for name in order},
            base_images=base_images,
            images=images,
        )

    def last(self, method: str, measure: str) -> list[float]:
        """Return the last score of each seed; NaN where it has none."""
        runs = self.lines[method].values()
        return [lines[-1].scores.get(measure, math.nan) for lines in runs]

    def base(self, method: str, measure: str) -> float:
        first = next(iter(self.lines[method].values()))[0]
        return first.scores.get(measure, math.nan)

    def change_of_images(self, method: str, measure: str) -> Interval | None:
        """Return the change over images: each one's mean over seeds, its requests resampled."""
        base = self.base_images.get(method, [])
        return _over_images(self._mean_images(method, measure), _scores([base], measure))

    def difference_of_images(self, method: str, other: str, measure: str) -> Interval | None:
        """Return how far a method ends above another over images, their means over seeds."""
        return _over_images(self._mean_images(method, measure), self._mean_images(other, measure))

    def _mean_images(self, method: str, measure: str) -> list[tuple[int, float]]:
        return _scores(list(self.images.get(method, {}).values()), measure)


def _scores(runs: Sequence[Sequence[Image]], measure: str) -> list[tuple[int, float]]:
    """Return (request, mean score over runs) of each image; NaN where a run has none."""
    found = []
    for each in zip(*runs, strict=True):
        scores = [image.scores.get(measure, math.nan) for image in each]
        found.append((each[0].request, intervals.mean(scores)))
    return found


def _over_images(
    after: Sequence[tuple[int, float]], before: Sequence[tuple[int, float]]
) -> Interval | None:
    """Return the mean difference over images that have both scores, requests resampled whole."""
    pairs = zip(after, before, strict=True) if after and before else ()
    found = [(request, a - b) for (request, a), (_, b) in pairs if math.isfinite(a - b)]
    if not found:
        return None
    return intervals.over_requests([c for _, c in found], [r for r, _ in found])
