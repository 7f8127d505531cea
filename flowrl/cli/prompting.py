"""`flowrl prompts`: lists of prompts to train on, and others to evaluate on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.prompts.generate.draw import Sets


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
    test.jsonl has as many of each kind. Default classes are COCO's. Of counting prompts there are
    the fewest, 1920: with this ratio at most 6392 beside 200 held-out ones.

    ocr: a text of one to four words to be written, for the reward ocr. --ratio is the parts of
    texts with 1:2:3:4 words, 1:3:3:3 if not given.

    No combination of objects, and no text, is in both lists, in whatever words.

    Examples:

      flowrl prompts geneval -o prompts/geneval --count 5000 --held-out 400

      flowrl prompts ocr -o prompts/ocr --words words.txt --new-words

      flowrl train RECIPE prompts.train=prompts/ocr/train.jsonl \\
        evaluation.prompts=prompts/ocr/test.jsonl
    """
    from flowrl.prompts.generate.draw import write_sets

    if not count + held_out:
        raise UserError("--count or --held-out must be above 0: there is nothing to write.")
    others = (words, templates, new_words or None) if kind == "geneval" else (classes,)
    if any(option is not None for option in others):
        theirs = "--words, --templates and --new-words" if kind == "geneval" else "--classes"
        raise UserError(f"{theirs} are not for {kind}: leave them out, see flowrl prompts --help.")
    if kind == "geneval":
        sets = _geneval(count, held_out, seed, _parts(ratio), classes)
    else:
        sets = _ocr(count, held_out, seed, _parts(ratio), words, templates, new_words)
    for path, rows in zip(write_sets(output_dir, sets), filter(None, sets), strict=True):
        typer.echo(f"{path}  {len(rows)} prompts")


def _geneval(
    count: int, held_out: int, seed: int, ratio: list[int] | None, classes: Path | None
) -> "Sets":
    from flowrl.prompts.generate.draw import read_list
    from flowrl.prompts.generate.geneval import COCO, RATIO, geneval_sets

    names = read_list(classes) if classes else COCO
    return geneval_sets(count, held_out, seed, classes=names, ratio=ratio or RATIO)


def _ocr(
    count: int,
    held_out: int,
    seed: int,
    ratio: list[int] | None,
    words: Path | None,
    templates: Path | None,
    new_words: bool,
) -> "Sets":
    from flowrl.prompts.generate.draw import read_list
    from flowrl.prompts.generate.ocr import RATIO, TEMPLATES, WORDS, ocr_sets

    return ocr_sets(
        count,
        held_out,
        seed,
        words=read_list(words) if words else WORDS,
        templates=read_list(templates) if templates else TEMPLATES,
        ratio=ratio or RATIO,
        new_words=new_words,
    )


def _parts(text: str | None) -> list[int] | None:
    try:
        return [int(part) for part in text.split(":")] if text is not None else None
    except ValueError as error:
        raise UserError(
            f"--ratio is {text!r}, expected whole numbers as in 7:5:3:1:1:0."
        ) from error
