"""`flowrl train` and `flowrl evaluate`: commands that take a recipe."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.cli._console import AsJson, LoraAlpha, print_table
from flowrl.cli.recipes import complete_recipe
from flowrl.errors import UserError

if TYPE_CHECKING:
    from flowrl.config import Config
    from flowrl.config.arguments import CommandArguments
    from flowrl.export.summary import TrainedRun

# Options that typer does not know reach the words, where `sort_arguments` sorts them.
RECIPE_COMMAND = {"ignore_unknown_options": True}

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|KEY=VALUE",
        help="A preset's name or a YAML file, then changes to it.",
        show_default=False,
        autocompletion=complete_recipe,
    ),
]


def recipe_request(words: Sequence[str] | None, example: str) -> "CommandArguments":
    """Sort the words of a command line into recipe and changes. Raises UserError without recipe."""
    from flowrl.config.arguments import sort_arguments

    request = sort_arguments(words or [])
    if not request.recipe:
        raise UserError(f"No recipe given: name a preset or a YAML file, as in {example}.")
    return request


def train(
    words: Words = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|latest|PATH",
            help="Continue the run in the folder from its newest checkpoint, or from this one. "
            "auto, the default, continues an unfinished run of the same recipe, and trains another "
            "recipe in the next number (runs/quickstart-2).",
        ),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="With --resume: go on although options differ that decide what is learned.",
        ),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every option with its value, and stop.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Rehearse the recipe on the tiny pipeline of its family, in a minute on a CPU.",
        ),
    ] = False,
    encode_only: Annotated[
        bool,
        typer.Option(
            "--encode-only",
            help="Encode the recipe's prompts into memory.prompt_cache, and stop: on any machine, "
            "with the text encoders alone.",
        ),
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="auto|N",
            help="Train on all GPUs of this machine (auto) or on so many, a process each. Without "
            "a GPU, N processes share the CPU.",
        ),
    ] = None,
) -> None:
    """Align a pipeline to a reward.

    The run folder it leaves loads as it is: pipe.load_lora_weights("runs/quickstart").

    Examples:

      flowrl train quickstart

      flowrl train quickstart optim.lr=1e-4 --output_dir runs/slow

      flowrl train my_recipe.yaml --prompts prompts.txt --reward ocr

      flowrl train quickstart --resume latest

      flowrl train --resume runs/quickstart

      flowrl train quickstart --print-config

      flowrl train sd3.5-medium-grpo-24gb --dry-run

      flowrl train flux.1-dev-nft-12gb --encode-only

      flowrl train flux.1-dev-grpo-80gb --gpus auto

    `flowrl explain KEY` says what an option means.

    Names from diffusers' training scripts (--learning_rate, --rank, --seed, ...) are understood.
    """
    from flowrl.config import config_yaml, load_config
    from flowrl.config.arguments import sort_arguments

    request = sort_arguments(words or [])
    resume = resume or request.resume
    config = load_config(*_recipe_to_train(request, resume))
    if print_config:
        typer.echo(config_yaml(config), nl=False)
        return
    if dry_run:
        _rehearse(config, resume)
        return
    if encode_only:
        from flowrl.api import encode

        folder = config.memory.prompt_cache
        print_table([row | {"folder": folder} for row in encode(config)])
        return
    if gpus is not None and _started(gpus, config, words or [], resume, accept_changes):
        return
    from flowrl.api import align, table
    from flowrl.training.resume import AUTO

    trained = align(config, resume=resume or AUTO, accept_changes=accept_changes)
    if trained.comparisons:
        print_table(table(trained.comparisons))
    if os.environ.get("RANK", "0") == "0":
        print_what_next(config, trained)


def print_what_next(config: "Config", trained: "TrainedRun") -> None:
    """Print where everything lies, and the two commands that most people want next."""
    found = {"LoRA": trained.lora, "gallery": trained.gallery, "model card": trained.card}
    for name, path in found.items():
        if path is not None:
            typer.echo(f"{name:<11}{path}")
    if trained.lora is not None:
        folder, pipeline = shlex.quote(str(trained.folder)), shlex.quote(config.pipeline.path)
        typer.echo(f'next       flowrl sample {pipeline} "a prompt of yours" --lora {folder}')
        typer.echo(f"           flowrl gallery {folder}")


def _started(
    gpus: str, config: "Config", words: Sequence[str], resume: str | None, accept_changes: bool
) -> bool:
    """Train in processes of their own and end as they do; return False if one will do: this one."""
    from flowrl.utils.launching import check_no_launcher, count_processes, run_processes

    check_no_launcher("--gpus")
    count, cpu = count_processes(gpus, device=config.pipeline.device)
    if count == 1:
        return False
    typer.echo(f"Starting {count} processes, {'which share the CPU' if cpu else 'a GPU each'}.")
    command = [sys.executable, "-m", "flowrl", "train", *words]
    command += [] if resume is None else ["--resume", resume]
    command += ["--accept-changes"] * accept_changes
    if code := run_processes(command, count, cpu=cpu):
        raise typer.Exit(code)
    return True


def _recipe_to_train(
    request: "CommandArguments", resume: str | None
) -> tuple[str | Path, list[str]]:
    """Return the recipe and its changes; without one the recipe of the run to resume."""
    if request.recipe:
        return request.recipe, request.overrides
    saved = saved_recipe(resume)
    # Where it lies now: the folder may have been moved since the recipe was written.
    return saved, [f"run.output_dir={json.dumps(str(saved.parent))}", *request.overrides]


def _rehearse(config: "Config", resume: str | None) -> None:
    """Run a small copy of a recipe in a temporary folder."""
    import tempfile

    from flowrl.api import align
    from flowrl.planning.dry_run import rehearse

    if resume is not None:
        raise UserError("--dry-run rehearses a recipe from its start: leave --resume out.")
    with tempfile.TemporaryDirectory() as folder:
        small = rehearse(config, folder)
        rows = [{"option": o, "recipe": real, "here": here} for o, real, here in small.replaced]
        print_table(rows)
        typer.echo("\nEverything else is the recipe's own.")
        align(small.config)
    typer.echo(
        f"The loop works: {small.config.run.iterations} iterations with "
        f"{config.objective.kind} on {config.rollout.tree.kind} trees. Nothing was kept."
    )


def saved_recipe(resume: str | None) -> Path:
    """Return the configuration that a run has saved, in or above the folder to resume from."""
    if resume in (None, "auto", "latest"):
        raise UserError(
            "No recipe given: name a preset (flowrl train quickstart), a YAML file, or a run to "
            "continue (--resume runs/quickstart)."
        )
    for folder in [Path(str(resume)), *Path(str(resume)).parents[:2]]:
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise UserError(f"There is no config.yaml in {resume} or above it: expected a run folder.")


def evaluate(
    words: Words = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN|FILE|HUB",
            help="A LoRA of any make, as a folder, a file or OWNER/NAME; may be repeated.",
        ),
    ] = None,
    lora_alpha: LoraAlpha = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "-o", help="Folder of the leaderboard, its images and scores."
        ),
    ] = None,
    per_prompt: Annotated[
        int, typer.Option(min=1, help="Leaderboard: images of each prompt; diversity needs 2.")
    ] = 2,
    as_deployed: Annotated[
        bool,
        typer.Option(
            "--as-deployed",
            help="Generate with pipe(prompt, ...): the pipeline's own scheduler and dtype.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Score a pipeline, with or without LoRAs, on a recipe's held-out prompts.

    With -o, or several LoRAs, base and all LoRAs are compared on the same prompts and noises, pair
    by pair, with Holm's correction: leaderboard as HTML, PNG and csv. Images and scores stay in the
    folder: an interrupted call goes on, and further LoRAs meet the base as it was drawn.

    Examples:

      flowrl evaluate quickstart

      flowrl evaluate quickstart --lora runs/quickstart evaluation.num_images=600

      flowrl evaluate quickstart --lora runs/quickstart evaluation.num_inference_steps=[8,28]

      flowrl evaluate quickstart-sana --lora runs/quickstart-sana --as-deployed

      flowrl evaluate quickstart --lora runs/a --lora runs/b -o leaderboard
    """
    from flowrl.config import load_config

    request = recipe_request(words, "flowrl evaluate quickstart")
    asked = ["evaluation.as_deployed=true"] if as_deployed else []
    config = load_config(request.recipe, [*request.overrides, *asked])
    given = lora or []
    if output_dir is not None or len(given) > 1:
        _compare(config, given, output_dir, lora_alpha, per_prompt, as_json)
        return
    from flowrl.api import evaluate as evaluate_pipeline

    rows = evaluate_pipeline(config, lora=given[0] if given else None, lora_alpha=lora_alpha)
    if rows:  # of several processes the first one has them
        print_table(rows, as_json=as_json)


