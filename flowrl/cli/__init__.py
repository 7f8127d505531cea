"""The `flowrl` program. torch and diffusers are imported by the commands that need them."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from flowrl import __version__
from flowrl.cli import audit as auditing
from flowrl.cli import bench as benching
from flowrl.cli import data as collecting
from flowrl.cli import data as prompting
from flowrl.cli import export as exporting
from flowrl.cli import info as looking
from flowrl.cli import plan as planning
from flowrl.cli import rewards as checking
from flowrl.cli import rewards as golden
from flowrl.cli import rewards as serving
from flowrl.cli import sample as images
from flowrl.cli import train as training
from flowrl.cli import tree as trees
from flowrl.errors import UserError

app = typer.Typer(
    name="flowrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings=training.RECIPE_COMMAND)(training.train)
app.command(context_settings=training.RECIPE_COMMAND)(collecting.collect)
app.command()(images.sample)
app.command()(images.score)
app.command()(images.gallery)
app.command()(exporting.export)
app.command(context_settings=training.RECIPE_COMMAND)(training.evaluate)
app.command()(trees.tree)
app.command(context_settings=training.RECIPE_COMMAND)(planning.plan)
app.command(context_settings=training.RECIPE_COMMAND)(auditing.audit)
app.command("reward-check")(checking.reward_check)
app.command("reward-serve")(serving.reward_serve)
app.command()(golden.golden)
app.command()(prompting.prompts)
app.command()(looking.explain)
app.command()(looking.doctor)
app.add_typer(benching.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flowrl {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; may stand after any command.")
    ] = False,
) -> None:
    """Align a text-to-image pipeline with reinforcement learning; get a LoRA for diffusers.

    Start here, no GPU and no download needed:

      flowrl train quickstart

      flowrl gallery runs/quickstart

      flowrl sample tiny-sd3 "two red stars" --lora runs/quickstart

    `flowrl doctor` checks the machine.

    `flowrl train PRESET --print-config` shows every option, `flowrl explain KEY` its meaning.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; errors are one sentence and exit code 1, a traceback only with --debug."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest = [word for word in words if word != "--debug"]
    explained(lambda: app(rest, prog_name="flowrl"), debug="--debug" in words)


def explained(program: Callable[[], object], *, debug: bool) -> None:
    """Run a program; an error ends the process with one sentence and code 1, unless `debug`."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("flowrl").setLevel(logging.INFO)
    try:
        program()
    except Exception as error:
        if debug:
            raise
        from flowrl.cli._console import print_error

        if isinstance(error, UserError):
            print_error(str(error))
        else:
            print_error(
                f"{type(error).__name__}: {error}",
                "This was not expected. Add --debug to see where it happened.",
            )
        sys.exit(1)
