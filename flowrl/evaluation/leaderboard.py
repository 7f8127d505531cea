"""Write a comparison as `index.html` and csv tables."""

from pathlib import Path
from typing import Any

from flowrl.evaluation.benchmark import Row, write_csv
from flowrl.evaluation.comparison import (
    BASE,
    OVERALL,
    SHOWN,
    SIGNIFICANT,
    Comparison,
    Entry,
)
from flowrl.functional.contrasts import fewest_prompts
from flowrl.utils.files import write_text
from flowrl.utils.images import data_url, to_pil
from flowrl.utils.templates import render


def write_leaderboard(comparison: Comparison, folder: Path) -> Path:
    """Write the page and the tables; return the page."""
    write_csv(folder / "leaderboard.csv", ranking(comparison))
    write_csv(folder / "comparisons.csv", pair_rows(comparison))
    scores = [
        {"name": entry.name, "image": row, "prompt": prompt.text}
        | {name: values[row].item() for name, values in entry.measures.items()}
        for entry in comparison.entries
        for row, prompt in enumerate(comparison.prompts)
    ]
    write_csv(folder / "scores.csv", scores)
    page = folder / "index.html"
    write_text(page, render("leaderboard.html.j2", _page_values(comparison)))
    return page


# --- tables ---------------------------------------------------------------------------------------


def ranking(comparison: Comparison) -> list[Row]:
    """Return a row for each entry, the best overall first: rank, and the mean of each measure.

    The first measure, which ranks, has its difference from the base beside it.
    """
    measure = next(iter(comparison.entries[0].measures))
    from_base = {
        pair.second: {
            "change": pair.contrast.mean, "95% low": pair.contrast.low,
            "95% high": pair.contrast.high, "p corrected": pair.corrected,
        }
        for pair in comparison.pairs
        if (pair.measure, pair.first) == (measure, BASE)
    }  # fmt: skip
    return [
        {"rank": rank(comparison, entry), "name": entry.name}
        | {_title(comparison, m): entry.mean(m) for m in entry.measures}
        | from_base.get(entry.name, {})
        for entry in comparison.entries
    ]


def rank(comparison: Comparison, entry: Entry) -> int:
    """Return 1 + the number of entries that are significantly better, after correction."""
    measure = next(iter(entry.measures))
    better = 0
    for pair in comparison.pairs:
        if pair.measure == measure and entry.name in (pair.first, pair.second) and pair.differs:
            ahead = pair.contrast.mean if entry.name == pair.first else -pair.contrast.mean
            better += ahead > 0
    return 1 + better


def pair_rows(comparison: Comparison) -> list[Row]:
    """Return a row for each measure of each pair."""
    return [
        {
            "measure": _title(comparison, pair.measure),
            "from": pair.first,
            "to": pair.second,
            "change": pair.contrast.mean,
            "95% low": pair.contrast.low,
            "95% high": pair.contrast.high,
            "p": pair.contrast.p,
            "p corrected": pair.corrected,
            "differs": pair.differs,
            "images": pair.contrast.images,
            "prompts": pair.contrast.prompts,
        }
        for pair in comparison.pairs
    ]


def missing(comparison: Comparison) -> list[str]:
    """Return why scores are missing, each reason with the entry that it concerns."""
    return [
        f"{entry.name}: {error}"
        for entry in comparison.entries
        for error in entry.evaluation.errors
    ]


def _title(comparison: Comparison, measure: str) -> str:
    return f"{measure} (held out)" if measure in comparison.held_out else measure


# --- the page -------------------------------------------------------------------------------------


def _page_values(comparison: Comparison) -> dict[str, Any]:
    """Return the values of the page's template."""
    table = ranking(comparison)
    return {
        "title": f"{comparison.title}: base and {len(comparison.entries) - 1} LoRAs",
        "caption": caption(comparison),
        "columns": list(dict.fromkeys(name for row in table for name in row))[2:],
        "ranking": table,
        "pairs": pair_rows(comparison),
        "names": [entry.name for entry in comparison.entries],
        "rows": [_images_of(comparison, row) for row in range(min(SHOWN, len(comparison.prompts)))],
        "missing": missing(comparison),
    }


def caption(comparison: Comparison) -> str:
    """Return how much was measured, and how to read it."""
    prompts = len({p.uid for p in comparison.prompts})
    text = (
        f"{len(comparison.prompts)} images of {prompts} prompts, the same prompts and noise for "
        f"all. Two differ where p after Holm's correction for all {len(comparison.pairs)} "
        f"comparisons is below {SIGNIFICANT:g}; a rank is 1 + the number of entries that are "
        "better and differ."
    )
    fewest = fewest_prompts(len(comparison.pairs)) if comparison.pairs else 0
    if prompts < fewest:
        text += f" {prompts} prompts are too few for any of them: it takes {fewest}."
    if any(OVERALL in entry.measures for entry in comparison.entries):
        text += " overall is the recipe's weighted sum of the rewards of training."
    return text


def _images_of(comparison: Comparison, row: int) -> dict[str, Any]:
    """Return a prompt with its images and scores of all entries."""
    images = []
    for entry in comparison.entries:
        scores = {m: v[row].item() for m, v in entry.measures.items() if v[row].isfinite()}
        (image,) = to_pil(entry.evaluation.images[row : row + 1].float() / 255)
        images.append({"name": entry.name, "url": data_url(image), "scores": scores})
    return {"prompt": comparison.prompts[row].text, "images": images}
