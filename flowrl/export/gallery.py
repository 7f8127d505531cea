"""The comparison of base and aligned images: one HTML page that needs nothing else, one PNG.

The images stand in columns: base and aligned, or base and several strengths of a LoRA.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.images import GREEN, GREY, RED, SMALL, Color, Stack, data_url, png, sheet
from flowrl.utils.templates import known, number, render, signed

Score = float | None
Scores = dict[str, tuple[Score, Score]]

PAIR = ("base", "aligned")


class Shown(Protocol):
    """Images of one prompt and one initial noise, one a column, and each reward's scores of them.

    The first column is what the others are compared to. A missing score is None or NaN. The
    images need not have the same size.
    """

    @property
    def prompt(self) -> str: ...
    @property
    def draw(self) -> int: ...  # the how-many-th image of its prompt
    @property
    def images(self) -> Sequence[Image.Image]: ...
    @property
    def scores(self) -> Mapping[str, Sequence[Score]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryPair:
    """Two images of one prompt and one initial noise, and what each reward says: (base, aligned).

    A missing score is None or NaN. The images need not have the same size.
    """

    prompt: str
    draw: int  # the how-many-th image of its prompt
    base: Image.Image
    aligned: Image.Image
    scores: Scores

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return self.base, self.aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class GallerySweep:
    """As a pair, with an image and a score for each of several columns."""

    prompt: str
    draw: int
    images: tuple[Image.Image, ...]
    scores: dict[str, tuple[Score, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """One reward over a whole evaluation: both means, the paired change and its interval."""

    name: str
    base: float
    aligned: float
    change: float
    low: float
    high: float


def write_gallery(
    folder: Path | str,
    pairs: Sequence[Shown],
    *,
    title: str,
    summary: Sequence[SummaryRow] = (),
    caption: str = "",
    grid_pairs: int = 16,
    columns: Sequence[str] = PAIR,
) -> tuple[Path, Path]:
    """Write `index.html` (every pair) and `grid.png` (the first `grid_pairs`) -> their paths.

    The page holds its images, style and script, and forbids itself every request. `columns`
    names the images of each of `pairs`. Raises ValueError without pairs.
    """
    if not pairs:
        raise ValueError("a gallery needs at least one pair of images, got none")
    html, grid = Path(folder) / "index.html", Path(folder) / "grid.png"
    page = gallery_page(pairs, title=title, summary=summary, caption=caption, columns=columns)
    write_text(html, page)
    shown = pairs[:grid_pairs]
    units = f"{_unit(columns)}s"
    part = f"{len(shown)} of {len(pairs)} {units}." if len(shown) < len(pairs) else ""
    heading = [title, *(summary_line(row) for row in summary), caption, part]
    drawn = pair_grid(shown, heading=[text for text in heading if text], columns=columns)
    write_bytes(grid, png(drawn))
    return html, grid


def gallery_page(
    pairs: Sequence[Shown],
    *,
    title: str,
    summary: Sequence[SummaryRow] = (),
    caption: str = "",
    columns: Sequence[str] = PAIR,
) -> str:
    """The HTML page. Everything that comes from outside is escaped by the template engine."""
    rewards = list(dict.fromkeys(name for pair in pairs for name in pair.scores))
    values = {
        "title": title,
        "summary": summary,
        "caption": caption,
        "columns": columns,
        "unit": _unit(columns),
        "changes": _change_names(rewards, columns),
        "pairs": [_entry(pair, rewards, columns) for pair in pairs],
    }
    return render("gallery.html.j2", values)


def pair_grid(
    pairs: Sequence[Shown],
    *,
    heading: Sequence[str] = (),
    across: int = 8,
    columns: Sequence[str] = PAIR,
) -> Image.Image:
    """The base row over the aligned row, or a row for each of `columns`; scores below."""
    stacks = [
        Stack(
            caption=pair.prompt,
            images=pair.images,
            notes=[_note(name, scores) for name, scores in pair.scores.items() if _any(scores)],
        )
        for pair in pairs
    ]
    return sheet(stacks, heading=heading, rows=columns, across=across)


def summary_line(row: SummaryRow) -> str:
    """One reward's result in words, for places without tables."""
    return (
        f"{row.name}: {number(row.base)} → {number(row.aligned)}, "
        f"change {signed(row.change)} (95 % interval {signed(row.low)} to {signed(row.high)})"
    )


def change(scores: tuple[Score, Score]) -> float | None:
    """Aligned minus base, None where either is missing."""
    base, aligned = known(scores[0]), known(scores[1])
    return None if base is None or aligned is None else aligned - base


def _changes(scores: Sequence[Score]) -> list[float | None]:
    return [change((scores[0], score)) for score in scores[1:]]


def _change_names(rewards: Sequence[str], columns: Sequence[str]) -> list[str]:
    """What the changes of an entry are changes of."""
    if len(columns) == 2:
        return list(rewards)
    return [f"{reward}, {column}" for reward in rewards for column in columns[1:]]


def _unit(columns: Sequence[str]) -> str:
    return "pair" if len(columns) == 2 else "row"


def _any(scores: Sequence[Score]) -> bool:
    """Whether the reward says anything about the prompt: not every reward fits every one."""
    return any(known(score) is not None for score in scores)


def _note(name: str, scores: Sequence[Score]) -> tuple[str, Color]:
    if len(scores) > 2:
        return " ".join([name, *map(number, scores)]), GREY
    (moved,) = _changes(scores)
    color = GREY if not moved else GREEN if moved > 0 else RED
    return f"{name} {number(scores[0])} → {number(scores[1])} ({signed(moved)})", color


def _entry(pair: Shown, rewards: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
    missing = (None,) * len(columns)
    scores = [pair.scores.get(name, missing) for name in rewards]
    images = zip(columns, pair.images, strict=True)
    return {
        "prompt": pair.prompt,
        "draw": pair.draw,
        "images": [_image(column, image) for column, image in images],
        "scores": [
            {
                "name": name,
                "base": values[0],
                "others": list(zip(values[1:], _changes(values), strict=True)),
            }
            for name, values in zip(rewards, scores, strict=True)
            if _any(values)
        ],
        "changes": [moved for values in scores for moved in _changes(values)],
    }


def _image(which: str, image: Image.Image) -> dict[str, Any]:
    return {
        "which": which,
        "url": data_url(image),
        "width": image.width,
        "height": image.height,
        "small": max(image.size) <= SMALL,
    }
