"""`flowrl evaluate` and `flowrl benchmark`: score a pipeline on held-out prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    print_comparison,
    print_scores,
    print_table,
    say,
    starting,
)
from flowrl.cli.train import Words, recipe_request
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.scoring.spec import RewardSpec


def evaluate(
    words: Words = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN|FILE|HUB",
            help="LoRA to evaluate: a run folder, a file or OWNER/NAME; may be repeated.",
        ),
    ] = None,
    lora_alpha: LoraAlpha = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Folder for the leaderboard and its scores."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a pipeline, with or without LoRAs, on a recipe's held-out prompts.

    With -o, a leaderboard (HTML, csv) compares the base and all LoRAs in pairs, on the same
    prompts and noise, with Holm's correction. Scores stay in the folder: the same command resumes,
    and LoRAs can be added later.

    Examples:

      flowrl evaluate quickstart

      flowrl evaluate quickstart --lora runs/quickstart evaluation.num_images=600

      flowrl evaluate quickstart --lora runs/quickstart evaluation.num_inference_steps=[8,28]

      flowrl evaluate quickstart-sana --lora runs/quickstart-sana evaluation.as_deployed=true

      flowrl evaluate quickstart --lora runs/a --lora runs/b -o leaderboard
    """
    from flowrl.config import load_config

    request = recipe_request(words, "flowrl evaluate quickstart")
    config, loras = load_config(request.recipe, request.overrides), lora or []
    if output_dir is None and len(loras) > 1:
        raise UserError("Several LoRAs need a folder for their scores: add -o leaderboard.")
    if output_dir is not None:
        with starting():
            from flowrl.evaluation.comparison import compare_loras
            from flowrl.evaluation.leaderboard import (
                missing,
                ranking,
                write_leaderboard,
            )

        comparison = compare_loras(config, loras, output_dir, lora_alpha=lora_alpha)
        typer.echo(write_leaderboard(comparison, output_dir))
        print_table(ranking(comparison), as_json=as_json)
        for line in missing(comparison):
            typer.echo(line, err=True)
        return
    with starting():
        from flowrl.api import evaluate as evaluate_pipeline

    rows = evaluate_pipeline(config, lora=loras[0] if loras else None, lora_alpha=lora_alpha)
    if rows:  # with several processes, only the first has them
        print_comparison(rows, as_json=as_json)


def benchmark(  # noqa: PLR0913  # an argument for each option
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="geneval, geneval2, dpg, oneig, t2i_compbench, wise, drawbench, partiprompts, or "
            "a file of prompts.",
        ),
    ],
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|FOLDER",
            help="A diffusers pipeline, or a folder of images in GenEval's layout to score.",
        ),
    ],
    reward: Annotated[
        list[str] | None,
        typer.Option(help="Built-in name or module:attribute; may be repeated."),
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Option(
            metavar="YAML",
            help="Arguments, one for each --reward, or of the benchmark's judge: '{server: {model: "
            "NAME}}', for geneval '{detector: mask2former, colors: clip}' by default.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE|FOLDER", help="The file that the benchmark's authors publish."),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Folder for the images; a second call resumes."),
    ] = None,
    per_prompt: Annotated[int, typer.Option(min=1, help="Images of each prompt.")] = 4,
    lora: Lora = None,
    lora_alpha: LoraAlpha = None,
    negative: Annotated[str, typer.Option(help="Negative prompt; acts if guidance > 1.")] = "",
    guidance: Guidance = None,
    steps: NumSteps = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of each prompt's first image.")] = 0,
    max_sequence_length: Tokens = None,
    revision: Revision = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Generate images of a benchmark's prompts, score them, and print means by kind of prompt.

    The folder has GenEval's layout: 00000/metadata.jsonl and 00000/samples/0000.png. Running the
    command again resumes it. drawbench comes from the Hub (sayakpaul/drawbench) unless --prompts
    has it. A .jsonl file names the kind of a prompt under "tag" or "category".

    geneval applies the published rule, 0 or 1 an image. The table has the accuracy of its six
    kinds, and their mean in the last row. The published detector is mmdet's; the one of
    transformers used here gives different numbers.

    Examples:

      flowrl benchmark drawbench tiny-sd3 --reward clipscore -o images/drawbench

      flowrl benchmark prompts.txt tiny-sd3 --lora runs/quickstart --reward brightness -o images

      flowrl benchmark geneval stabilityai/stable-diffusion-3.5-medium \\
        --prompts evaluation_metadata.jsonl --guidance 4.5 --steps 40 -o images/sd3.5

      flowrl benchmark geneval images/sd3.5
    """
    with starting():
        from flowrl.evaluation import benchmark as benchmarks
        from flowrl.evaluation.drawing import Drawing, draw_prompts
        from flowrl.scoring.spec import check_evaluation
        from flowrl.utils.files import locked_folder

    published = benchmarks.PUBLISHED.get(name)
    if prompts is not None and published is None:
        raise UserError(f"--prompts is for a benchmark's name: {name} names the prompts already.")
    specs = _judges(name, reward, args)
    rewards = [spec.name for spec in specs]
    folder = Path(model)
    if not folder.is_dir() or (folder / "model_index.json").is_file():
        records = benchmarks.benchmark_prompts(name, prompts)
        if published and len(records) != published.count:
            words = f"{len(records)} prompts of {published.count}: not the published number."
            say(f"{name} has {words}", err=True)
        check_evaluation(specs, records)
        if output_dir is None:
            raise UserError("No folder for the images: add -o images/NAME.")
        folder = output_dir
        with locked_folder(folder, "images"):
            drawing = Drawing(
                model, lora=lora, lora_alpha=lora_alpha, negative=negative, guidance=guidance,
                steps=steps, max_sequence_length=max_sequence_length, device=device,
                revision=revision,
            )  # fmt: skip
            draw_prompts(drawing, records, folder, per_prompt=per_prompt, seed=seed)
    elif prompts or lora:
        raise UserError(f"{folder} is a folder of images: leave --prompts and --lora out.")
    scored = benchmarks.score_folder(folder, specs)
    typer.echo(folder / benchmarks.SCORES)
    table = benchmarks.kind_table(folder, scored.rows, rewards)
    print_scores(table, scored.missing, scored.rows, rewards, as_json=as_json)


def _judges(name: str, reward: list[str] | None, args: list[str] | None) -> "list[RewardSpec]":
    """Return the rewards that were named, or the judge of a benchmark, under its name."""
    from flowrl.api import named_rewards
    from flowrl.evaluation.published import PUBLISHED
    from flowrl.scoring.spec import RewardSpec, load_reward

    published = PUBLISHED.get(name)
    arguments = arguments_of(reward or [name], args)
    if reward:
        return named_rewards(reward, arguments)
    if published and published.judge:
        judge, values = published.judge, {**published.args, **(arguments[0] or {})}
        if name == "geneval":  # no other mode is the benchmark
            values["mode"] = published.args["mode"]
        return [RewardSpec(name=name, reward=load_reward(judge, values))]
    raise UserError("--reward is missing: name one, such as --reward clipscore.")
