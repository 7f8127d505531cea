"""The data of a page, beside it: everything that its figures are computed from.

curves.csv: each evaluation of each run: method, seed, iteration, forwards, images, and the means of
all measures. images.csv.gz: the score of each image at a run's first and last evaluation; the first
once a method, as all its seeds begin at one base. tuning.csv: what was tried on validation prompts.
guidance.csv: the score of the base at each guidance.
"""

import csv
import gzip
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.assembly.learner import ProvidedObjects, evaluation_prompts
from flowrl.config import Config
from flowrl.prompts.overlap import plain_text, request_of
from flowrl.prompts.records import PromptSampler
from flowrl.training.evaluate import Evaluation, evaluation_file
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import write_bytes, write_text

CURVES, IMAGES, TUNING = "curves.csv", "images.csv.gz", "tuning.csv"
GUIDED = "guidance.csv"
PASSES = ("explore/forwards", "tree/forwards", "tree/train_forwards")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One evaluation of one run."""

    method: str
    seed: int
    iteration: int
    forwards: float  # of rollouts, candidates and training until then
    images: float  # sampled to learn from
    scores: Mapping[str, float]  # means by measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of a run's first (iteration 0) or last evaluation."""

    method: str
    seed: int  # of the first run for the base
    iteration: int
    image: int
    request: int  # equal for images that ask for the same
    scores: Mapping[str, float]


def lines_of(folder: Path, method: str, seed: int) -> list[Line]:
    """Return the evaluations of a run, in order."""
    forwards = images = 0.0
    found = []
    for row in read_metrics(folder):
        forwards += sum(row.get(name) or 0.0 for name in PASSES)
        # None is sampled where images are read from a data set.
        images += (row.get("tree/leaves") or 0.0) if row.get("tree/forwards") else 0.0
        scores = {n.removeprefix("eval/"): v for n, v in row.items() if n.startswith("eval/")}
        if scores:
            found.append(
                Line(
                    method=method, seed=seed, iteration=row["step"], forwards=forwards,
                    images=images, scores={n: v for n, v in scores.items() if v is not None},
                )
            )  # fmt: skip
    return found


def images_of(folder: Path, config: Config, method: str, seed: int, step: int) -> list[Image]:
    """Return the images of an evaluation, with the number of their request."""
    measures = {
        name: values.tolist()
        for name, values in Evaluation.load(evaluation_file(folder, step)).measures().items()
    }
    e, held_out = config.evaluation, evaluation_prompts(config, ProvidedObjects())
    prompts = PromptSampler(held_out, e.num_images, e.seed, balance=e.balance).at(0)
    keys = [request_of(p.metadata) or plain_text(p.text) for p in prompts]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return [
        Image(
            method=method, seed=seed, iteration=step, image=i, request=numbers[key],
            scores={name: values[i] for name, values in measures.items()},
        )
        for i, key in enumerate(keys)
    ]  # fmt: skip


# --- files ---------------------------------------------------------------------------------------


def write_curves(folder: Path, lines: Sequence[Line]) -> None:
    names = sorted({name for line in lines for name in line.scores})
    keys = ["method", "seed", "iteration", "forwards", "images"]
    rows = [
        [line.method, line.seed, line.iteration, f"{line.forwards:.0f}", f"{line.images:.0f}"]
        + [_cell(line.scores.get(name)) for name in names]
        for line in lines
    ]
    write_text(folder / CURVES, _csv([*keys, *names], rows))


def read_curves(folder: Path) -> list[Line]:
    return [
        Line(
            method=row.pop("method"), seed=int(row.pop("seed")),
            iteration=int(row.pop("iteration")), forwards=float(row.pop("forwards")),
            images=float(row.pop("images")), scores=_numbers(row),
        )
        for row in _rows((folder / CURVES).read_text(encoding="utf-8"))
    ]  # fmt: skip


def write_images(folder: Path, images: Sequence[Image]) -> None:
    """Write the images, compressed without a date, so that equal data are equal files."""
    names = sorted({name for image in images for name in image.scores})
    keys = ["method", "seed", "iteration", "image", "request"]
    rows = [
        [i.method, i.seed, i.iteration, i.image, i.request]
        + [_cell(i.scores.get(name)) for name in names]
        for i in images
    ]
    data = gzip.compress(_csv([*keys, *names], rows).encode(), compresslevel=9, mtime=0)
    write_bytes(folder / IMAGES, data)


def read_images(folder: Path) -> list[Image]:
    text = gzip.decompress((folder / IMAGES).read_bytes()).decode()
    return [
        Image(
            method=row.pop("method"), seed=int(row.pop("seed")),
            iteration=int(row.pop("iteration")), image=int(row.pop("image")),
            request=int(row.pop("request")), scores=_numbers(row),
        )
        for row in _rows(text)
    ]  # fmt: skip


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a small table, such as tuning.csv."""
    write_text(path, _csv(list(rows[0]), [list(row.values()) for row in rows]))


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a small table; none where there is no file."""
    return _rows(path.read_text(encoding="utf-8")) if path.is_file() else []


def _csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(names)
    table.writerows(rows)
    return text.getvalue()


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value}


def _cell(score: float | None) -> str:
    return "" if score is None or score != score else f"{score:.4f}".rstrip("0").rstrip(".")


# --- what is read from them ----------------------------------------------------------------------


def chosen(data: Path) -> dict[str, tuple[str, ...]]:
    """Return the values that scored best on validation prompts, by method."""
    best: dict[str, tuple[float, tuple[str, ...]]] = {}
    for row in read_rows(data / TUNING):
        found = float(row["score"]), tuple(row["options"].split())
        best[row["method"]] = max(best.get(row["method"], found), found, key=lambda f: f[0])
    return {method: options for method, (_, options) in best.items()}
