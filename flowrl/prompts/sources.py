"""Read prompts from text files, tables, data sets and the tiny world. Rows are dicts.

Text and JSON lines are not read by `datasets`: it gives a column one type, so 2024-01-01 becomes a
date and 2 becomes 2.0, prompts change their uids, and errors lose their line numbers.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.utils.untrusted import check_regular, parse_json, read_text

TINY, HUB = "tiny:", "hf:"
COLUMNS = ("prompt", "text", "caption", "prompts", "prompt_en")  # the first of these, in any case
WITH_COLUMN = re.compile(r"(.+\.(?:jsonl|json|csv|tsv)):([^:/\\]+)", re.IGNORECASE)
MAX_FILE = 2**30  # bytes of a file of prompts
JSON_TYPES = ("string", "large_string", "bool", "int", "uint", "float", "null")  # Arrow's names


def read_rows(source: str | Path) -> Iterator[dict]:
    """Yield the rows of a source (see `records.load_prompts`), each with a text under "prompt".

    Raises UserError for a missing or malformed source, some only when that row is read.
    """
    name, path, column = str(source), Path(source), ""
    if name.startswith(TINY):
        return _tiny(name)
    if match := WITH_COLUMN.fullmatch(name):
        rows, column = file_rows(Path(match[1])), match[2]
    elif name.startswith(HUB) or path.suffix.lower() in (".parquet", ".arrow") or path.is_dir():
        rows, column = read_dataset(name), split_name(name)[2]
    else:
        rows = file_rows(path)
    return (check_row(_with_prompt(row, where, column), where) for where, row in rows)


def _tiny(source: str) -> Iterator[dict]:
    from flowrl.tiny import world

    _, kinds, split = [*source.split(":"), "", ""][:3]
    families = {"geneval": world.GENEVAL_TAGS, "all": world.TAGS}
    tags = [tag for kind in kinds.split("+") for tag in families.get(kind, (kind,))]
    if source.count(":") != 2 or not set(tags) <= set(world.TAGS) or split not in world.SPLITS:
        names = ", ".join((*families, *world.TAGS))
        raise UserError(f"cannot read prompts {source!r}: write tiny:KIND:SPLIT with KIND one of "
                        f"{names}, or several joined by +, and SPLIT one of "
                        f"{', '.join(world.SPLITS)}")  # fmt: skip
    turns = zip_longest(*(world.split_prompts(tag, split) for tag in tags))
    return (prompt for prompt in chain.from_iterable(turns) if prompt is not None)


def file_rows(path: Path, what: str = "prompts") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each row of a text file or table.

    what: is read, for errors. Raises UserError for a file of another kind, and one that is missing
    or malformed.
    """
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise UserError(
            f"cannot read {what} {str(path)!r}: use a .txt file (one prompt a line), a .jsonl, "
            ".json, .csv or .tsv file, a data set (hf:NAME, or a .parquet file) or "
            "tiny:geneval:train"
        )
    try:
        text = read_text(path, limit=MAX_FILE)
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}") from error
    except UserError as error:
        raise UserError(f"cannot read {what}: {error}") from error
    yield from read(text, path)


def _text_lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the prompts of a text, one a line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", {"prompt": line.strip()}


def _json_lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, parse_json(line, where)


