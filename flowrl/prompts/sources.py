"""Where prompts come from: text, JSONL, data sets, the tiny world. Rows are plain dicts."""

import json
import re
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from flowrl.errors import UserError

TINY, HUB = "tiny:", "hf:"
TABLES = (".parquet", ".arrow")


def read_rows(source: str | Path) -> Iterator[dict]:
    """The rows of a source, see `records.load_prompts`; each has a text under "prompt".

    Raises UserError for a missing or malformed source, some only when that row is read.
    """
    name, path = str(source), Path(source)
    if name.startswith(TINY):
        return _tiny(name)
    if name.startswith(HUB) or path.suffix in TABLES or path.is_dir():
        rows = read_dataset(name.removeprefix(HUB), hub=name.startswith(HUB))
        return (checked(row, f"{name}, row {i}") for i, row in enumerate(rows, start=1))
    return _file(path)


def _tiny(source: str) -> Iterator[dict]:
    from flowrl.tiny import world

    _, kinds, split = [*source.split(":"), "", ""][:3]
    families = {"geneval": world.GENEVAL_TAGS, "all": world.TAGS}
    tags = [tag for kind in kinds.split("+") for tag in families.get(kind, (kind,))]
    kinds_there = {*world.TAGS, world.SPELLING}
    if source.count(":") != 2 or not set(tags) <= kinds_there or split not in ("train", "test"):
        known = ", ".join((*families, *world.TAGS, world.SPELLING))
        raise UserError(f"cannot read prompts {source!r}: write tiny:KIND:train or tiny:KIND:test "
                        f"with KIND one of {known}, or several joined by +")  # fmt: skip
    turns = zip_longest(*(world.split_prompts(tag, split) for tag in tags))
    return (prompt for prompt in chain.from_iterable(turns) if prompt is not None)


