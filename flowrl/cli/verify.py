"""`flowrl verify`: is a file or a run what it should be?"""

from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli._console import print_checks, starting
from flowrl.errors import UserError

WIDTH = 14  # of topics


def verify(
    path: Annotated[
        Path, typer.Argument(metavar="RUN|STORE|LORA", help="A folder, or a LoRA file.")
    ],
) -> None:
    """Check the files of a run, an offline data set or a LoRA: intact, finite and consistent?

    The exit status is 1 if a check fails.

    Examples:

      flowrl verify runs/quickstart

      flowrl verify my_lora.safetensors
    """
    with starting():
        from flowrl.training.verify import verify as check

    wrong = []
    for result in check(path):
        print_checks([result], WIDTH)
        if result.state == "problem":
            wrong.append(result.topic)
    if wrong:
        names = ", ".join(dict.fromkeys(wrong))
        raise UserError(f"{len(wrong)} checks failed: {names}; see the lines marked !!.")
