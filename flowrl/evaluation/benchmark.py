"""Benchmarks: prompts by name, images in GenEval's layout, mean scores by kind of prompt."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.evaluation.published import PUBLISHED, published_rows
from flowrl.prompts.records import PromptRecord, load_prompts, records_of
from flowrl.scoring.files import ScoredFiles, prompted_images, score_files
from flowrl.scoring.spec import RewardSpec, closing
from flowrl.utils.files import write_text

# Benchmarks on the Hub by their usual names; any other name is a file.
NAMES = {"drawbench": "hf:sayakpaul/drawbench:train:Prompts"}
SCORES = "scores.csv"
KINDS = ("tag", "category", "Category", "kind")  # metadata keys of the kind of a prompt

Row = dict[str, Any]


def benchmark_prompts(name: str, source: Path | None = None) -> list[PromptRecord]:
    """Return the prompts of a benchmark: of `source`, of a name of NAMES, or of a file.

    Raises UserError for one without a source that needs it, naming where the published ones are.
    """
    if name in PUBLISHED and (source is not None or name not in NAMES):
        return records_of(published_rows(name, source))
    return load_prompts(NAMES.get(name, name))


def score_folder(folder: Path, specs: Sequence[RewardSpec]) -> ScoredFiles:
    """Score a folder of images with prompts; write `scores.csv` into it."""
    with closing(specs):
        scored = score_files(specs, prompted_images(folder))
    write_csv(folder / SCORES, scored.rows)
    return scored


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as csv, missing scores as empty cells."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = (row.get(name) for name in columns)
        writer.writerow(["" if c is None or c != c else c for c in cells])
    write_text(path, text.getvalue())


def kind_table(folder: Path, rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Return the mean scores of each kind of prompt, of all images, and of the kinds.

    Images without a score are left out. The last is GenEval's published number: its kinds count
    alike, however many images they have. rows: of `score_files`.
    """
    kinds = {
        str(image.path): next((str(image.metadata[k]) for k in KINDS if image.metadata.get(k)), "")
        for image in prompted_images(folder)
    }
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(kinds[row["image"]] or "other", []).append(row)
    parts = sorted(by_kind.items()) if len(by_kind) > 1 else []
    table = [
        {"prompts": kind} | {name: _mean(part, name) for name in names} | {"images": len(part)}
        for kind, part in [*parts, ("all", rows)]
    ]
    if parts:
        of_kinds = {name: _mean(table[:-1], name) for name in names}
        table.append({"prompts": "mean of kinds"} | of_kinds | {"images": len(rows)})
    return table


def _mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if not math.isnan(row[name])]
    return sum(values) / len(values) if values else math.nan
