"""Tables and messages on the terminal."""

import json
import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def print_error(message: str, hint: str = "") -> None:
    """`error: message` on stderr, whole lines, nothing in it read as markup."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("error: ", style="bold red") + Text(message))
    if hint:
        console.print(Text(hint, style="dim"))