def _file(path: Path) -> Iterator[dict]:
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(
            f"cannot read prompts {str(path)!r}: use a .txt file (one prompt a line), a .jsonl "
            "file (one object with 'prompt' a line), a data set (hf:NAME, or a .parquet file) or "
            "tiny:geneval:train"
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UserError(f"cannot read prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"cannot read prompts {path}: it is not UTF-8 text; save it as UTF-8"
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            is_text = path.suffix == ".txt"
            yield {"prompt": line.strip()} if is_text else _json(line, f"{path}, line {number}")


def _json(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not valid JSON ({error.msg}); expected one object a line"
        ) from error
    if isinstance(row, dict) and "prompt" not in row and "text" in row:
        row["prompt"] = row.pop("text")
    return checked(row, where)


def checked(row: object, where: str) -> dict:
    """The row, if its own keys have the right form. Raises UserError that begins with `where`."""
    text = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(text, str) or not text.strip():
        raise UserError(f'{where}: expected an object with a text under "prompt"')
    if not isinstance(row.get("negative"), str | None):
        raise UserError(f'{where}: "negative" must be a text')
    others = row.get("paraphrases", [])
    texts = isinstance(others, list) and all(isinstance(t, str) and t.strip() for t in others)
    if not texts:
        raise UserError(
            f'{where}: "paraphrases" must be a list of texts that are not empty, or be left out'
        )
    return row


# --- Prompts from data sets --------------------------------------------------------------------

COLUMNS = ("prompt", "text", "caption")  # the first of these that there is
SPLITS = ("train", "validation", "test")  # that files may be named after
MERGED = "metadata"  # a column whose keys become metadata themselves
PLAIN = ("string", "large_string", "bool", "int", "uint", "float", "null")  # Arrow's type names


def read_dataset(name: str, *, hub: bool) -> Iterator[dict]:
    """Rows of NAME, NAME:SPLIT or NAME:SPLIT:COLUMN; the text of COLUMN is under "prompt".

    NAME is a folder or file that exists, or else (if `hub`) a data set of the hub; SPLIT is train
    if not said, and may be cut, as in train[:100] or train[10%:]; COLUMN is the first of COLUMNS.
    All columns that JSON can hold become metadata, empty fields left out; a text that holds a JSON
    object or a list of objects is read as that, and the keys of a column "metadata" stand for
    themselves. Images are not read.
    Raises UserError when the package `datasets`, the network, the set, its split or column is
    missing, and, when that row is read, for a damaged file.
    """
    place, split, column = [*re.split(r":(?![^\[]*\])", name), "", ""][:3]
    if not place.strip():
        raise UserError(f"cannot read prompts {name!r}: name the data set or folder, as hf:NAME")
    table = _open(place, split or "train", hub=hub)
    names = list(table.features)
    chosen = column or next((c for c in COLUMNS if c in names), "")
    if chosen not in names:
        wanted = f"{column!r}" if column else f"one of {', '.join(COLUMNS)}"
        raise UserError(
            f"the prompts {place} have the columns {', '.join(names)}; expected {wanted}: name "
            f"the column of texts as hf:{place}:{split or 'train'}:COLUMN"
        )
    table = table.remove_columns([n for n, kind in table.features.items() if not _plain(kind)])
    return _rows(table, place, chosen)


def _rows(table: Any, place: str, column: str) -> Iterator[dict]:
    """Every row. Raises UserError for a file that turns out damaged while it is read."""
    rows, read = iter(table), 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise UserError(
                f"cannot read prompts {place!r} after row {read}: {type(error).__name__}: "
                f"{' '.join(str(error).split())}; is the file whole?"
            ) from error
        if row is None:
            return
        read += 1
        yield _row(row, column)


def _open(place: str, split: str, *, hub: bool) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"cannot read prompts {place!r}: the package datasets is not installed; "
            "pip install datasets, or give a .jsonl file"
        ) from error
    path = Path(place)
    if not hub and not path.exists():
        raise UserError(f"cannot read prompts {place}: no such file or folder")
    try:
        if path.exists():
            return _local(path, split)
        return datasets.load_dataset(place, split=split)
    except UserError:
        raise
    except Exception as error:  # of many libraries: files, network, permissions, names
        reason = " ".join(str(error).split())
        raise UserError(
            f"cannot read prompts {place!r}, split {split!r}: {reason}{_remedy(reason)}"
        ) from error


def _local(path: Path, split: str) -> Any:
    """A folder written by save_to_disk, or .parquet and .arrow files as one table."""
    import datasets

    split, bracket, rest = split.partition("[")
    cut = bracket + rest
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        found = datasets.load_from_disk(str(path))
        splits = found if isinstance(found, dict) else {"train": found}
        return _cut(_split(splits, split, path), cut)
    for kind in ("parquet", "arrow"):
        files = sorted(path.rglob(f"*.{kind}")) if path.is_dir() else [path]
        files = [str(file) for file in files if file.suffix == f".{kind}"]
        if files:
            splits = {"train": files} if path.is_file() else _by_split(files)
            chosen = _split(splits, split, path)
            return datasets.load_dataset(
                kind, data_files=chosen, split=f"train{cut}", streaming=not cut
            )
    raise UserError(f"cannot read prompts {path}: the folder holds no .parquet or .arrow file")


def _cut(table: Any, cut: str) -> Any:
    """The rows that a cut like "[:100]" or "[10%:]" leaves, all for ""."""
    import datasets

    if not cut:
        return table
    instruction = datasets.ReadInstruction.from_spec(f"train{cut}")
    (part,) = instruction.to_absolute({"train": len(table)})
    return table.select(range(len(table))[part.from_ : part.to])


def _by_split(files: list[str]) -> dict[str, list[str]]:
    """Files by the split that they or their folders are named after; those of none are train."""
    found: dict[str, list[str]] = {}
    for file in files:
        words = re.split("[-_.]", Path(file).stem) + [Path(file).parent.name]
        named = [split for split in SPLITS if split in words]
        found.setdefault(named[0] if named else "train", []).append(file)
    return found


def _split(splits: dict, split: str, path: Path) -> Any:
    if split not in splits:
        raise UserError(
            f"the prompts {path} have the splits {', '.join(splits)}, not {split!r}: write "
            f"hf:{path}:SPLIT"
        )
    return splits[split]


def _remedy(reason: str) -> str:
    if "gated" in reason or "authenticated" in reason:
        return "; accept its terms on its page, and log in with `hf auth login`"
    if "reach" in reason or "offline" in reason.lower():
        return (
            "; it is not on this machine and the hub cannot be reached: load it once where there "
            "is a network, or name a local .parquet or .jsonl file"
        )
    return ""


def _plain(kind: Any) -> bool:
    """Whether JSON can hold it: no images, sound, bytes or dates."""
    if isinstance(kind, dict):
        return all(map(_plain, kind.values()))
    if isinstance(kind, list):
        return all(map(_plain, kind))
    if hasattr(kind, "feature"):
        return _plain(kind.feature)
    return str(getattr(kind, "dtype", "")).rstrip("0123456789") in PLAIN


def _row(row: dict, column: str) -> dict:
    """One row in the form of a JSONL line."""
    text = row.pop(column)
    fields = {key: _read(value) for key, value in row.items() if value is not None}
    inner = fields.pop(MERGED) if isinstance(fields.get(MERGED), dict) else {}
    return inner | fields | {"prompt": text}


def _read(value: Any) -> Any:
    """JSON text as what it says; fields that are None, which tables need, left out."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            found = json.loads(value)
        except json.JSONDecodeError:
            return value
        nested = isinstance(found, dict) or (
            isinstance(found, list) and found and all(isinstance(f, dict | list) for f in found)
        )
        return found if nested else value
    if isinstance(value, dict):
        return {key: _read(inner) for key, inner in value.items() if inner is not None}
    return [_read(inner) for inner in value] if isinstance(value, list) else value
