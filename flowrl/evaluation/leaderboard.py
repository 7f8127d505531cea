"""The pages of a contest: `index.html`, `leaderboard.png`, and its numbers as csv."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.evaluation.benchmark import Row, write_csv
from flowrl.evaluation.contest import (
    BASE,
    DIVERSITY,
    OVERALL,
    SIGNIFICANT,
    Contest,
    Contestant,
    PairContrast,
)
from flowrl.functional.contrasts import fewest_prompts
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.images import INK, Color, Stack, data_url, image_grid, png
from flowrl.utils.templates import number, render, signed

SHOWN = 12  # prompts whose images are on the page
IN_PNG = 6


def write_leaderboard(contest: Contest, folder: Path) -> Path:
    """Write the page, the picture and the tables; return the page."""
    write_csv(folder / "leaderboard.csv", ranking(contest))
    write_csv(folder / "comparisons.csv", comparisons(contest))
    write_csv(folder / "scores.csv", _scores(contest))
    if split := kinds(contest):
        write_csv(folder / "kinds.csv", split)
    page = folder / "index.html"
    write_text(page, render("leaderboard.html.j2", _values(contest)))
    write_bytes(folder / "leaderboard.png", png(_picture(contest)))
    return page


def ranking(contest: Contest) -> list[Row]:
    """Return a row a contestant, the best overall first: its rank and the mean of each measure.

    The rank counts those that are better overall by more than chance explains, after correction.
    """
    rows: list[Row] = []
    for own in contest.contestants:
        row: Row = {"rank": rank(contest, own), "name": own.name}
        rows.append(row | {_title(contest, m): own.mean(m) for m in own.measures})
    return rows


def rank(contest: Contest, own: Contestant) -> int:
    """Return 1 + how many others are better overall, by more than chance explains."""
    measure = next(iter(own.measures))
    better = 0
    for pair in contest.pairs:
        if pair.measure == measure and own.name in (pair.first, pair.second) and pair.differs:
            ahead = pair.contrast.mean if own.name == pair.first else -pair.contrast.mean
            better += ahead > 0
    return 1 + better


def comparisons(contest: Contest) -> list[Row]:
    """Return a row for each measure of each pair."""
    return [
        {
            "measure": _title(contest, pair.measure),
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
        for pair in contest.pairs
    ]


def kinds(contest: Contest) -> list[Row]:
    """Return the means of the rewards for each kind of prompt and contestant."""
    rows = []
    for kind, images in contest.kinds().items():
        for own in contest.contestants:
            means = {
                _title(contest, name): values[images].nanmean().item()
                for name, values in own.measures.items()
                if bool(values[images].isfinite().any())
            }
            rows.append({"prompts": kind, "name": own.name, "images": len(images)} | means)
    return rows


def _title(contest: Contest, measure: str) -> str:
    return f"{measure} (held out)" if measure in contest.held_out else measure


def _scores(contest: Contest) -> list[Row]:
    return [
        {"name": own.name, "image": row, "prompt": prompt.text, "file": str(path)}
        | {name: values[row].item() for name, values in own.measures.items()}
        for own in contest.contestants
        for row, (prompt, path) in enumerate(zip(contest.prompts, contest.images(own), strict=True))
    ]


# --- the page -------------------------------------------------------------------------------------


def _values(contest: Contest) -> dict[str, Any]:
    table, split = ranking(contest), kinds(contest)
    return {
        "title": f"{contest.title}: base and {len(contest.contestants) - 1} LoRAs",
        "caption": caption(contest),
        "columns": list(table[0])[2:],
        "ranking": table,
        "pairs": comparisons(contest),
        "kinds": split,
        "kind_columns": list(dict.fromkeys(n for row in split for n in row))[3:],
        "names": [own.name for own in contest.contestants],
        "rows": [_shown(contest, row) for row in _rows(contest, SHOWN)],
        "missing": [line for own in contest.contestants for line in own.missing],
    }


def caption(contest: Contest) -> str:
    """Return how much was measured, and how to read it."""
    prompts = len({p.uid for p in contest.prompts})
    text = (
        f"{len(contest.prompts)} images of {prompts} prompts, the same prompts and noises for all. "
        f"Two differ where p after Holm's correction for all {len(contest.pairs)} comparisons is "
        f"below {SIGNIFICANT:g}; a rank is 1 + the number of those that are better and differ."
    )
    if contest.pairs and prompts < (fewest := fewest_prompts(len(contest.pairs))):
        text += f" {prompts} prompts are too few for any of them: it takes {fewest}."
    if any(DIVERSITY in own.measures for own in contest.contestants):
        text += " diversity is the mean absolute difference of a prompt's images."
    if any(OVERALL in own.measures for own in contest.contestants):
        text += " overall is the recipe's weighted sum of the rewards that are trained on."
    return text


def _rows(contest: Contest, count: int) -> list[int]:
    """Return the first image of each of the first prompts."""
    return [row for row, turn in enumerate(contest.number) if turn == 0][:count]


def _shown(contest: Contest, row: int) -> dict[str, Any]:
    images = []
    for own in contest.contestants:
        with Image.open(contest.images(own)[row]) as file:
            picture = file.convert("RGB")
        scores = {m: v[row].item() for m, v in own.measures.items() if v[row].isfinite()}
        images.append({"name": own.name, "url": data_url(picture), "scores": scores})
    return {"prompt": contest.prompts[row].text, "images": images}


def _picture(contest: Contest) -> Image.Image:
    measure = next(iter(contest.contestants[0].measures))
    lines = [f"{contest.title}. {caption(contest)}"]
    lines += [
        f"{rank(contest, own)}.  {own.name}: {measure} {number(own.mean(measure))}"
        + _against_base(contest, own.name, measure)
        for own in contest.contestants
    ]
    stacks = [_stack(contest, row) for row in _rows(contest, IN_PNG)]
    names = [own.name for own in contest.contestants]
    return image_grid(stacks, heading=lines, rows=names, across=IN_PNG)


def _against_base(contest: Contest, name: str, measure: str) -> str:
    found = [p for p in contest.pairs if (p.measure, p.first, p.second) == (measure, BASE, name)]
    return "".join(f", {_change(pair)} against the base" for pair in found)


def _change(pair: PairContrast) -> str:
    one = pair.contrast
    return f"{signed(one.mean)} ({signed(one.low)} to {signed(one.high)}, p {pair.corrected:.3g})"


def _stack(contest: Contest, row: int) -> Stack:
    pictures: list[Image.Image] = []
    for own in contest.contestants:
        with Image.open(contest.images(own)[row]) as file:
            pictures.append(file.convert("RGB"))
    notes: Sequence[tuple[str, Color]] = [
        (f"{own.name} {number(next(iter(own.measures.values()))[row].item())}", INK)
        for own in contest.contestants
    ]
    return Stack(caption=contest.prompts[row].text, images=pictures, notes=notes)
