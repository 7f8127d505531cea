"""`flowrl geneval` and `flowrl benchmark`: draw the prompts of a benchmark and judge them."""

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
    Path | None, typer.Option("--output-dir", "-o", help="Folder to draw into, or go on in.")
]
Revision = Annotated[str | None, typer.Option(help="Of a pipeline from the Hub.")]


def geneval(  # noqa: PLR0913  # an argument for each option
    source: Annotated[
        str,
        typer.Argument(metavar="FOLDER|MODEL", help="Images in GenEval's layout, or what draws."),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="GenEval's evaluation_metadata.jsonl, or rows like it."),
    ] = None,
    args: Annotated[
        str | None,
        typer.Option(
            metavar="YAML",
            help="Of the judge; default '{detector: mask2former, colors: clip}'.",
        ),
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
    """Draw GenEval's prompts and judge them as published, or judge a folder that anybody drew.

    The folder has GenEval's own layout: 00000/metadata.jsonl and 00000/samples/0000.png. Writes
    results.jsonl there (a row an image: filename, tag, prompt, correct, reason) and prints six task
    accuracies and their mean. A drawing that was interrupted goes on. The published detector is
    mmdet's; that of transformers gives other numbers: see flowrl calibrate.

    Examples:

      flowrl geneval images/sd3.5

      flowrl geneval stabilityai/stable-diffusion-3.5-medium --prompts evaluation_metadata.jsonl \\
        --guidance 4.5 --steps 40 -o images/sd3.5

      flowrl geneval tiny-sd3 --prompts prompts.jsonl --args '{detector: tiny}' -o images/tiny
    """
    from flowrl.evaluation import benchmark
    from flowrl.evaluation.drawing import DrawingOptions

    judge = arguments_of(["geneval"], [args] if args else None)[0]
    folder = Path(source)
    if not folder.is_dir() or (folder / "model_index.json").is_file():
        records = benchmark.geneval_prompts(prompts)
        asked = [(record.text, record.metadata) for record in records]
        benchmark.geneval_judge(judge, asked, str(prompts))  # before hours of drawing
        drawing = DrawingOptions(
            model=source, lora=lora, lora_alpha=lora_alpha, negative=negative, guidance=guidance,
            steps=steps, max_sequence_length=max_sequence_length, device=device, revision=revision,
        )  # fmt: skip
        folder = _drawn(drawing, records, output_dir, per_prompt, seed)
    elif prompts or lora:
        raise UserError(f"{source} is a folder of images: leave --prompts and --lora out.")
    rows = benchmark.judge_geneval(folder, judge)
    typer.echo(benchmark.write_results(rows, folder / benchmark.RESULTS))
    print_table(benchmark.geneval_table(rows), as_json=as_json)
    failed = [row for row in rows if row["correct"] is None]
    if failed:
        typer.echo(
            f"{len(failed)} images have no verdict; the first, {failed[0]['filename']}: "
            f"{failed[0]['reason']}",
            err=True,
        )
    if len(failed) == len(rows):
        raise typer.Exit(1)


def benchmark(  # noqa: PLR0913  # an argument for each option
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="drawbench, or a file of prompts.")
    ],
    model: Annotated[str, typer.Argument(help="A diffusers pipeline, or tiny-sd3.")],
    reward: Annotated[
        list[str], typer.Option(help="Built-in name or module:attribute; may be repeated.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Option(metavar="YAML", help="Arguments; one for each --reward."),
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
    """Draw the prompts of a benchmark and score them; print the means of each kind of prompt.

    The folder has GenEval's layout, so that flowrl score reads it with other rewards. drawbench
    is fetched from the Hub (sayakpaul/drawbench); a .jsonl file tells kinds by "tag" or "category".

    Examples:

      flowrl benchmark drawbench tiny-sd3 --reward clipscore -o images/drawbench

      flowrl benchmark prompts.txt tiny-sd3 --lora runs/quickstart --reward brightness -o images/own
    """
    from flowrl.evaluation import benchmark as benchmarks
    from flowrl.evaluation.drawing import DrawingOptions
    from flowrl.scoring.spec import RewardSpec, load_reward

    records = benchmarks.benchmark_prompts(name)
    given = zip(reward, arguments_of(reward, args), strict=True)
    specs = [RewardSpec(name=r, reward=load_reward(r, its)) for r, its in given]
    drawing = DrawingOptions(
        model=model, lora=lora, lora_alpha=lora_alpha, negative=negative, guidance=guidance,
        steps=steps, max_sequence_length=max_sequence_length, device=device, revision=revision,
    )  # fmt: skip
    folder = _drawn(drawing, records, output_dir, per_prompt, seed)
    scored = benchmarks.score_folder(folder, specs)
    typer.echo(folder / benchmarks.SCORES)
    table = benchmarks.kind_table(folder, scored.rows, reward)
    print_scores(table, scored.missing, scored.rows, reward, as_json=as_json)


def calibrate(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A detector (mask2former, tiny), results.jsonl, or a server's URL.",
        ),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    images: Annotated[Path, typer.Argument(help="A folder in GenEval's layout.")],
    args: Annotated[
        list[str] | None,
        typer.Option(metavar="YAML", help="Of the reward geneval, for A and then B."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report how far two judges of GenEval agree on the same images, task by task.

    Figures by two detectors compare only as far as these agree. The published detector's verdicts
    come from its own results.jsonl, or from scripts/servers/geneval_mmdet.py in mode official.

    Examples:

      flowrl calibrate mask2former results.jsonl images/sd3.5

      flowrl calibrate mask2former http://127.0.0.1:8400 images/sd3.5
    """
    from flowrl.evaluation.calibrate import agreement, verdicts

    given = arguments_of(["A", "B"], args)
    found = [
        verdicts(judge, images, its) for judge, its in zip((first, second), given, strict=True)
    ]
    print_table(agreement(images, *found), as_json=as_json)


def _drawn(
    drawing: "DrawingOptions",
    records: "list[PromptRecord]",
    output_dir: Path | None,
    per_prompt: int,
    seed: int,
) -> Path:
    from flowrl.evaluation.drawing import draw_prompts

    if output_dir is None:
        raise UserError("A folder is needed to draw into: add -o images/NAME.")
    return draw_prompts(drawing.build(), records, output_dir, per_prompt=per_prompt, seed=seed)
