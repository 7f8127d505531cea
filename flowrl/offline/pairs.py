"""Pairs of images of which one is preferred, in the formats that people have them in.

A .jsonl or .json file, a .parquet file or a folder of them, or two folders of images side by side.
Rows are told apart by their keys: flowrl's own and open-image-preferences (`prompt`, `chosen`,
`rejected`), Pick-a-Pic (`caption`, `jpg_0`, `jpg_1`, `label_0`), HPDv3 (`prompt`, `path1`,
`path2`), Flow-Factory's version 2 (`schema_version`, `input`, `supervision`), verl-omni (`prompt`,
`img_win`, `img_lose`).
"""

import functools
import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord, records_of
from flowrl.prompts.sources import check_row

LOG = logging.getLogger(__name__)

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
TWINS = (("chosen", "rejected"), ("win", "lose"), ("preferred", "rejected"), ("good", "bad"))
MEMBERS = ("chosen", "rejected")


@dataclass(frozen=True, slots=True)
class Cell:
    """An image inside a parquet file, read when it is needed."""

    file: Path
    row: int
    column: str

    def read(self) -> bytes:
        """Return the encoded image. Raises OSError where the cell holds none."""
        group, row = _place(self.file, self.row)
        value = _group(self.file, group, self.column)[row].as_py()
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise OSError(f"row {self.row + 1} of {self.file} has no image under {self.column}")
        return data

    def __str__(self) -> str:
        return f"{self.column} of row {self.row + 1}"


Picture = Path | Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and two images."""

    record: PromptRecord
    chosen: Picture
    rejected: Picture
    where: str  # file and line or row, for errors


def encoded(picture: Picture) -> bytes:
    """Return the file of an image. Raises OSError for one that is not there."""
    return picture.read_bytes() if isinstance(picture, Path) else picture.read()


def exists(picture: Picture) -> bool:
    """Return whether there is a file; whether a cell holds an image is seen when it is read."""
    return (picture if isinstance(picture, Path) else picture.file).is_file()


def opened(picture: Picture) -> Path | io.BytesIO:
    """Return what Pillow opens."""
    return picture if isinstance(picture, Path) else io.BytesIO(picture.read())


def read_pairs(source: Path) -> tuple[list[Pair], list[str]]:
    """Read the pairs of a file or folder, see above; return them, and why rows were left out.

    Paths of images are relative to the file. All splits of a folder are read. Rows without a
    decision (a tie, no label) or a prompt are left out. Raises UserError for a source that is
    missing, empty or malformed; whether images exist is seen when they are loaded.
    """
    found: list[tuple[dict[str, Any], Picture, Picture, str]] = []
    left_out: list[str] = []
    for where, row, at in _rows(source):
        shape = _shape(row, where)
        try:
            read = shape(row, at)
        except _Undecided as reason:
            left_out.append(f"{where}: {reason}")
            continue
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{where}: {_complaint(shape, error)}") from error
        fields, chosen, rejected = read
        found.append((check_row(fields, where), chosen, rejected, where))
    if not found:
        raise UserError(
            f"{source} holds no decided pair" + (f"; {left_out[0]}" if left_out else "")
        )
    records = records_of([fields for fields, *_ in found])
    pairs = [
        Pair(record=record, chosen=chosen, rejected=rejected, where=where)
        for record, (_, chosen, rejected, where) in zip(records, found, strict=True)
    ]
    return pairs, left_out


def pairs_digest(source: Path) -> str:
    """Return what identifies a file, or the files of a folder by name and size."""
    if source.is_file():
        return blake2b(source.read_bytes(), digest_size=16).hexdigest()
    files = sorted(p for p in source.rglob("*") if p.is_file())
    text = "\n".join(f"{p.relative_to(source)} {p.stat().st_size}" for p in files)
    return blake2b(text.encode(), digest_size=16).hexdigest()


# --- rows ---------------------------------------------------------------------------------------


def _rows(source: Path) -> Iterator[tuple[str, dict[str, Any], Callable[[str], Picture]]]:
    """Yield where a row is, its values, and what gives the image that a key names."""
    if source.is_dir():
        tables = sorted(source.rglob("*.parquet"))
        if tables:
            splits = sorted({re.split(r"[-.]", table.name)[0] for table in tables})
            if len(splits) > 1:
                LOG.warning("%s has the parts %s: all are read", source, ", ".join(splits))
            for table in tables:
                yield from _table(table)
            return
        yield from _twins(source)
    elif source.suffix == ".parquet" and source.is_file():
        yield from _table(source)
    elif source.suffix in (".jsonl", ".json"):
        for where, row in _json(source):
            yield where, row, functools.partial(_named, source.parent, row, where)
    else:
        raise UserError(
            f"cannot read pairs {source}: expected a .jsonl, .json or .parquet file, a folder of "
            ".parquet files, or a folder with chosen/ and rejected/"
        )


def _named(folder: Path, row: Mapping[str, Any], where: str, key: str) -> Path:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f'{where}: expected the paths of images "{key}"')
    return folder / value


def _json(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read pairs {source}: {reason}") from error
    unit, lines = "line", [(n, t) for n, t in enumerate(text.split("\n"), start=1) if t.strip()]
    if source.suffix == ".json":
        listed = _parsed(text, f"{source}")
        if not isinstance(listed, list):
            raise UserError(f"{source}: expected a list of objects")
        unit, lines = "entry", list(enumerate(listed, start=1))
    for number, line in lines:
        where = f"{source}, {unit} {number}"
        row = _parsed(line, where) if isinstance(line, str) else line
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected an object")
        yield where, row


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg})") from error


def _table(file: Path) -> Iterator[tuple[str, dict[str, Any], Callable[[str], Picture]]]:
    """Yield the rows of a parquet file without their images, which are large.

    Metadata keeps what JSON can hold: columns of dates are left out. An empty field of a pair's own
    keys is None.
    """
    from pyarrow import ArrowException

    try:
        table = _parquet(file)
        names = table.schema_arrow.names
        kinds = {name: table.schema_arrow.field(name).type for name in names}
        light = [name for name in names if _is_plain(kinds[name])]
        images = dict.fromkeys((name for name in names if _is_image(kinds[name])), b"")
        own = {key for keys in SHAPES for key in keys}
        row = 0
        for batch in table.iter_batches(columns=light):
            for values in batch.to_pylist():
                where = f"{file}, row {row + 1}"
                kept = {k: v for k, v in values.items() if v is not None or k in own}
                yield where, kept | images, functools.partial(_cell, file, row, kept)
                row += 1
    except (ArrowException, OSError) as error:
        raise UserError(f"{file} is not a parquet file, or not whole: {error}") from error


def _cell(file: Path, row: int, values: Mapping[str, Any], key: str) -> Picture:
    path = values.get(key)
    return file.parent / path if isinstance(path, str) else Cell(file, row, key)


def _is_image(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return any(types.is_binary(kind.field(i).type) for i in range(kind.num_fields))
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_plain(kind: Any) -> bool:
    """Return whether JSON can hold a column: no images, bytes, dates or decimal numbers."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    checks = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer)
    return any(fits(kind) for fits in (*checks, types.is_floating, types.is_null))


