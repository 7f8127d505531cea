"""One LoRA at several strengths: the same prompts and noise, drawn, scored and shown in columns."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flowrl.backbones.guidance import RLG
from flowrl.export.gallery import GallerySweep, SummaryRow, write_gallery
from flowrl.export.summary import pairs, summary
from flowrl.training.evaluate import Evaluation, Evaluator, compare
from flowrl.utils.distributed import Runtime

NOTE = "RLG 0 is the base, 1 the LoRA as it was trained; other strengths are a heuristic."


def draw_sweep(
    evaluator: Evaluator, runtime: Runtime, strengths: Sequence[float]
) -> dict[float, Evaluation]:
    """What the evaluator's pipeline, with its LoRA loaded, draws at each strength of RLG.

    In the order given; a strength that is named twice is drawn once.
    """
    found = {}
    for strength in dict.fromkeys(strengths):
        with RLG(evaluator.backbone.pipeline, strength):
            found[strength] = evaluator(evaluator.backbone.velocity, runtime)
    return found


def write_sweep(
    folder: Path, base: Evaluation, at_each: dict[float, Evaluation], *, title: str, caption: str
) -> Path:
    """Write the gallery with a column for the base and for each strength -> its page.

    The table has a row for each reward and strength: both means and the paired change.
    """
    columns = [f"RLG {strength:g}" for strength in at_each]
    page, _ = write_gallery(
        folder,
        sweep_rows(base, list(at_each.values())),
        title=title,
        summary=sweep_summary(base, dict(zip(columns, at_each.values(), strict=True))),
        caption=f"{caption}. {NOTE}",
        columns=("base", *columns),
    )
    return page


def sweep_rows(base: Evaluation, others: Sequence[Evaluation]) -> list[GallerySweep]:
    """The kept pictures of all evaluations by prompt and noise, with their scores."""
    return [
        GallerySweep(
            prompt=same[0].prompt,
            draw=same[0].draw,
            pictures=(same[0].base, *(pair.aligned for pair in same)),
            scores={
                name: (first, *(pair.scores[name][1] for pair in same))
                for name, (first, _) in same[0].scores.items()
            },
        )
        for same in zip(*(pairs(base, other) for other in others), strict=True)
    ]


def sweep_summary(base: Evaluation, others: dict[str, Evaluation]) -> list[SummaryRow]:
    """Every reward at every strength, by reward. others: by the name of their column."""
    found = {column: summary(compare(base, other)) for column, other in others.items()}
    return [
        replace(row, name=f"{reward}, {column}")
        for reward in base.names
        for column, rows in found.items()
        for row in rows
        if row.name == reward
    ]
