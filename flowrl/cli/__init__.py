"""The `flowrl` program. torch and diffusers are imported by the commands that need them."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from flowrl import __version__
from flowrl.cli import audit, bench, data, export, info, plan, rewards, sample, train, tree
from flowrl.cli._console import print_error
from flowrl.errors import UserError

OLD_FLAGS = {"--picture": "--image", "--pictures": "--images"}  # still understood

app = typer.Typer(
    name="flowrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(context_settings=train.RECIPE_COMMAND)(train.train)
app.command(context_settings=train.RECIPE_COMMAND)(data.collect)
app.command()(sample.sample)
app.command()(sample.score)
app.command()(sample.gallery)
app.command()(export.export)
app.command(context_settings=train.RECIPE_COMMAND)(train.evaluate)
app.command()(tree.tree)
app.command(context_settings=train.RECIPE_COMMAND)(plan.plan)
app.command(context_settings=train.RECIPE_COMMAND)(audit.audit)
app.command("reward-check")(rewards.reward_check)
app.command("reward-serve")(rewards.reward_serve)
app.command()(rewards.golden)
app.command()(data.prompts)
app.command()(info.explain)
app.command()(info.doctor)
app.add_typer(bench.app, name="bench")


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
    named = (word.partition("=") for word in words if word != "--debug")
    rest = [OLD_FLAGS.get(flag, flag) + equals + value for flag, equals, value in named]
    report_errors(lambda: app(rest, prog_name="flowrl"), debug="--debug" in words)


def report_errors(program: Callable[[], object], *, debug: bool) -> None:
    """Run a program; an error ends the process with one sentence and code 1, unless `debug`."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("flowrl").setLevel(logging.INFO)
    try:
        program()
    except Exception as error:
        if debug:
            raise
        if isinstance(error, UserError):
            print_error(str(error))
        else:
            hint = "This was not expected. Add --debug to see where it happened."
            print_error(f"{type(error).__name__}: {error}", hint)
        sys.exit(1)