@functools.lru_cache(maxsize=8)
def _parquet(file: Path) -> Any:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError("pairs in .parquet files need pyarrow: pip install pyarrow") from error
    return ParquetFile(file)


def _place(file: Path, row: int) -> tuple[int, int]:
    """Return the row group of a row, and its number there."""
    metadata = _parquet(file).metadata
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).num_rows
        if row < size:
            return group, row
        row -= size
    raise OSError(f"{file} has no row {row + 1}")


@functools.lru_cache(maxsize=4)
def _group(file: Path, group: int, column: str) -> Any:
    """One column of one row group: rows are asked in their order."""
    return _parquet(file).read_row_group(group, columns=[column]).column(column)


def _twins(folder: Path) -> Iterator[tuple[str, dict[str, Any], Callable[[str], Picture]]]:
    """Yield the images of the same name in two folders, captions in .txt files beside either."""
    twin = next((t for t in TWINS if all((folder / name).is_dir() for name in t)), None)
    if twin is None:
        raise UserError(
            f"cannot read pairs {folder}: it has no .parquet files, and none of the folders "
            f"{', '.join(' and '.join(t) for t in TWINS)}"
        )
    good, bad = (folder / name for name in twin)
    found = {p.stem: p for p in good.iterdir() if p.suffix.lower() in IMAGES}
    others = {p.stem: p for p in bad.iterdir() if p.suffix.lower() in IMAGES}
    for stem in sorted(set(found) ^ set(others)):
        path, missing = (found[stem], bad) if stem in found else (others[stem], good)
        row = {"prompt": "", "chosen": "", "rejected": ""}
        yield str(path), row, functools.partial(_no_twin, missing)
    for path in sorted(path for stem, path in found.items() if stem in others):
        captions = [place.with_suffix(".txt") for place in (path, bad / path.name)]
        caption = next((c for c in captions if c.is_file()), None)
        if caption is None:
            raise UserError(f"{path}: expected its prompt in {captions[0]}")
        images = {"chosen": path, "rejected": others[path.stem]}
        row = {"prompt": caption.read_text("utf-8").strip(), "chosen": "", "rejected": ""}
        yield str(path), row, images.__getitem__


