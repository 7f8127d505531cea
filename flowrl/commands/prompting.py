"""`flowrl prompts`: lists of prompts to train on, and others to evaluate on."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowrl.errors import UserError


def prompts(
    kind: Annotated[Literal["geneval", "ocr"], typer.Argument(help="What they ask for.")],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Folder for train.jsonl and test.jsonl.")
    ],
    count: Annotated[int, typer.Option(min=0, help="Prompts to train on.")] = 1000,
    held_out: Annotated[int, typer.Option(min=0, help="Prompts to evaluate on.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed gives the same sets.")] = 0,
    ratio: Annotated[
        str | None, typer.Option(metavar="N:N:...", help="Parts of the kinds, see above.")
    ] = None,
    classes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="geneval: names of objects, one a line.")
    ] = None,
    words: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ocr: words, one a line.")
    ] = None,
    templates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ocr: wordings with {}, one a line.")
    ] = None,
    new_words: Annotated[
        bool, typer.Option("--new-words", help="ocr: keep words for test.jsonl alone.")
    ] = False,
) -> None:
    """Write lists of prompts with what their rewards need, and a held-out list.

    geneval: objects, their number, colours and places, for the reward geneval. --ratio is
    position:counting:color_attr:colors:two_object:single_object, 7:5:3:1:1:0 if not given;
    test.jsonl has as many of each kind. Default classes are COCO's.

    ocr: a text of one to four words to be written, for the reward ocr. --ratio is the parts of
    texts with 1:2:3:4 words, 1:3:3:3 if not given.

    No combination of objects, and no text, is in both lists, in whatever words.

    Examples:

      flowrl prompts geneval -o prompts/geneval --count 20000 --held-out 600

      flowrl prompts ocr -o prompts/ocr --words words.txt --new-words

      flowrl train quickstart prompts.train=prompts/ocr/train.jsonl evaluation.prompts=prompts/ocr/test.jsonl
    """
    from flowrl.prompt_sets import read_list, write_sets

    others = (words, templates, new_words or None) if kind == "geneval" else (classes,)
    if any(option is not None for option in others):
        theirs = "--words, --templates and --new-words" if kind == "geneval" else "--classes"
        raise UserError(f"{theirs} are not for {kind}: leave them out, see flowrl prompts --help.")
    given = {"ratio": _parts(ratio)} if ratio else {}
    if kind == "geneval":
        from flowrl.prompt_sets_geneval import geneval_sets

        named = {"classes": read_list(classes)} if classes else {}
        sets = geneval_sets(count, held_out, seed, **named, **given)
    else:
        from flowrl.prompt_sets_ocr import ocr_sets

        files = {"words": words, "templates": templates}
        named = {name: read_list(path) for name, path in files.items() if path}
        sets = ocr_sets(count, held_out, seed, new_words=new_words, **named, **given)
    for path, rows in zip(write_sets(output_dir, sets), filter(None, sets), strict=True):
        typer.echo(f"{path}  {len(rows)} prompts")


def _parts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(":")]
    except ValueError as error:
        raise UserError(
            f"--ratio is {text!r}, expected whole numbers as in 7:5:3:1:1:0."
        ) from error