def _compare(
    config: "Config",
    loras: Sequence[str],
    folder: Path | None,
    lora_alpha: float | None,
    per_prompt: int,
    as_json: bool,
) -> None:
    from flowrl.evaluation.contest import hold_contest
    from flowrl.evaluation.leaderboard import ranking, write_leaderboard

    if folder is None:
        raise UserError("Several LoRAs need a folder for images and scores: add -o leaderboard.")
    contest = hold_contest(config, loras, folder, per_prompt=per_prompt, lora_alpha=lora_alpha)
    typer.echo(write_leaderboard(contest, folder))
    print_table(ranking(contest), as_json=as_json)
    for line in (line for own in contest.contestants for line in own.missing):
        typer.echo(line, err=True)


# --- scripts/train_*.py, on each process that accelerate starts --------------------------------

FLAGS = ("--dry-run", "--print-config", "--accept-changes")  # of `flowrl train`


def launch(words: Sequence[str], *, family: str, recipe: str) -> None:
    """Run `flowrl train` for one family of pipelines, with `recipe` where the words name none.

    Raises UserError for a recipe of another family.
    """
    from flowrl.config import load_config
    from flowrl.config.arguments import sort_arguments

    rest = [word for word in words if word.replace("_", "-") not in FLAGS]
    flags = {word.replace("_", "-") for word in words if word not in rest}
    request = sort_arguments(rest)
    if not request.recipe and request.resume in (None, "auto", "latest"):
        rest, request = [recipe, *rest], sort_arguments([recipe, *rest])
    config = load_config(request.recipe or saved_recipe(request.resume), request.overrides)
    found = config.pipeline.backbone
    if found != family:
        script = "flowrl train" if ":" in found else f"scripts/train_{found}.py"
        raise UserError(
            f"{request.recipe or request.resume} is a recipe for {found}, but this script trains "
            f"{family}: take {script}, or a recipe such as {recipe}"
        )
    given = {flag: flag in flags for flag in FLAGS}
    train(
        rest,
        dry_run=given["--dry-run"],
        print_config=given["--print-config"],
        accept_changes=given["--accept-changes"],
    )