def _no_twin(folder: Path, key: str) -> Picture:
    raise _Undecided(f"there is no image of its name in {folder}")


# --- shapes of rows -----------------------------------------------------------------------------


class _Undecided(Exception):
    """A row without a preferred image."""


Row = dict[str, Any]
Read = tuple[Row, Picture, Picture]  # prompt and metadata, the chosen and the rejected image
Shape = Callable[[Row, Callable[[str], Picture]], Read]


def _chosen(row: Row, image: Callable[[str], Picture]) -> Read:
    return _rest(row, *MEMBERS), image("chosen"), image("rejected")


def _pick_a_pic(row: Row, image: Callable[[str], Picture]) -> Read:
    if row.get("has_label") is False:
        raise _Undecided("has_label is false")
    if empty := next((key for key in ("label_0", "caption") if row[key] is None), None):
        raise _Undecided(f"{empty} is empty")
    label = float(row["label_0"])
    if label not in (0.0, 1.0):
        raise _Undecided(f"label_0 is {label:g}, a tie")
    keys = ("jpg_0", "jpg_1") if label else ("jpg_1", "jpg_0")
    fields = _rest(row, "jpg_0", "jpg_1", "label_0", "label_1", "has_label", "caption")
    return fields | {"prompt": row["caption"]}, image(keys[0]), image(keys[1])


def _hpd(row: Row, image: Callable[[str], Picture]) -> Read:
    return _rest(row, "path1", "path2"), image("path1"), image("path2")


def _verl_omni(row: Row, image: Callable[[str], Picture]) -> Read:
    win, lose = row.get("win_score"), row.get("lose_score")
    if win is not None and lose is not None and win <= lose:
        raise _Undecided(f"win_score {win:g} is not above lose_score {lose:g}")
    return _rest(row, "img_win", "img_lose"), image("img_win"), image("img_lose")


def _flow_factory(row: Row, image: Callable[[str], Picture]) -> Read:
    if row["schema_version"] != 2:
        raise ValueError(f"schema_version is {row['schema_version']!r}, expected 2")
    own = dict(row["input"])
    paths = []
    for member in MEMBERS:
        media = row["supervision"][member]["media"]
        if len(media) != 1:
            raise ValueError(f"has {len(media)} media in supervision.{member}, expected one image")
        key = f"supervision.{member}.media[0].path"
        row[key] = media[0]["path"]
        paths.append(image(key))
    return own | dict(row.get("metadata") or {}), paths[0], paths[1]


SHAPES: dict[tuple[str, ...], Shape] = {
    ("schema_version", "input", "supervision"): _flow_factory,
    ("caption", "jpg_0", "jpg_1", "label_0"): _pick_a_pic,
    ("prompt", "img_win", "img_lose"): _verl_omni,
    ("prompt", "path1", "path2"): _hpd,
    ("prompt", "chosen", "rejected"): _chosen,
}


def _shape(row: Row, where: str) -> Shape:
    if "prompt" not in row and isinstance(row.get("text"), str):
        row["prompt"] = row.pop("text")
    for keys, shape in SHAPES.items():
        if set(keys) <= set(row):
            return shape
    if "chosen" in row or "rejected" in row or "prompt" in row:
        raise UserError(f'{where}: expected the paths of images "chosen" and "rejected"')
    known = "; ".join(", ".join(keys) for keys in SHAPES)
    raise UserError(f"{where}: has {', '.join(row) or 'no keys'}, expected one of: {known}")


def _rest(row: Row, *taken: str) -> Row:
    return {key: value for key, value in row.items() if key not in taken}


def _complaint(shape: Shape, error: Exception) -> str:
    keys = next(keys for keys, own in SHAPES.items() if own is shape)
    told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
    return f"a row of {', '.join(keys)} {told}"


def members(pair: Pair) -> Sequence[tuple[str, Picture]]:
    """Return the images by name, the chosen one first."""
    return [("chosen", pair.chosen), ("rejected", pair.rejected)]
