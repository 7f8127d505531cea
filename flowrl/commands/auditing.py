"""`flowrl audit`: do cheap previews rank candidates as exact pictures do?"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from flowrl.commands.training import Words
from flowrl.errors import UserError


def audit(
    words: Words = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Denoising steps of previews; may be repeated."),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision of previews: auto, nvfp4, fp8, bf16 or nvfp4-emulated; may be repeated."
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
    """Compare cheap previews of candidates with the exact pictures, before you train on a choice.

    All candidates of a few prompts are drawn once exactly, and as previews of every pair of steps
    and precision. A row tells how well their scores rank: Kendall's tau and Spearman's rho within a
    prompt, and rho of all together (pooled); of the best and the worst half of the choice the
    share that exact scores would choose (overlap) and the mean exact rank, 1 the best; how much of
    the best possible contrast of the two the choice keeps; the seconds of a picture, drawn and
    scored, and their ratio to the exact ones'. The last rows are a choice by exact scores and one
    at random.

    Training accepts a rho of 0.8 by default, see `flowrl explain rollout.explore.audit`. "no rho"
    counts prompts whose scores are all equal, and "missing" candidates without a score.

    Examples:

      flowrl audit tiny-sd3-nft-geneval --steps 3 --steps 5

      flowrl audit tiny-sd3-nft-geneval --precision nvfp4-emulated --precision bf16 \\
        rollout.explore.min_dim=0

      flowrl audit my_recipe.yaml --lora runs/mine --candidates 48 --prompts 8
    """
    from flowrl.aliases import sort_arguments
    from flowrl.commands.show import print_table

    request = sort_arguments(words or [])
    if not request.recipe:
        raise UserError(
            "No recipe given: name a preset or a YAML file, as in flowrl audit quickstart."
        )
    from flowrl.auditing import audit_previews, audited

    configs = audited(
        request.recipe,
        request.overrides,
        prompts=prompts,
        candidates=candidates,
        steps=steps or (),
    )
    rows = audit_previews(configs, precisions=precision or (), lora=lora)
    print_table(rows if as_json else for_people(rows), as_json=as_json)


def for_people(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same in fewer and shorter columns; what was left out only where something was."""
    from flowrl.render import number

    def pair(row: Mapping[str, Any], name: str, digits: int) -> str:
        ends = (row.get(f"{name} {side}", math.nan) for side in ("best", "worst"))
        return "/".join(f"{end:.{digits}f}" if math.isfinite(end) else "n/a" for end in ends)

    left_out = [name for name in ("no rho", "missing") if any(row.get(name) for row in rows)]
    return [
        {"steps": row.get("steps"), "precision": row["precision"]}
        | {"quantised": f"{row['quantised']:.0%}" if "quantised" in row else None}
        | {name: number(row.get(name)) for name in ("tau", "rho")}
        | {"pooled": number(row.get("pooled rho"))}
        | {"overlap": pair(row, "overlap", 2), "rank": pair(row, "rank", 1)}
        | {"contrast": number(row.get("retention"))}
        | {name: row.get(name) for name in left_out}
        | {"seconds": number(row.get("s/picture")), "ratio": number(row.get("to exact"))}
        for row in rows
    ]
