"""`flowrl audit`: do cheap candidates rank as exact images do?"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from flowrl.cli.train import Words
from flowrl.errors import UserError

# The names in --json of numbers that are called otherwise here.
PLAIN = {
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
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to draw candidates of.")] = 4,
    candidates: Annotated[
        int | None, typer.Option(min=2, help="Candidates of a prompt; the recipe's, or 96.")
    ] = None,
    lora: Annotated[
        str | None, typer.Option(metavar="RUN|FILE", help="Draw with this LoRA.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Compare cheap candidates with the exact images, before you train on a choice of them.

    All candidates of a few prompts are drawn once exactly, and once in every pair of steps and
    precision. A row tells what share of the weights is low-bit and how well scores rank:
    Spearman's rho within a prompt; of the better half of the choice the share that exact scores
    would choose (overlap) and the mean exact rank, 1 the best; how much of the best possible
    contrast of its halves the choice keeps; the seconds of an image, drawn and scored, and their
    ratio to the exact ones'. The last rows are a choice by exact scores and one at random.

    Training accepts a rho of 0.8 by default, see `flowrl explain rollout.explore.audit`. --json
    has Kendall's tau, rho of all prompts together (pooled_rho) and the worse half too.

    Examples:

      flowrl audit tiny-sd3-solrl-geneval

      flowrl audit tiny-sd3-solrl-geneval --steps 4 --steps 6 --precision nvfp4-emulated \\
        --precision bf16

      flowrl audit my_recipe.yaml --lora runs/mine --candidates 48 --prompts 8
    """
    from flowrl.cli._console import print_table
    from flowrl.config.load import sort_arguments

    request = sort_arguments(words or [])
    if not request.recipe:
        raise UserError(
            "No recipe given: name a preset or a YAML file, as in "
            "flowrl audit tiny-sd3-solrl-geneval."
        )
    from flowrl.api import audit_previews, audited

    configs = audited(
        request.recipe,
        request.overrides,
        prompts=prompts,
        candidates=candidates,
        steps=steps or (),
    )
    rows = audit_previews(configs, precisions=precision or (), lora=lora)
    print_table(for_programs(rows) if as_json else for_people(rows), as_json=as_json)
    for note in () if as_json else left_out(rows):
        print(note)


def for_programs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every number by a plain name, all names in every row, to 6 decimals."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{PLAIN.get(name, name): _rounded(row.get(name)) for name in names} for row in rows]


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) and math.isfinite(value) else value


def for_people(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The numbers that decide, in columns that fit a terminal of 80."""

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


def left_out(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each row that lacks something."""
    told = []
    for row in rows:
        flat, missing = row.get("no rho") or 0, row.get("missing") or 0
        found = [f"{flat} prompts have no rho, their scores are all equal"] if flat else []
        found += [f"{missing} candidates have no score"] if missing else []
        if found:
            told.append(f"{row['steps']} steps, {row['precision']}: {'; '.join(found)}")
    return told
