"""`flowrl sample`, `flowrl score` and `flowrl gallery`: commands about images."""

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli._console import (
    AsJson,
    Device,
    Guidance,
    Lora,
    LoraAlpha,
    NumSteps,
    Revision,
    Tokens,
    arguments_of,
    print_scores,
    starting,
)
from flowrl.errors import UserError

PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompts", metavar="FILE|SPLIT", help="Prompts: a file, or a split of a data set."
    ),
]


def sample(  # noqa: PLR0913  # an argument for each option
    model: Annotated[str, typer.Argument(help="A diffusers pipeline, or tiny-sd3.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="What to generate.")] = None,
    prompts: PromptFile = None,
    lora: Lora = None,
    negative: Annotated[
        str,
        typer.Option(help="Negative prompt, unless a prompt of --prompts has one."),
    ] = "",
    guidance: Guidance = None,
    steps: NumSteps = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first image.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Images of each prompt.")] = 1,
    max_sequence_length: Tokens = None,
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for them.")] = Path(
        "samples"
    ),
    device: Device = "auto",
    rlg: Annotated[
        float | None, typer.Option(help="Strength of --lora (RLG): 0 is the base, 1 the LoRA.")
    ] = None,
    transfer: Annotated[
        str | None,
        typer.Option(
            metavar="PIPELINE",
            help="Add to MODEL what --lora changes in this smaller pipeline; --rlg is how much.",
        ),
    ] = None,
    best_of: Annotated[
        int | None,
        typer.Option(min=2, help="Seeds tried for each image; --reward chooses the best."),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Built-in name or module:attribute, for --best-of.")
    ] = None,
    args: Annotated[str | None, typer.Option(metavar="YAML", help="Its arguments.")] = None,
    revision: Revision = None,
    lora_alpha: LoraAlpha = None,
    refine: Annotated[
        bool, typer.Option("--refine", help="Reword prompts as the refiner of --lora's run does.")
    ] = False,
) -> None:
    """Generate images.

    Guidance, steps and text tokens default to those that the run of --lora was evaluated with, or
    else to the pipeline's own. --rlg at other strengths than 0 and 1 is a heuristic, exact only
    where the LoRA shifts the images' distribution without changing its shape; it takes two forwards
    a step. So does --transfer, of the smaller network, whose autoencoder has to be MODEL's; the
    LoRA's run then decides for that pipeline alone.

    Examples:

      flowrl sample tiny-sd3 "a red circle" "two stars" --count 4

      flowrl sample tiny-sd3 'the word "BALL"' --lora runs/quickstart --seed 7

      flowrl sample tiny-sd3 "a blue ring" --negative "a red ring" --guidance 3

      flowrl sample tiny-sd3 "a blue ring" --lora runs/quickstart --rlg 1.5

      flowrl sample tiny-flux "a blue ring" --transfer tiny-sd3 --lora runs/quickstart

      flowrl sample tiny-sd3 --prompts tiny:geneval:test --best-of 4 --reward geneval
    """
    from flowrl.prompts.records import PromptRecord, load_prompts

    records = [*(prompt or []), *(load_prompts(prompts) if prompts else [])]
    if not records:
        raise UserError(
            'Nothing to generate: give a prompt, as in flowrl sample tiny-sd3 "a red star".'
        )
    if lora is None and (rlg is not None or transfer or refine):
        raise UserError("--rlg, --transfer and --refine are about a LoRA: add --lora, as a run.")
    if (best_of is None) != (reward is None) or (args is not None and reward is None):
        raise UserError(
            "--best-of, --reward and its --args go together, as in --best-of 4 --reward ocr."
        )
    with starting():
        from flowrl.api import named_rewards
        from flowrl.api import refine as refine_prompts
        from flowrl.api import sample as sample_images
        from flowrl.evaluation.drawing import Drawing
        from flowrl.scoring.spec import closing

    judges = named_rewards([reward], arguments_of([reward], args and [args])) if reward else []

    if refine and lora is not None:
        records = [PromptRecord(uid=p, text=p) if isinstance(p, str) else p for p in records]
        records = refine_prompts(Path(lora), records, device=device)
        for record in records:
            typer.echo(f"{record.text} -> {record.encoded}")
    drawing = Drawing(
        model, lora=lora, lora_alpha=lora_alpha, negative=negative, guidance=guidance,
        steps=steps, max_sequence_length=max_sequence_length, device=device, rlg=rlg,
        transfer=transfer, revision=revision,
    )  # fmt: skip
    with closing(judges):
        images = sample_images(
            drawing, records, seed=seed, count=count, output_dir=output_dir,
            best_of=best_of or 1, reward=judges[0] if judges else None,
        )  # fmt: skip
    for path, score in images.items():
        typer.echo(f"{path}  {reward} {score:.4g}" if reward else path)


def score(
    images: Annotated[
        list[Path], typer.Argument(help="Images, folders of them, or GenEval's layout.")
    ],
    reward: Annotated[
        list[str], typer.Option(help="Built-in name or module:attribute; may be repeated.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Option(
            metavar="YAML", help="Arguments, as in '{mode: strict}'; one for each --reward."
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="The prompt of all the images.")] = "",
    prompts: PromptFile = None,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Ask this reward server instead; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score images with any reward.

    A folder may say its prompts itself: GenEval's layout (00000/metadata.jsonl beside
    00000/samples), or metadata.jsonl or metadata.csv with file_name and prompt. Otherwise
    prompts from a file belong to the images in the order of their names. Images of one prompt
    are one group, for rewards that compare them. A score that is missing or does not apply is
    shown as n/a; a line for each reward says why. Exits with 1 when there is no score at all.

    Examples:

      flowrl score samples --reward ocr --prompt 'the word "CAT"'

      flowrl score samples --reward ocr --args '{mode: strict}' --prompt 'the word "CAT"'

      flowrl score samples --reward pickscore --server http://127.0.0.1:8400

      flowrl score a.png b.png --reward ocr --reward my_package.mine:Sharpness --prompts two.txt
    """
    if prompt and prompts:
        raise UserError("Both --prompt and --prompts are given, expected one of them.")
    if twice := next((name for name in reward if reward.count(name) > 1), None):
        raise UserError(f"--reward {twice} is given twice, expected once: score them in turn.")
    with starting():
        from flowrl.api import score as score_images

    if server and args:
        raise UserError("--args are given with --server, which makes the reward: leave them out.")
    scored = score_images(
        images, reward, prompts or prompt or None, arguments_of(reward, args), server or ()
    )
    print_scores(scored.rows, scored.missing, scored.rows, reward, as_json=as_json)


def gallery(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run folder; or give --base and --lora.", show_default=False),
    ] = None,
    base: Annotated[str | None, typer.Option(help="A diffusers pipeline.")] = None,
    lora: Lora = None,
    prompts: PromptFile = None,
    count: Annotated[int, typer.Option(min=1, help="Pairs of images.")] = 24,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the first.")] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "-o", help="Folder for page and grid; default RUN/comparison."
        ),
    ] = None,
    revision: Revision = None,
    lora_alpha: LoraAlpha = None,
) -> None:
    """Compare base and aligned images of the same prompts and seeds on one page.

    Writes a self-contained index.html and grid.png.

    Examples:

      flowrl gallery runs/quickstart

      flowrl gallery --base tiny-sd3 --lora runs/quickstart --prompts tiny:ocr:test -o compare
    """
    if (run is None) == (base is None):
        raise UserError("Give either a run folder or --base, as in flowrl gallery runs/quickstart.")
    if base is not None and not (lora and prompts and output_dir):
        raise UserError("With --base, also give --lora, --prompts and --output-dir.")
    with starting():
        from flowrl.api import gallery as write_gallery

    page = write_gallery(
        run, base=base, lora=lora, prompts=prompts, count=count, seed=seed, output_dir=output_dir,
        revision=revision, lora_alpha=lora_alpha,
    )  # fmt: skip
    typer.echo(page)
