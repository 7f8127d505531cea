"""`flowrl train`, and the words of every command that takes a recipe."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrl.cli._console import print_comparison, print_table, say, starting
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
        help="Preset or YAML file, followed by options to change.",
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
            help="auto (default): resume an unfinished run of the same recipe; start another "
            "recipe in a new folder (runs/quickstart-2). latest: the newest checkpoint. PATH: a "
            "run folder or a checkpoint.",
        ),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="With --resume: resume although options that affect results have changed.",
        ),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every option with its value and exit.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Run the whole recipe on a small random pipeline, in about a minute on a CPU.",
        ),
    ] = False,
    encode_only: Annotated[
        bool,
        typer.Option(
            "--encode-only",
            help="Encode the prompts into memory.prompt_cache and exit; loads only the text "
            "encoders.",
        ),
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="auto|N",
            help="GPUs of this machine to use, one process each; auto uses all. "
            "Without a GPU, N processes share the CPU.",
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Train without a GPU, where that takes long."),
    ] = False,
) -> None:
    """Align a pipeline to a reward.

    diffusers loads the run folder as a LoRA: pipe.load_lora_weights("runs/quickstart").

    Examples:

      flowrl train quickstart

      flowrl train quickstart optim.lr=1e-4 run.output_dir=runs/slow

      flowrl train my_recipe.yaml --prompts prompts.txt --reward ocr

      flowrl train quickstart --resume latest

      flowrl train --resume runs/quickstart

      flowrl train quickstart --print-config

      flowrl train sd3.5-medium-grpo-24gb --dry-run

      flowrl train flux.1-dev-nft-12gb --encode-only

      flowrl train flux.1-dev-grpo-80gb --gpus auto

    `flowrl explain KEY` explains an option.
    """
    from flowrl.config import config_yaml, load_config
    from flowrl.config.arguments import sort_arguments

    request = sort_arguments(words or [])
    if request.recipe:
        config = load_config(request.recipe, request.overrides)
    else:  # where it lies now: the folder may have been moved since the recipe was written
        saved = saved_recipe(resume)
        moved = f"run.output_dir={json.dumps(str(saved.parent))}"
        config = load_config(saved, [moved, *request.overrides])
    if print_config:
        typer.echo(config_yaml(config), nl=False)
        return
    if dry_run:
        _rehearse(config, resume)
        return
    if encode_only:
        with starting():
            from flowrl.api import encode

        folder = config.memory.prompt_cache
        print_table([row | {"folder": folder} for row in encode(config)])
        return
    with starting():
        from flowrl.api import align, table
        from flowrl.planning.machine import check_machine
        from flowrl.training.resume import AUTO
        from flowrl.utils.launching import end_with_launcher

        if os.environ.get("RANK", "0") == "0":
            check_machine(config, insist=yes)
    words = [*(words or []), *["--yes"] * yes]
    if gpus is not None and _started(gpus, config, words, resume, accept_changes):
        return
    end_with_launcher()
    trained = align(config, resume=resume or AUTO, accept_changes=accept_changes)
    if trained.comparisons:
        print_comparison(table(trained.comparisons))
    if os.environ.get("RANK", "0") == "0":
        print_what_next(config, trained)


def print_what_next(config: "Config", trained: "TrainedRun") -> None:
    """Print why the run stopped early, the paths of the results, and the next two commands."""
    if trained.stopped:
        say(trained.stopped)
    paths = {"LoRA": trained.lora, "gallery": trained.gallery, "model card": trained.card}
    for name, path in paths.items():
        if path is not None:
            typer.echo(f"{name:<11}{path}")
    if trained.lora is not None:
        folder, pipeline = shlex.quote(str(trained.folder)), shlex.quote(config.pipeline.path)
        typer.echo(f'next       flowrl sample {pipeline} "a prompt of yours" --lora {folder}')
        if config.held_out is not None:
            typer.echo(f"           flowrl gallery {folder}")


def _started(
    gpus: str, config: "Config", words: Sequence[str], resume: str | None, accept_changes: bool
) -> bool:
    """Train in new processes and exit with their code; return False if one process is enough."""
    from flowrl.utils.launching import check_no_launcher, count_processes, run_processes

    check_no_launcher("--gpus")
    count, cpu = count_processes(gpus, device=config.pipeline.device)
    if count == 1:
        return False
    say(f"Starting {count} processes, {'which share the CPU' if cpu else 'a GPU each'}.")
    command = [sys.executable, "-m", "flowrl", "train", *words]
    command += [] if resume is None else ["--resume", resume]
    command += ["--accept-changes"] * accept_changes
    if code := run_processes(command, count, cpu=cpu):
        raise typer.Exit(code)
    return True


def _rehearse(config: "Config", resume: str | None) -> None:
    """Run a small copy of the recipe in a temporary folder, which is removed."""
    import tempfile

    with starting():
        from flowrl.api import align
        from flowrl.config.yaml12 import flow_yaml
        from flowrl.planning.dry_run import rehearse

    if resume is not None:
        raise UserError("--dry-run rehearses a recipe from its start: leave --resume out.")
    with tempfile.TemporaryDirectory() as folder:
        small = rehearse(config, folder)
        rows = [
            {"option": name, "recipe": flow_yaml(real), "here": flow_yaml(here)}
            for name, (real, here) in small.replaced.items()
        ]
        print_table(rows)
        say("\nAll other options are those of the recipe.")
        align(small.config)
    say(
        f"The loop works: {small.config.run.iterations} iterations with "
        f"{config.objective.kind} on {config.rollout.tree.kind} trees. Nothing was saved."
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
