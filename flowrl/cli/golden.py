"""`flowrl golden`: do rewards score here as they did where they were measured?"""

from pathlib import Path
from typing import Annotated

import typer

from flowrl.errors import UserError


def golden(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Rewards; none takes all with golden values."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Record what these rewards score here.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(metavar="JSON", help="Golden values; flowrl's own unless --write is given."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="With --write: allowed, as a share of the largest score.")
    ] = 0.003,
) -> None:
    """Compare the scores of rewards with golden values, measured with the real weights.

    Shows that another machine, another version or a change of the code gives the same scores. A
    reward without a golden value is shown as such and never as passed: those that download weights
    have none until they are measured with --write, which adds them to the file that --file names.

    ok agrees, !! does not, -- was not compared: no golden value yet, or weights are missing.
    Exits with 1 after a !!, and after a -- of a reward that was named.

    Examples:

      flowrl golden

      flowrl golden pickscore hpsv2

      flowrl golden pickscore --write --file golden.json
    """
    chosen = list(dict.fromkeys(names or []))
    if write and not (chosen and file):
        raise UserError(
            "--write records the rewards that are named, in the file that --file names: give both, "
            "as in flowrl golden ocr --write --file golden.json."
        )
    from flowrl.cli._console import print_findings, stop_unless_fine
    from flowrl.scoring.golden import PATH, compare_all, read_golden, recorded, write_golden

    path = file or PATH
    if file and not write and not file.exists():
        raise UserError(f"There is no file {file}; flowrl golden NAME --write --file makes one.")
    entries = read_golden(path)
    compared = compare_all(chosen, entries)
    if write:
        new = {c.finding.topic: recorded(c.measured, tolerance) for c in compared if c.measured}
        write_golden(path, entries | new)
        for name in new:
            typer.echo(f"recorded {name} in {path}")
        compared = [c for c in compared if not c.measured]
    print_findings(
        [c.finding for c in compared], max((len(c.finding.topic) for c in compared), default=0)
    )
    stop_unless_fine(
        {c.finding.topic: {c.finding.state} for c in compared},
        wrong="These rewards do not score as recorded",
        absent="These rewards were not compared" if chosen else None,
    )
