"""The comparison of base and aligned images: one HTML page that needs nothing else, one PNG.

The images stand in columns: base and aligned, or base and several strengths of a LoRA.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.training.evaluate import Evaluation, EvaluationComparison
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.images import GREEN, GREY, RED, SMALL, Color, Stack, data_url, image_grid, png
from flowrl.utils.templates import finite_or_none, number, render, signed

Score = float | None
PAIR = ("base", "aligned")


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryRow:
    """Images of one prompt and one initial noise, of any sizes, one a column, the base first."""

    prompt: str
    number: int = 0  # of the image among those of its prompt
    note: str = ""  # what tells it from other rows of the same noise
    images: tuple[Image.Image, ...]
    scores: dict[str, tuple[Score, ...]]  # by reward, one a column; None or NaN where missing


def write_gallery(
    folder: Path | str,
    rows: Sequence[GalleryRow],
    *,
    title: str,
    summary: Sequence[EvaluationComparison] = (),
    caption: str = "",
    grid_rows: int = 16,
    columns: Sequence[str] = PAIR,
) -> tuple[Path, Path]:
    """Write `index.html` (every row) and `grid.png` (the first `grid_rows`); return their paths.

    The page holds its images, style and script, and forbids itself every request.
    """
    if not rows:
        raise ValueError("a gallery needs at least one pair of images, got none")
    html, grid = Path(folder) / "index.html", Path(folder) / "grid.png"
    page = gallery_page(rows, title=title, summary=summary, caption=caption, columns=columns)
    write_text(html, page)
    shown = rows[:grid_rows]
    part = f"{len(shown)} of {len(rows)} {_unit(columns)}s." if len(shown) < len(rows) else ""
    heading = [title, *(summary_line(row) for row in summary), caption, part]
    image = gallery_grid(shown, heading=[text for text in heading if text], columns=columns)
    write_bytes(grid, png(image))
    return html, grid


def gallery_page(
    rows: Sequence[GalleryRow],
    *,
    title: str,
    summary: Sequence[EvaluationComparison] = (),
    caption: str = "",
    columns: Sequence[str] = PAIR,
) -> str:
    """Return the HTML page. The template engine escapes everything that comes from outside."""
    rewards = list(dict.fromkeys(name for row in rows for name in row.scores))
    changes = [f"{reward}, {column}" for reward in rewards for column in columns[1:]]
    values = {
        "title": title,
        "summary": summary,
        "caption": caption,
        "columns": columns,
        "unit": _unit(columns),
        "changes": rewards if len(columns) == 2 else changes,
        "rows": [_entry(row, rewards, columns) for row in rows],
    }
    return render("gallery.html.j2", values)


def gallery_grid(
    rows: Sequence[GalleryRow],
    *,
    heading: Sequence[str] = (),
    across: int = 8,
    columns: Sequence[str] = PAIR,
) -> Image.Image:
    """Return one image: a line for each of `columns`, the rows side by side, scores below."""
    stacks = [
        Stack(
            caption=f"{row.prompt} ({row.note})" if row.note else row.prompt,
            images=row.images,
            notes=[_note(name, scores) for name, scores in row.scores.items() if _any(scores)],
        )
        for row in rows
    ]
    return image_grid(stacks, heading=heading, rows=columns, across=across)


def fair_sample(
    before: Evaluation, after: Evaluation, name: str, count: int
) -> tuple[list[int], str]:
    """Choose images that became better, stayed equal or became worse in the proportions of all.

    The first saved images of each kind; fewer where too few of a kind are saved.

    Args:
        name: of the reward that decides.

    Returns:
        Their rows among the saved images, ascending (the Hub shows the first of them alone), and
        a sentence on the proportions.
    """
    column = before.names.index(name)
    change = after.scores[:, column] - before.scores[:, column]
    kinds = {"better": change > 0, "the same": change == 0, "worse": change < 0}
    of_all = [int(mask.sum()) for mask in kinds.values()]
    saved = len(before.prompts)
    rows = [mask[:saved].nonzero().flatten().tolist() for mask in kinds.values()]
    chosen = [r[:quota] for r, quota in zip(rows, largest_remainders(of_all, count), strict=True)]
    shown, total = (
        ", ".join(f"{number} {kind}" for number, kind in zip(numbers, kinds, strict=True))
        for numbers in (map(len, chosen), of_all)
    )
    return sorted(sum(chosen, [])), f"By {name}, {shown}; of all images {total}."


def largest_remainders(weights: Sequence[int], count: int) -> list[int]:
    """Share `count` out as the weights are, by the largest remainders (Hamilton's method)."""
    total = sum(weights)
    if not total:
        return [0] * len(weights)
    exact = [count * weight / total for weight in weights]
    shares = [int(share) for share in exact]
    rest = sorted(range(len(weights)), key=lambda i: shares[i] - exact[i])
    for i in rest[: count - sum(shares)]:
        shares[i] += 1
    return shares


def summary_line(row: EvaluationComparison) -> str:
    """Return one reward's result in words, for places without tables."""
    low, high = signed(row.change.low), signed(row.change.high)
    return (
        f"{row.name}: {number(row.before)} → {number(row.after)}, "
        f"change {signed(row.change.mean)} (95 % interval {low} to {high})"
    )


def changes(scores: Sequence[Score]) -> list[Score]:
    """Return each column's score minus the base's, None where either is missing."""
    base, *columns = map(finite_or_none, scores)
    return [None if base is None or value is None else value - base for value in columns]


def _unit(columns: Sequence[str]) -> str:
    return "pair" if len(columns) == 2 else "row"


def _any(scores: Sequence[Score]) -> bool:
    """Return whether a reward, which may not fit every prompt, gave any score."""
    return any(finite_or_none(score) is not None for score in scores)


def _note(name: str, scores: Sequence[Score]) -> tuple[str, Color]:
    if len(scores) > 2:
        return " ".join([name, *map(number, scores)]), GREY
    (moved,) = changes(scores)
    color = GREY if not moved else GREEN if moved > 0 else RED
    return f"{name} {number(scores[0])} → {number(scores[1])} ({signed(moved)})", color


def _entry(row: GalleryRow, rewards: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    """Return what the template shows of a row."""
    missing = (None,) * len(columns)
    scores = {name: row.scores.get(name, missing) for name in rewards}
    return {
        "prompt": row.prompt,
        "number": row.number,
        "note": row.note,
        "images": [
            {"which": column, "url": data_url(image), "small": max(image.size) <= SMALL}
            | {"width": image.width, "height": image.height}
            for column, image in zip(columns, row.images, strict=True)
        ],
        "scores": [
            {"name": name, "base": values[0]}
            | {"columns": list(zip(values[1:], changes(values), strict=True))}
            for name, values in scores.items()
            if _any(values)
        ],
        "changes": [moved for values in scores.values() for moved in changes(values)],
    }
