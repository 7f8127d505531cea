"""Where prompts come from: text, JSONL, data sets, the tiny world. Rows are plain dicts."""

import json
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path

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
        from flowrl.prompts.prompt_datasets import read_dataset

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
