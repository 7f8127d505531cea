"""Tables, findings and messages on the terminal, and what several commands ask of people."""

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.errors import CheckResult, UserError

MARKS = {
    "ok": ("ok", "green"),
    "warning": ("??", "yellow"),
    "missing": ("--", "yellow"),
    "problem": ("!!", "bold red"),
}

Row = Mapping[str, object]


def print_table(rows: Sequence[Row], *, as_json: bool = False) -> None:
    """One line for each row, columns in the order of first appearance; or a JSON object a line."""
    if as_json:
        for row in rows:
            print(json.dumps({name: _known(value) for name, value in row.items()}, default=str))
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        numeric = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in columns))
    Console(soft_wrap=not Console().is_terminal).print(table)


def _known(value: object) -> object:
    """The value, None for a score that is missing: JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: object) -> str:
    value = _known(value)
    if value is None:
        return "n/a"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_findings(findings: "Iterable[CheckResult]", width: int) -> None:
    """For each a mark, what about, what was found; below it what to do. width: of the topics."""
    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        mark, style = MARKS[finding.state]
        told = Text(f"  {finding.topic:<{width}}  {finding.detail}")
        console.print(Text(mark, style=style) + told)
        if finding.remedy:
            console.print(Text(f"    {'':<{width}}  {finding.remedy}", style="dim"))


def stop_unless_fine(
    states: Mapping[str, Collection[str]], *, wrong: str, absent: str | None
) -> None:
    """Raises UserError of one of two sentences with names: of what has a "problem", or else of
    what is "missing"; absent None: then that is fine."""
    for state, sentence in (("problem", wrong), ("missing", absent)):
        found = [name for name, its in states.items() if state in its]
        if found and sentence is not None:
            raise UserError(f"{sentence}: {', '.join(found)}.")


def arguments_of(rewards: Sequence[str], texts: Sequence[str] | None) -> list[dict | None]:
    """What --args give to each of the rewards, None where they give nothing.

    Raises UserError when there are more or fewer than rewards, and for what is no YAML mapping.
    """
    from flowrl.config.load import load_yaml

    if texts and len(texts) != len(rewards):
        raise UserError(f"--args was given {len(texts)} times for {len(rewards)} rewards.")
    found = [load_yaml(text, "--args") for text in texts or ()]
    for text, its in zip(texts or (), found, strict=True):
        if not isinstance(its, dict | None):
            raise UserError(
                f"--args is {text!r}, expected names and values, as in '{{mode: strict}}'."
            )
    return found or [None] * len(rewards)


def token_of(variable: str | None) -> str | None:
    """What the environment variable of --token-env holds. Raises UserError when it is not set."""
    if variable is not None and not os.environ.get(variable):
        raise UserError(f"--token-env names {variable}, and the environment has no such variable.")
    return os.environ[variable] if variable else None


def print_error(message: str, hint: str = "") -> None:
    """`error: message` on stderr, whole lines, nothing in it read as markup."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("error: ", style="bold red") + Text(message))
    if hint:
        console.print(Text(hint, style="dim"))
