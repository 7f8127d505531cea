"""`flowrl audit`: do cheap candidates rank as exact images do? Nothing is learned."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from flowrl.cli._console import AsJson, Lora, print_table
from flowrl.cli.train import Words, recipe_request

JSON_NAMES = {
    "pooled rho": "pooled_rho",
    "overlap best": "overlap_best",
    "overlap worst": "overlap_worst",
    "rank best": "rank_best",
    "rank worst": "rank_worst",
    "retention": "contrast",
    "no rho": "prompts_without_rho",
    "s/image": "seconds_per_image",
    "to exact": "ratio_to_exact",
}


def audit(
    words: Words = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Denoising steps of a candidate; may be repeated."),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision of candidates: auto, nvfp4, fp8, bf16, nvfp4-emulated; may be repeated."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to sample.")] = 4,
    candidates: Annotated[
        int | None, typer.Option(min=2, help="Candidates of a prompt; the recipe's, or 96.")
    ] = None,
    lora: Lora = None,
    as_json: AsJson = False,
) -> None:
    """Compare cheap candidates with the exact images, before you train on a choice of them.

    All candidates of a few prompts are sampled once exactly, and once in every pair of steps and
    precision. A row has the share of weights in few bits (low-bit) and how well scores rank:
    Spearman's rho within a prompt; for the better half of the choice the share that exact scores
    would choose (overlap) and the mean exact rank, 1 the best; how much of the largest possible
    contrast between its halves the choice keeps; the seconds to sample and score an image, and
    their ratio to those of an exact one. The last rows are a choice by exact scores and one at
    random.

    Training accepts a rho of 0.8 by default, see `flowrl explain rollout.explore.audit`. --json
    has Kendall's tau, rho of all prompts together (pooled_rho) and the worse half too.

    Examples:

      flowrl audit tiny-sd3-solrl-geneval

      flowrl audit tiny-sd3-solrl-geneval --steps 4 --steps 6 --precision nvfp4-emulated \\
        --precision bf16

      flowrl audit my_recipe.yaml --lora runs/mine --candidates 48 --prompts 8
    """
    request = recipe_request(words, "flowrl audit tiny-sd3-solrl-geneval")
    from flowrl.api import audit as audit_recipe

    rows = audit_recipe(
        request.recipe, request.overrides, prompts=prompts, candidates=candidates,
        steps=steps or (), precisions=precision or (), lora=lora,
    )  # fmt: skip
    print_table(json_rows(rows) if as_json else table_rows(rows), as_json=as_json)
    for note in () if as_json else notes(rows):
        print(note)


def json_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every number to 6 decimals, with all names in every row."""

    def rounded(value: Any) -> Any:
        return round(value, 6) if isinstance(value, float) and math.isfinite(value) else value

    names = dict.fromkeys(name for row in rows for name in row)
    return [{JSON_NAMES.get(name, name): rounded(row.get(name)) for name in names} for row in rows]


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the numbers that decide, in columns that fit a terminal of 80."""

    def text(value: float | None, format: str) -> str:
        return "n/a" if value is None or not math.isfinite(value) else f"{value:{format}}"

    return [
        {"steps": row.get("steps"), "precision": row["precision"]}
        | {"low-bit": text(row.get("quantised"), ".0%"), "rho": text(row.get("rho"), ".3f")}
        | {"overlap": text(row.get("overlap best"), ".2f")}
        | {"rank": text(row.get("rank best"), ".1f")}
        | {"contrast": text(row.get("retention"), ".3f")}
        | {"seconds": text(row.get("s/image"), ".3g"), "ratio": text(row.get("to exact"), ".2f")}
        for row in rows
    ]


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each row that lacks something."""
    sentences = []
    for row in rows:
        flat, missing = row.get("no rho") or 0, row.get("missing") or 0
        found = [f"{flat} prompts have no rho, their scores are all equal"] if flat else []
        found += [f"{missing} candidates have no score"] if missing else []
        if found:
            sentences.append(f"{row['steps']} steps, {row['precision']}: {'; '.join(found)}")
    return sentences
