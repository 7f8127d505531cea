"""The comparison of base and aligned pictures: one HTML page that needs nothing else, one PNG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.pictures import GREEN, GREY, RED, SMALL, Color, Stack, data_url, png, sheet
from flowrl.render import known, number, render, signed
from flowrl.storage import write_bytes, write_text

Scores = dict[str, tuple[float | None, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GalleryPair:
    """Two pictures of one prompt and one initial noise, and what each reward says: (base, aligned).

    A missing score is None or NaN. The pictures need not have the same size.
    """

    prompt: str
    draw: int  # the how-many-th picture of its prompt
    base: Image.Image
    aligned: Image.Image
    scores: Scores


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
    pairs: Sequence[GalleryPair],
    *,
    title: str,
    summary: Sequence[SummaryRow] = (),
    caption: str = "",
    grid_pairs: int = 16,
) -> tuple[Path, Path]:
    """Write `index.html` (every pair) and `grid.png` (the first `grid_pairs`) -> their paths.

    The page holds its pictures, style and script, and forbids itself every request. Raises
    ValueError without pairs.
    """
    if not pairs:
        raise ValueError("a gallery needs at least one pair of pictures, got none")
    html, grid = Path(folder) / "index.html", Path(folder) / "grid.png"
    write_text(html, gallery_page(pairs, title=title, summary=summary, caption=caption))
    shown = pairs[:grid_pairs]
    part = f"{len(shown)} of {len(pairs)} pairs." if len(shown) < len(pairs) else ""
    heading = [title, *(summary_line(row) for row in summary), caption, part]
    write_bytes(grid, png(pair_grid(shown, heading=[text for text in heading if text])))
    return html, grid


def gallery_page(
    pairs: Sequence[GalleryPair],
    *,
    title: str,
    summary: Sequence[SummaryRow] = (),
    caption: str = "",
) -> str:
    """The HTML page. Everything that comes from outside is escaped by the template engine."""
    rewards = list(dict.fromkeys(name for pair in pairs for name in pair.scores))
    values = {
        "title": title,
        "summary": summary,
        "caption": caption,
        "rewards": rewards,
        "pairs": [_entry(pair, rewards) for pair in pairs],
    }
    return render("gallery.html.j2", values)


def pair_grid(
    pairs: Sequence[GalleryPair], *, heading: Sequence[str] = (), across: int = 8
) -> Image.Image:
    """The base row over the aligned row, prompts above, scores below."""
    stacks = [
        Stack(
            caption=pair.prompt,
            pictures=[pair.base, pair.aligned],
            notes=[_note(name, both) for name, both in pair.scores.items() if _any(both)],
        )
        for pair in pairs
    ]
    return sheet(stacks, heading=heading, rows=("base", "aligned"), across=across)


def summary_line(row: SummaryRow) -> str:
    """One reward's result in words, for places without tables."""
    return (
        f"{row.name}: {number(row.base)} → {number(row.aligned)}, "
        f"change {signed(row.change)} (95 % interval {signed(row.low)} to {signed(row.high)})"
    )


def change(scores: tuple[float | None, float | None]) -> float | None:
    """Aligned minus base, None where either is missing."""
    base, aligned = known(scores[0]), known(scores[1])
    return None if base is None or aligned is None else aligned - base


def _any(scores: tuple[float | None, float | None]) -> bool:
    """Whether the reward says anything about the pair: not every reward fits every prompt."""
    return known(scores[0]) is not None or known(scores[1]) is not None


def _note(name: str, scores: tuple[float | None, float | None]) -> tuple[str, Color]:
    moved = change(scores)
    color = GREY if not moved else GREEN if moved > 0 else RED
    return f"{name} {number(scores[0])} → {number(scores[1])} ({signed(moved)})", color


def _entry(pair: GalleryPair, rewards: Sequence[str]) -> dict[str, Any]:
    scores = [pair.scores.get(name, (None, None)) for name in rewards]
    return {
        "prompt": pair.prompt,
        "draw": pair.draw,
        "pictures": [_picture("base", pair.base), _picture("aligned", pair.aligned)],
        "scores": [
            {"name": name, "base": both[0], "aligned": both[1], "change": change(both)}
            for name, both in zip(rewards, scores, strict=True)
            if _any(both)
        ],
        "changes": [change(both) for both in scores],
    }


def _picture(which: str, picture: Image.Image) -> dict[str, Any]:
    return {
        "which": which,
        "url": data_url(picture),
        "width": picture.width,
        "height": picture.height,
        "small": max(picture.size) <= SMALL,
    }
