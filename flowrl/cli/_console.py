"""Print tables, check results and errors; read options that several commands share."""

import json
import logging
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from flowrl.errors import CheckResult, UserError
from flowrl.utils.progress import SafeConsole, announced, open_console

MARKS = {"ok": "ok", "warning": "??", "missing": "--", "problem": "!!"}
STYLES = {"^(error:|!!)": "bold red", r"^(\?\?|--) ": "yellow", "^ok ": "green"}  # of beginnings

MAX_WORD = 20  # characters of a table's cell that no narrow screen breaks

Row = Mapping[str, object]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Lora = Annotated[
    str | None,
    typer.Option(
        metavar="RUN|FILE|HUB",
        help="LoRA to add: a run folder, a file, or a name on the Hub (OWNER/NAME).",
    ),
]
Guidance = Annotated[float | None, typer.Option(min=0, help="Guidance; 1 is none.")]
NumSteps = Annotated[int | None, typer.Option("--steps", min=1, help="Denoising steps.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="T5 text tokens.")]
Revision = Annotated[
    str | None, typer.Option(help="Of a pipeline from the Hub: a branch, tag or commit.")
]
LoraAlpha = Annotated[
    float | None, typer.Option(help="Alpha of a LoRA whose file has none. Default: its rank.")
]


def print_table(rows: Sequence[Row], *, as_json: bool = False, whole: str = "") -> None:
    """Print a line for each row, columns in the order of first appearance; or JSON lines.

    whole: the column whose cells are never broken, for names that people copy.
    """
    if as_json:
        for row in rows:
            print(json.dumps({name: _finite(value) for name, value in row.items()}, default=str))
        return
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        numeric = all(isinstance(row.get(name), (int, float, type(None))) for row in rows)
        words = [word for row in rows for word in _cell(row.get(name)).split()]
        table.add_column(
            Text(name),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=name == whole,
            # Narrow screens break cells between words, and inside of a word only where it is long.
            min_width=min(max(map(len, words), default=0), MAX_WORD),
        )
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in columns))
    SafeConsole().print(table)


def print_comparison(rows: Sequence[Row], *, as_json: bool = False) -> None:
    """Print scores with and without a LoRA, rows of `training.evaluate.table`, in 80 columns."""
    if as_json or "change" not in rows[0]:
        return print_table(rows, as_json=as_json)
    counts = [f"{row['images']} images of {row['prompts']} prompts" for row in rows]
    narrow = [
        {name: row[name] for name in ("reward", "base", "aligned", "change")}
        | {"95 % interval": f"{_cell(row['95% low'])} to {_cell(row['95% high'])}"}
        for row in rows
    ]
    print_table(narrow, whole="reward")
    for count in dict.fromkeys(counts):
        names = [str(r["reward"]) for r, c in zip(rows, counts, strict=True) if c == count]
        say(f"On {count}" + (f": {', '.join(names)}." if len(set(counts)) > 1 else "."))


def print_scores(
    rows: Sequence[Row],
    missing: Sequence[str],
    scored: Sequence[Mapping[str, object]],
    rewards: Sequence[str],
    *,
    as_json: bool = False,
) -> None:
    """Print a table about scores, then why some are missing; exit with 1 where all of them are.

    Args:
        rows: what is shown.
        missing: a line for each reward with missing scores.
        scored: a row an image, with a score under each name in `rewards`, NaN where it is missing.
    """
    print_table(rows, as_json=as_json)
    for line in missing:
        say(line, err=True)
    if all(_finite(row[name]) is None for row in scored for name in rewards):
        say("No image got a score.", err=True)
        raise typer.Exit(1)


def _finite(value: object) -> object:
    """Return the value, None for a missing score: JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: object) -> str:
    value = _finite(value)
    if value is None:
        return "n/a"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_checks(results: Iterable[CheckResult], width: int) -> None:
    """Print a mark, topic (padded to `width`) and detail for each result, and its remedy below."""
    for result in results:
        mark, space = MARKS[result.state], width + 6
        say(f"{mark}  {result.topic:<{width}}  {result.detail}", indent=space)
        if result.remedy:
            say(f"{'':<{space}}{result.remedy}", indent=space, style="dim")


def arguments_of(rewards: Sequence[str], texts: Sequence[str] | None) -> list[dict | None]:
    """Return each reward's arguments from --args, or None for each reward without --args.

    Raises UserError unless --args is given once for each reward, as a YAML mapping, or not at all.
    """
    if texts and len(texts) != len(rewards):
        raise UserError(f"--args was given {len(texts)} times for {len(rewards)} rewards.")
    return [mapping_of(text, "--args") for text in texts or ()] or [None] * len(rewards)


def mapping_of(text: str | None, option: str) -> dict | None:
    """Return the YAML mapping of an option, None without text. Raises UserError for another."""
    from flowrl.config.yaml12 import load_yaml

    value = load_yaml(text, option) if text else None
    if not isinstance(value, dict | None):
        raise UserError(f"{option} is {text!r}, expected names and values as in '{{name: value}}'.")
    return value


def say(text: str = "", *, err: bool = False, style: str = "", indent: int = 0) -> None:
    """Print sentences on stdout, or stderr; a terminal breaks them between words, and no path.

    indent: columns before the further lines of a line that is broken, where they are not its own.
    """
    console = open_console(stderr=err)
    if console.is_terminal:
        whole = textwrap.TextWrapper(
            console.width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        lines = []
        for line in text.split("\n"):
            whole.subsequent_indent = " " * (indent or len(line) - len(line.lstrip()))
            lines.append(whole.fill(line))
        text = "\n".join(lines)
    printed = Text(text, style)
    for start, color in STYLES.items():
        printed.highlight_regex(start, color)
    console.print(printed, soft_wrap=True)


def starting() -> AbstractContextManager[None]:
    """Show that a command begins, while its imports take seconds; of its processes the first."""
    return announced("starting", show=os.environ.get("RANK", "0") == "0")


def print_error(message: str, hint: str = "") -> None:
    """Print `error: message` on stderr, and a hint below."""
    say(f"error: {message}", err=True)
    if hint:
        say(hint, err=True, style="dim")


class LogLines(logging.Handler):
    """Prints log records on stderr as `say` does."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a closed stderr
            say(self.format(record), err=True)
