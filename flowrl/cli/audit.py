"""`flowrl audit`: compare the ranking of cheap candidates with that of exact images."""

from typing import Annotated

import typer

from flowrl.cli._console import Lora, print_table, say, starting
from flowrl.cli.train import Words, recipe_request

COLUMNS = {  # titles and names of what is shown
    "steps": "steps", "precision": "precision", "low-bit": "quantised", "rho": "rho",
    "contrast": "contrast", "seconds": "seconds_per_image", "ratio": "ratio_to_exact",
}  # fmt: skip


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
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 4,
    candidates: Annotated[
        int | None, typer.Option(min=2, help="Candidates of a prompt; the recipe's, or 96.")
    ] = None,
    lora: Lora = None,
) -> None:
    """Compare cheap candidates with exact images of the same noise, before training.

    All candidates of a few prompts are sampled once exactly, and once in every pair of steps and
    precision. A row has the share of weights in few bits (low-bit); Spearman's rank correlation of
    scores within a prompt (rho); the difference of exact scores between the best and the worst
    half of the selection, relative to that of a selection by exact scores (contrast); and the
    seconds to sample and score an image, also relative to an exact one. The last row is of the
    exact images.

    Training warns below a rho of 0.8; `rollout.explore.audit.every` says how often it looks.

    Examples:

      flowrl audit tiny-sd3-solrl-geneval

      flowrl audit tiny-sd3-solrl-geneval --steps 4 --steps 6 --precision nvfp4-emulated \\
        --precision bf16

      flowrl audit my_recipe.yaml --lora runs/mine --candidates 48 --prompts 8
    """
    request = recipe_request(words, "flowrl audit tiny-sd3-solrl-geneval")
    with starting():
        from flowrl.api import audit as audit_recipes
        from flowrl.assembly.auditing import audit_configs

    configs = audit_configs(
        request.recipe, request.overrides, prompts=prompts, candidates=candidates,
        steps=steps or (), precisions=precision or (),
    )  # fmt: skip
    rows = audit_recipes(configs, lora=lora)
    print_table([{title: row[key] for title, key in COLUMNS.items()} for row in rows])
    for row in rows:
        if row["missing"]:
            count = f"{row['missing']} candidates have no score"
            say(f"{row['steps']} steps, {row['precision']}: {count}", err=True)
