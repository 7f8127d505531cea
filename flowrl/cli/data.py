"""`flowrl collect`: groups of pictures on disk, to learn from as often as you like."""

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli.train import Words
from flowrl.errors import UserError


def collect(
    words: Words = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Folder of the store.")
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts to draw; rounded up to whole iterations."),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take pictures from here: a .jsonl file of pairs."),
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(metavar="RUN|FILE", help="Draw with this LoRA."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Draw and score groups once, to train on many times with rollout.store.path.

    Pictures are drawn as the recipe's rollouts are; its objective plays no part. What is in the
    folder already is kept, so that a second call goes on after an interruption, or to more groups.

    --pairs encodes pictures you have, of which people preferred one: {"prompt": ..., "chosen":
    "a.png", "rejected": "b.png"} in each line, other keys are metadata. They become groups of two
    with the reward `preference`.

    Examples:

      flowrl collect quickstart -o stores/quickstart --groups 512 "rollout.tree={kind: ode}"

      flowrl collect quickstart -o stores/aligned --groups 512 --lora runs/quickstart

      flowrl collect quickstart -o stores/pairs --pairs pairs.jsonl
    """
    from flowrl.config import load_config
    from flowrl.config.aliases import sort_arguments

    request = sort_arguments(words or [])
    if not request.recipe or output_dir is None:
        raise UserError(
            "Give a recipe and a folder, as in flowrl collect quickstart -o stores/quickstart "
            "--groups 512, or with --pairs pairs.jsonl in place of --groups."
        )
    if (groups is None) == (pairs is None):
        raise UserError("Give either --groups, how many to draw, or --pairs, a file of pictures.")
    if pairs is not None and lora is not None:
        raise UserError("--lora draws pictures, and --pairs brings them: leave one out.")
    # Only pictures are drawn: what will be learned from them asks nothing of the rollout yet.
    drawn = ["rollout.store=null", "objective={kind: sft}"]
    config = load_config(request.recipe, [*request.overrides, *drawn])
    from flowrl.cli._console import print_table
    from flowrl.collecting import NAMED, collect_groups, collect_pairs

    if pairs is None:
        rows, left_out = collect_groups(config, output_dir, groups=groups or 1, lora=lora), []
    else:
        rows, left_out = collect_pairs(config, pairs, output_dir)
    for reason in left_out[:NAMED]:
        typer.echo(f"left out: {reason}", err=True)
    if len(left_out) > NAMED:
        typer.echo(f"left out: {len(left_out) - NAMED} more pairs", err=True)
    print_table(rows, as_json=as_json)