def _json_rows(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield a list of prompts (HPDv2) or objects (HPDv3), or the objects by name (GenAI-Bench)."""
    content = parse_json(text, str(path))
    if isinstance(content, dict):
        content = list(content.values())
    if not isinstance(content, list):
        raise UserError(f"{path}: expected a list of prompts or of objects")
    for number, row in enumerate(content, start=1):
        yield f"{path}, row {number}", {"prompt": row} if isinstance(row, str) else row


def _table_rows(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a .csv or .tsv file (DrawBench, Parti, OneIG); empty cells are left out."""
    tabs = path.suffix.lower() == ".tsv"
    # A .tsv file has no quoting: Parti's prompts begin with quotes that never end.
    quoting = csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
    lines = csv.reader(
        io.StringIO(text, newline=""), delimiter="\t" if tabs else ",", quoting=quoting, strict=True
    )
    try:
        header = next(lines, [])
        lower = [name.lower() for name in header if name]
        if twice := [name for name in header if lower.count(name.lower()) > 1]:
            raise UserError(f"{path}: the columns {', '.join(twice)} have one name: rename them")
        for cells in filter(None, lines):
            if len(cells) != len(header):
                raise csv.Error(
                    f"{len(cells)} cells, expected {len(header)} ({', '.join(header)}): "
                    + ("cells are separated by tabs" if tabs else "quote cells that hold commas")
                )
            yield f"{path}, line {lines.line_num}", _filled(zip(header, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {lines.line_num}: no row of a table: {error}") from error


def _filled(cells: Iterable[tuple[str, Any]]) -> dict:
    """Return a table's row without empty cells, but for texts, whose absence is an error."""
    return {
        name: cell if name.lower() in COLUMNS else parse_nested(cell)
        for name, cell in cells
        if cell not in (None, "") or name.lower() in COLUMNS
    }


READERS = {  # by suffix
    ".txt": _text_lines,
    ".jsonl": _json_lines,
    ".json": _json_rows,
    ".csv": _table_rows,
    ".tsv": _table_rows,
}


def _with_prompt(row: Any, where: str, column: str) -> Any:
    """Return a row with its text under "prompt". Raises UserError for several that could be it."""
    if not isinstance(row, dict) or (not column and "prompt" in row):
        return row
    names = [column] if column in row else []
    for usual in () if column else COLUMNS:
        names = names or [name for name in row if name.lower() == usual]
    if len(names) != 1:
        columns = ", ".join(map(str, row))
        which = f"no {column!r}" if column else "no column of texts, or several,"
        raise UserError(
            f"{where}: {which} among {columns}: name the column, as in FILE.csv:COLUMN or "
            "hf:NAME:SPLIT:COLUMN"
        )
    rest = {name: value for name, value in row.items() if name not in (names[0], "prompt")}
    return {"prompt": row[names[0]]} | rest


def check_row(row: object, where: str) -> dict:
    """Return the row. Raises UserError, beginning with `where`, for a wrong type of our keys."""
    row = _usual(row, where) if isinstance(row, dict) else row
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(text, str) or not text.strip():
        raise UserError(f'{where}: expected an object with a text under "prompt"')
    if not isinstance(row.get("negative"), str | None):
        raise UserError(f'{where}: "negative" must be a text')
    return row


def _usual(row: dict, where: str) -> dict:
    """Return the row of another project in our keys.

    `negative_prompt` is `negative`; the keys of `metadata`, an object or its JSON, become metadata
    themselves.
    """
    row = dict(row)
    if isinstance(row.get("metadata"), str | dict):
        inner = row.pop("metadata")
        inner = parse_json(inner, f'{where}: "metadata"') if isinstance(inner, str) else inner
        if not isinstance(inner, dict):
            raise UserError(f'{where}: "metadata" must hold an object, got {inner!r:.40}')
        row = inner | row
    negative = row.pop("negative_prompt", None)
    return row if negative is None else row | {"negative": row.get("negative") or negative}


# --- data sets ------------------------------------------------------------------------------------


def split_name(name: str) -> tuple[str, str, str]:
    """Return place, split ("train" by default) and column ("" by default) of PLACE:SPLIT:COLUMN.

    Before the place there may be `hf:`.
    """
    place, split, column = [*re.split(r":(?![^\[]*\])", name.removeprefix(HUB)), "", ""][:3]
    return place, split or "train", column


def read_dataset(name: str) -> Iterator[tuple[str, dict]]:
    """Yield the place and the value of each row of NAME, NAME:SPLIT or NAME:SPLIT:COLUMN.

    Columns that JSON cannot hold are left out, and so are empty fields; a text with a JSON object
    or a list of objects is parsed.

    Args:
        name: NAME is a folder or file, or after `hf:` a data set of the Hub. SPLIT is train by
            default and may be cut, as in train[:100].

    Raises UserError when the package `datasets`, the network, the set or its split is missing, and
    for a damaged file when its row is read.
    """
    place, split, _ = split_name(name)
    if not place.strip():
        raise UserError(f"cannot read prompts from {name!r}: it names no data set, as hf:NAME does")
    what = f"cannot read prompts {place!r}, split {split!r}"
    with dataset_errors(what):
        table = open_table(place, split, hub=name.startswith(HUB))
        other = [column for column, kind in table.features.items() if not is_json(kind)]
        for number, fields in enumerate(table.remove_columns(other), start=1):
            yield f"{name}, row {number}", _filled(fields.items())


@contextmanager
def dataset_errors(what: str) -> Iterator[None]:
    """Turn errors of `datasets`, and of the libraries below it, into UserErrors."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"{what} without the package datasets: pip install datasets, or give a .jsonl file"
        ) from error
    except Exception as error:  # of many libraries: files, network, permissions, names
        raise UserError(f"{what}: {' '.join(str(error).split())}") from error


def open_table(place: str, split: str, *, hub: bool) -> Any:
    """Return a split of a data set of the Hub, of a local file, or of a folder of files."""
    import datasets

    path = Path(place)
    if path.exists():
        check_regular(path)
    elif not hub:
        raise UserError(f"cannot read {place}: no such file or folder")
    if not path.is_file():
        return datasets.load_dataset(place, split=split)
    return datasets.load_dataset(path.suffix[1:].lower(), data_files=place, split=split)


def is_json(kind: Any) -> bool:
    """Return whether JSON can hold a column of this type: no images, sound, bytes or dates."""
    if isinstance(kind, dict):
        return all(map(is_json, kind.values()))
    if isinstance(kind, list):
        return all(map(is_json, kind))
    if hasattr(kind, "feature"):
        return is_json(kind.feature)
    mixed = type(kind).__name__ == "Json"  # what `datasets` makes of lists of several types
    return mixed or str(getattr(kind, "dtype", "")).rstrip("0123456789") in JSON_TYPES


def parse_nested(value: Any) -> Any:
    """Parse texts that hold JSON, and drop fields that are None, which tables need."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            inner = parse_json(value, "")
        except UserError:
            return value
        nested = isinstance(inner, dict) or (
            isinstance(inner, list) and inner and all(isinstance(i, dict | list) for i in inner)
        )
        return inner if nested else value
    if isinstance(value, dict):
        return {key: parse_nested(inner) for key, inner in value.items() if inner is not None}
    return [parse_nested(inner) for inner in value] if isinstance(value, list) else value
