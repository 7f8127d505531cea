"""The `flowrl` program. torch and diffusers are imported by the commands that need them."""

import atexit
import gc
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from flowrl import __version__
from flowrl.cli import (
    audit,
    data,
    evaluation,
    export,
    info,
    init,
    plan,
    recipes,
    rewards,
    runs,
    sample,
    train,
    tree,
    ui,
    verify,
    vote,
)
from flowrl.cli._console import LogLines, print_error
from flowrl.errors import CODES, Interrupted, as_failure, exit_code
from flowrl.utils.stopping import at_once

app = typer.Typer(
    name="flowrl",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS = (  # in the order of the help
    train.train, recipes.recipes, init.init, runs.runs, data.collect, sample.sample, sample.score,
    sample.gallery, export.export, evaluation.evaluate, evaluation.benchmark, tree.tree, plan.plan,
    audit.audit, rewards.reward_check, rewards.reward_serve, data.prompts, ui.ui, info.explain,
    info.doctor, verify.verify, vote.vote,
)  # fmt: skip
TAKE_A_RECIPE = (train.train, data.collect, evaluation.evaluate, plan.plan, audit.audit, vote.vote)


def _help(command: Callable[..., object]) -> str:
    """Return a command's docstring with each paragraph on one line, to be wrapped by a terminal."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)


for _command in COMMANDS:
    app.command(
        help=_help(_command),
        context_settings=train.RECIPE_COMMAND if _command in TAKE_A_RECIPE else None,
    )(_command)


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
        bool, typer.Option("--debug", help="Show tracebacks; can be given after any command.")
    ] = False,
) -> None:
    """Align a text-to-image pipeline with reinforcement learning; get a LoRA for diffusers.

    Start here, no GPU and no download needed:

      flowrl train quickstart

      flowrl gallery runs/quickstart

      flowrl sample tiny-sd3 "two red stars" --lora runs/quickstart

    `flowrl doctor` checks the machine, `flowrl recipes` lists the recipes,
    `flowrl init` writes a new one.

    `flowrl train PRESET --print-config` shows every option, `flowrl explain KEY` its meaning.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program; errors are one sentence, a traceback only with --debug."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest = [word for word in words if word != "--debug"]
    if "--debug" not in words:
        quiet_libraries()
    # At its end a process would look for garbage among all that was imported, for a second.
    atexit.register(gc.freeze)
    report_errors(lambda: app(rest, prog_name="flowrl"), debug="--debug" in words)


def quiet_libraries() -> None:
    """Hide advice and warnings of libraries that are meant for developers."""
    for name in ("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):  # read when they are imported
        os.environ.setdefault(name, "error")
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=FutureWarning)


def report_errors(program: Callable[[], object], *, debug: bool) -> None:
    """Run a program; an error or a signal ends the process with one sentence and its exit code.

    Notes on the error, such as what was saved, follow. A traceback only with `debug`.
    """
    logging.basicConfig(handlers=[LogLines()], format="%(message)s")
    logging.getLogger("flowrl").setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        with at_once():
            # Flushed here, where a closed pipe can still be reported; not after an error, which is
            # the one to report.
            try:
                program()
            except SystemExit:
                sys.stdout.flush()
                raise
            sys.stdout.flush()
    except (Exception, Interrupted) as error:
        if debug:
            raise
        shown = error if isinstance(error, Interrupted) else as_failure(error)
        hints = [*getattr(error, "__notes__", ())]
        if shown is None:
            hints.append("This was not expected. Add --debug to see where it happened.")
        with suppress(OSError):  # of a stderr that is closed, too
            message = f"{type(error).__name__}: {error}" if shown is None else str(shown)
            print_error(message, "\n".join(hints))
        _end(exit_code(shown or error))


def _end(code: int) -> NoReturn:
    """End the process. Waiting for what is lost would go on in the threads of torch."""
    with suppress(OSError):
        sys.stdout.flush()
    if code == CODES["pipe"]:
        sys.stdout = open(os.devnull, "w")  # or the interpreter complains of its last flush
    if code == CODES["peer"] or os.environ.get("WORLD_SIZE", "1") != "1":
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
