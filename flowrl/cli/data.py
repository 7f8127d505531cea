"""`flowrl collect` and `flowrl prompts`: make images and prompts to train on."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.cli._console import Lora, mapping_of, print_table, say, starting
from flowrl.cli.train import Words
from flowrl.errors import UserError

SHOWN = 5  # pairs left out that are reported one by one


def collect(
    words: Words = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Folder of the data set.")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Prompts to sample; rounded up to whole iterations.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(metavar="FILE|hf:NAME", help="Table of pairs of images, or a folder of it."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="YAML",
            help="Columns of --pairs: '{prompt: caption, chosen: path1, rejected: path2}', or "
            "'{prompt: caption, first: jpg_0, second: jpg_1, label: label_0}'.",
        ),
    ] = None,
    lora: Lora = None,
) -> None:
    """Sample and score groups once, to train on many times with rollout.store.

    Images are sampled as in the recipe's rollouts; its objective has no effect. The same command
    resumes, and a larger --groups adds to the data set.

    --pairs encodes images of which people preferred one: a .jsonl file with lines {"prompt": ...,
    "chosen": "a.png", "rejected": "b.png"}, or any table that `datasets` reads. They become groups
    of two with the reward `preference`; other columns are metadata.

    Examples:

      flowrl collect quickstart -o stores/quickstart --groups 512 "rollout.tree={kind: ode}"

      flowrl collect quickstart -o stores/aligned --groups 512 --lora runs/quickstart

      flowrl collect quickstart -o stores/pairs --pairs pairs.jsonl

      flowrl collect quickstart -o stores/pairs --pairs pickapic.parquet \\
        --columns "{prompt: caption, first: jpg_0, second: jpg_1, label: label_0}"
    """
    from flowrl.config import load_config
    from flowrl.config.arguments import sort_arguments

    request = sort_arguments(words or [])
    if not request.recipe or output_dir is None:
        raise UserError(
            "Give a recipe and a folder, as in flowrl collect quickstart -o stores/quickstart "
            "--groups 512, or with --pairs pairs.jsonl in place of --groups."
        )
    if (groups is None) == (pairs is None):
        raise UserError("Give either --groups, a number of prompts, or --pairs, a file of images.")
    if pairs is not None and lora is not None:
        raise UserError("--lora is for sampling, and --pairs samples nothing: leave one out.")
    # The objective that will learn from the images needs nothing of the rollout yet.
    changes = ["rollout.store=null", "objective={kind: sft}"]
    config = load_config(request.recipe, [*request.overrides, *changes])
    with starting():
        from flowrl.api import collect as collect_groups
        from flowrl.api import collect_pairs

    if pairs is None:
        rows, left_out = collect_groups(config, output_dir, groups=groups or 1, lora=lora), []
    else:
        names = mapping_of(columns, "--columns")
        rows, left_out = collect_pairs(config, pairs, output_dir, columns=names)
    more = len(left_out) - SHOWN
    for reason in [*left_out[:SHOWN], *([f"{more} more pairs"] if more > 0 else [])]:
        say(f"left out: {reason}", err=True)
    print_table(rows)


def prompts(
    kind: Annotated[
        Literal["geneval", "ocr"], typer.Argument(help="Objects and relations, or texts to render.")
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Folder for train.jsonl and test.jsonl.")
    ],
    count: Annotated[int, typer.Option(min=0, help="Number of training prompts.")] = 1000,
    held_out: Annotated[int, typer.Option(min=0, help="Number of held-out prompts.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed: the same gives the same lists.")] = 0,
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="geneval: leave out the requests of a .jsonl file; repeatable."
        ),
    ] = None,
) -> None:
    """Write a list of training prompts and a held-out one, with the metadata that rewards need.

    geneval: objects, their number, colours and places, for the reward geneval. Training prompts
    have position:counting:color_attr:colors:two_object:single_object in 7:5:3:1:1:0, as Flow-GRPO;
    test.jsonl has equally many of each kind. The classes are COCO's. A kind with fewer
    requests than prompts repeats requests in other words, then texts; counting has the fewest, 240
    requests. --exclude evaluation_metadata.jsonl leaves out the 553 requests of GenEval's published
    test, in any wording.

    ocr: a text of one to four words to render, for the reward ocr, 1:2:3:4 words in 1:3:3:3.

    No combination of objects, and no text, is in both lists, in any wording.

    Examples:

      flowrl prompts geneval -o prompts/geneval --count 5000 --held-out 400

      flowrl prompts geneval -o prompts/geneval --exclude evaluation_metadata.jsonl

      flowrl prompts ocr -o prompts/ocr

      flowrl train RECIPE prompts.train=prompts/ocr/train.jsonl \\
        evaluation.prompts=prompts/ocr/test.jsonl
    """
    from flowrl.prompts.generate import geneval, ocr
    from flowrl.prompts.generate.templates import write_sets
    from flowrl.prompts.overlap import requests_in

    if not count + held_out:
        raise UserError("--count and --held-out are both 0: nothing to write.")
    if exclude and kind == "ocr":
        raise UserError("--exclude is not for ocr: leave it out, see flowrl prompts --help.")
    sizes = (count, held_out, seed)
    if kind == "geneval":
        excluded = requests_in(exclude or [])
        sets = geneval.geneval_sets(*sizes, excluded=excluded)
    else:
        sets = ocr.ocr_sets(*sizes)
    for path, rows in zip(write_sets(output_dir, sets), filter(None, sets), strict=True):
        say(f"{path}  {len(rows)} prompts")
