"""The comparison of base and aligned images: one HTML page that needs nothing else, one PNG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.training.evaluate import EvaluationComparison
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.images import SMALL, data_url
from flowrl.utils.plots import GREEN, LETTERS, RED, SOFT, Column, draw_grid
from flowrl.utils.templates import finite_or_none, number, render

Score = float | None
PAIR = ("base", "aligned")
GRID_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryRow:
    """The base's and the aligned image of one prompt and one initial noise."""

    prompt: str
    number: int = 0  # of the image among those of its prompt
    note: str = ""  # what tells it from other rows of the same noise
    images: tuple[Image.Image, Image.Image]  # of any sizes
    scores: dict[str, tuple[Score, Score]]  # by reward; None or NaN where missing


def write_gallery(
    folder: Path | str,
    rows: Sequence[GalleryRow],
    *,
    title: str,
    summary: Sequence[EvaluationComparison] = (),
    caption: str = "",
) -> tuple[Path, Path]:
    """Write `index.html` (every row) and `grid.png` (the first GRID_ROWS); return their paths.

    The page holds its images, style and script, and forbids itself every request. The template
    engine escapes everything that comes from outside.
    """
    html, grid = Path(folder) / "index.html", Path(folder) / "grid.png"
    rewards = list(dict.fromkeys(name for row in rows for name in row.scores))
    values = {
        "title": title,
        "summary": summary,
        "caption": caption,
        "rewards": rewards,
        "rows": [_entry(row, rewards) for row in rows],
    }
    write_text(html, render("gallery.html.j2", values))
    heading = [title, caption] if caption else [title]
    write_bytes(grid, gallery_grid(rows[:GRID_ROWS], heading=heading))
    return html, grid


def gallery_grid(
    rows: Sequence[GalleryRow],
    *,
    heading: Sequence[str] = (),
    across: int = 8,
) -> bytes:
    """Draw one PNG: the base above the aligned one, the rows side by side, scores below."""
    columns = [
        Column(
            caption=f"{row.prompt} ({row.note})" if row.note else row.prompt,
            images=row.images,
            notes=[_note(name, scores) for name, scores in row.scores.items() if _any(scores)],
        )
        for row in rows
    ]
    return draw_grid(columns, heading=heading, rows=PAIR, across=across)


def change_of(scores: tuple[Score, Score]) -> Score:
    """Return the aligned image's score minus the base's, None where either is missing."""
    base, aligned = map(finite_or_none, scores)
    return None if base is None or aligned is None else aligned - base


def _any(scores: Sequence[Score]) -> bool:
    """Return whether a reward, which may not fit every prompt, gave any score."""
    return any(finite_or_none(score) is not None for score in scores)


def _note(name: str, scores: tuple[Score, Score]) -> tuple[str, str]:
    moved = change_of(scores)
    color = SOFT if not moved else GREEN if moved > 0 else RED
    values = f" {number(scores[0])} → {number(scores[1])}"
    return name[: LETTERS - len(values)] + values, color


def _entry(row: GalleryRow, rewards: Sequence[str]) -> dict[str, Any]:
    """Return what the template shows of a row."""
    scores = {name: row.scores.get(name, (None, None)) for name in rewards}
    return {
        "prompt": row.prompt,
        "number": row.number,
        "note": row.note,
        "images": [
            {"which": which, "url": data_url(image), "small": max(image.size) <= SMALL}
            | {"width": image.width, "height": image.height}
            for which, image in zip(PAIR, row.images, strict=True)
        ],
        "scores": [
            {"name": name, "base": pair[0], "aligned": pair[1], "change": change_of(pair)}
            for name, pair in scores.items()
            if _any(pair)
        ],
        "changes": [change_of(pair) for pair in scores.values()],
    }
