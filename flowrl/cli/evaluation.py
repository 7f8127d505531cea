"""`flowrl benchmark`: generate images of a benchmark's prompts and score them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.cli._console import (
    AsJson,
    Device,
    Lora,
    LoraAlpha,
    arguments_of,
    print_scores,
    print_table,
)
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.evaluation.drawing import DrawingOptions
    from flowrl.prompts.records import PromptRecord

Negative = Annotated[str, typer.Option(help="Negative prompt; acts if guidance > 1.")]
Guidance = Annotated[float | None, typer.Option(min=0, help="Guidance; 1 is none.")]
NumSteps = Annotated[int | None, typer.Option("--steps", min=1, help="Denoising steps.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="T5 text tokens.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of each prompt's first image.")]
PerPrompt = Annotated[int, typer.Option(min=1, help="Images of each prompt.")]
Output = Annotated[
    Path | None,
    typer.Option("--output-dir", "-o", help="Folder for the images; a second call resumes."),
]
Revision = Annotated[str | None, typer.Option(help="Of a pipeline from the Hub.")]


def benchmark(  # noqa: PLR0913  # an argument for each option
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="geneval, drawbench, or a file of prompts.")
    ],
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FOLDER",
            help="A diffusers pipeline; with geneval also a folder of images in its layout.",
        ),
    ],
    reward: Annotated[
        list[str] | None,
        typer.Option(help="Built-in name or module:attribute; may be repeated. Not for geneval."),
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Option(
            metavar="YAML",
            help="Arguments, one for each --reward. Of geneval's judge: "
            "'{detector: mask2former, colors: clip}' by default.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="geneval: evaluation_metadata.jsonl, or rows like it."),
    ] = None,
    output_dir: Output = None,
    per_prompt: PerPrompt = 4,
    lora: Lora = None,
    lora_alpha: LoraAlpha = None,
    negative: Negative = "",
    guidance: Guidance = None,
    steps: NumSteps = None,
    seed: Seed = 0,
    max_sequence_length: Tokens = None,
    revision: Revision = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Generate images of a benchmark's prompts, score them, and print means by kind of prompt.

    The folder has GenEval's layout: 00000/metadata.jsonl and 00000/samples/0000.png. Running the
    command again resumes it. drawbench comes from the Hub (sayakpaul/drawbench). A .jsonl file
    names the kind of a prompt under "tag" or "category".

    geneval applies the published rule and writes results.jsonl, a row an image: filename, tag,
    prompt, correct, reason. The table is six task accuracies and their mean. The published detector
    is mmdet's; the one of transformers used here gives different numbers.

    Examples:

      flowrl benchmark drawbench tiny-sd3 --reward clipscore -o images/drawbench

      flowrl benchmark prompts.txt tiny-sd3 --lora runs/quickstart --reward brightness -o images

      flowrl benchmark geneval stabilityai/stable-diffusion-3.5-medium \\
        --prompts evaluation_metadata.jsonl --guidance 4.5 --steps 40 -o images/sd3.5

      flowrl benchmark geneval images/sd3.5
    """
    from flowrl.evaluation.drawing import DrawingOptions

    drawing = DrawingOptions(
        model=model, lora=lora, lora_alpha=lora_alpha, negative=negative, guidance=guidance,
        steps=steps, max_sequence_length=max_sequence_length, device=device, revision=revision,
    )  # fmt: skip
    if name == "geneval":
        if reward:
            raise UserError("--reward is not for geneval, which has its own judge: leave it out.")
        _geneval(drawing, prompts, args, output_dir, per_prompt, seed, as_json)
        return
    if not reward:
        raise UserError("--reward is missing: name one, such as --reward clipscore.")
    if prompts is not None:
        raise UserError(f"--prompts is for geneval alone: {name} names the prompts already.")
    _any_prompts(drawing, name, reward, args, output_dir, per_prompt, seed, as_json)


def _geneval(
    drawing: "DrawingOptions",
    prompts: Path | None,
    args: list[str] | None,
    output_dir: Path | None,
    per_prompt: int,
    seed: int,
    as_json: bool,
) -> None:
    """Generate GenEval's images, unless the model is a folder of them, and judge them."""
    from flowrl.evaluation import benchmark as benchmarks

    judge = arguments_of(["geneval"], args)[0]
    folder = Path(drawing.model)
    if not folder.is_dir() or (folder / "model_index.json").is_file():
        records = benchmarks.geneval_prompts(prompts)
        judged = [(record.text, record.metadata) for record in records]
        benchmarks.geneval_judge(judge, judged, str(prompts))  # before hours of sampling
        folder = _drawn(drawing, records, output_dir, per_prompt, seed)
    elif prompts or drawing.lora:
        raise UserError(f"{folder} is a folder of images: leave --prompts and --lora out.")
    rows = benchmarks.judge_geneval(folder, judge)
    typer.echo(benchmarks.write_results(rows, folder / benchmarks.RESULTS))
    print_table(benchmarks.geneval_table(rows), as_json=as_json)
    failed = [row for row in rows if row["correct"] is None]
    if failed:
        typer.echo(
            f"{len(failed)} images have no verdict; the first, {failed[0]['filename']}: "
            f"{failed[0]['reason']}",
            err=True,
        )
    if len(failed) == len(rows):
        raise typer.Exit(1)


def _any_prompts(
    drawing: "DrawingOptions",
    name: str,
    reward: list[str],
    args: list[str] | None,
    output_dir: Path | None,
    per_prompt: int,
    seed: int,
    as_json: bool,
) -> None:
    """Generate images of any prompts, and score them with any rewards."""
    from flowrl.evaluation import benchmark as benchmarks
    from flowrl.scoring.spec import RewardSpec, load_reward

    records = benchmarks.benchmark_prompts(name)
    pairs = zip(reward, arguments_of(reward, args), strict=True)
    specs = [RewardSpec(name=r, reward=load_reward(r, its)) for r, its in pairs]
    folder = _drawn(drawing, records, output_dir, per_prompt, seed)
    scored = benchmarks.score_folder(folder, specs)
    typer.echo(folder / benchmarks.SCORES)
    table = benchmarks.kind_table(folder, scored.rows, reward)
    print_scores(table, scored.missing, scored.rows, reward, as_json=as_json)


def _drawn(
    drawing: "DrawingOptions",
    records: "list[PromptRecord]",
    output_dir: Path | None,
    per_prompt: int,
    seed: int,
) -> Path:
    from flowrl.evaluation.drawing import draw_prompts
    from flowrl.utils.files import locked_folder

    if output_dir is None:
        raise UserError("No folder for the images: add -o images/NAME.")
    with locked_folder(output_dir, "images"):
        return draw_prompts(drawing.build(), records, output_dir, per_prompt=per_prompt, seed=seed)
