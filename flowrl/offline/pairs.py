"""Read pairs of images of which one is preferred, from any table with a map of its columns.

.jsonl and .json files are read here, everything else (.parquet, .csv, folders, `hf:NAME:SPLIT`) by
`datasets`. The map names the columns of the prompt and of the two images, {prompt, chosen,
rejected}, or of two images and a label, {prompt, first, second, label}, where label 1 prefers the
first and 0 the second. A nested column is written with dots: supervision.chosen.media.0.path.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, records_of
from flowrl.prompts.sources import (
    HUB,
    check_row,
    dataset_errors,
    file_rows,
    is_json,
    open_table,
    split_name,
)
from flowrl.utils.digests import digest, digest_of_file
from flowrl.utils.untrusted import read_bytes

CHOSEN = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
LABELLED = ("prompt", "first", "second", "label")
Columns = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Cell:
    """An image in a table: a path relative to the table, or an encoded image, read when needed."""

    table: Any  # of rows by number
    row: int
    column: str
    folder: Path

    def open(self) -> Image.Image:
        """Raises OSError, or another error of Pillow, where there is no image."""
        value = _value(self.table[self.row], self.column)
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, str) and value:
            value = read_bytes(self.folder / value)
        if not isinstance(value, bytes):
            raise OSError("it is neither a path nor an image")
        return Image.open(io.BytesIO(value))

    def __str__(self) -> str:
        value = _value(self.table[self.row], self.column)
        return str(self.folder / value) if isinstance(value, str) else self.column


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and two images."""

    record: PromptRecord
    chosen: Cell
    rejected: Cell
    where: str  # file and line or row, for errors


def read_pairs(source: str, columns: Columns | None = None) -> tuple[list[Pair], list[str]]:
    """Read pairs; return them, and why rows were left out.

    Rows without a prompt or a decision (a tie, no label) are left out. Other columns become
    metadata. Raises UserError for a source that is missing, empty or malformed; whether images
    exist is seen when they are opened.
    """
    columns = columns or CHOSEN
    if set(columns) not in (set(CHOSEN), set(LABELLED)):
        raise UserError(
            f"--columns names {', '.join(columns)}, expected {', '.join(CHOSEN)}, or "
            f"{', '.join(LABELLED)}"
        )
    read = _read_json if Path(source).suffix.lower() in (".jsonl", ".json") else _read_table
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    fields, images, left_out = [], [], []
    for number, (where, row, table) in enumerate(read(source, columns)):
        names, reason = _decide(row, columns, where)
        if names is None:
            left_out.append(f"{where}: {reason}")
            continue
        used = {column.split(".")[0] for column in columns.values()}
        rest = {k: v for k, v in row.items() if k not in used and k not in columns.values()}
        prompt = _value(row, columns["prompt"])
        fields.append(check_row(rest | {"prompt": prompt}, where))
        images.append((where, *(Cell(table, number, name, folder) for name in names)))
    if not fields:
        raise UserError(
            f"{source} holds no decided pair" + (f"; {left_out[0]}" if left_out else "")
        )
    pairs = [
        Pair(record=record, chosen=chosen, rejected=rejected, where=where)
        for record, (where, chosen, rejected) in zip(records_of(fields), images, strict=True)
    ]
    return pairs, left_out


def pairs_digest(source: str, columns: Columns | None = None) -> str:
    """Return what identifies a file, the files of a folder, or a Hub data set by its name."""
    path, parts = Path(source), [repr(sorted((columns or CHOSEN).items())), source]
    if path.exists():
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        parts[1:] = [f"{file.relative_to(path)} {digest_of_file(file)}" for file in files]
    return digest("\n".join(parts).encode())


def _decide(
    row: Mapping[str, Any], columns: Columns, where: str
) -> tuple[tuple[str, str] | None, str]:
    """Return the columns of the chosen and the rejected image, or None and why there are none.

    Raises UserError for a row without a column.
    """
    for column in columns.values():
        if _value(row, column, missing := object()) is missing:
            raise UserError(
                f"{where}: has {', '.join(row) or 'no columns'}, expected {column!r}: name the "
                "columns, as in --columns '{prompt: caption, chosen: path1, rejected: path2}'"
            )
    if _value(row, columns["prompt"]) is None:
        return None, f"{columns['prompt']} is empty"
    if "chosen" in columns:
        return (columns["chosen"], columns["rejected"]), ""
    label = _value(row, columns["label"])
    if label not in (0, 1):
        return None, f"{columns['label']} is {label}, neither 0 nor 1"
    order = ("first", "second") if label else ("second", "first")
    return (columns[order[0]], columns[order[1]]), ""


def _value(row: Any, column: str, missing: Any = None) -> Any:
    """Return the value of a column, in which dots lead into objects and lists."""
    if isinstance(row, Mapping) and column in row:
        return row[column]
    for part in column.split("."):
        try:
            row = row[int(part)] if isinstance(row, list) else row[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return missing
    return row


def _read_json(source: str, columns: Columns) -> Iterator[tuple[str, dict, Any]]:
    """Yield where a row is, the row, and all rows."""
    table = list(file_rows(Path(source), "pairs"))
    rows = [row for _, row in table]
    for where, row in table:
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object")
        yield where, row, rows


def _read_table(source: str, columns: Columns) -> Iterator[tuple[str, dict, Any]]:
    """Yield the rows of a table without its images, which stay in the file; and the table."""
    place, split, _ = split_name(source)
    with dataset_errors(f"cannot read pairs {source}"):
        table = open_table(place, split, hub=source.startswith(HUB))
        kinds = {name: type(kind) for name, kind in table.features.items()}
        for name in (name for name, kind in kinds.items() if kind.__name__ == "Image"):
            table = table.cast_column(name, kinds[name](decode=False))
    # What JSON cannot hold, such as dates, is no metadata.
    other = [name for name, kind in table.features.items() if not is_json(kind)]
    images = {column.split(".")[0] for column in columns.values()} & {*other}
    for number, row in enumerate(table.remove_columns(other)):
        plain = {k: v for k, v in row.items() if v is not None or k in columns.values()}
        yield f"{source}, row {number + 1}", plain | dict.fromkeys(images), table
