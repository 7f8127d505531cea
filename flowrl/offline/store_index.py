"""Opening a store: every row is read and checked, no latent is."""

import math
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, create_model
from safetensors import SafetensorError, safe_open

from flowrl.errors import UserError
from flowrl.offline.format import (
    ABOUT,
    DTYPES,
    LATENTS,
    SCORE,
    About,
    Group,
    Store,
    finished_shards,
    latents_file,
    rows_file,
)
from flowrl.prompts.records import PromptRecord

Row = dict[str, Any]
Whole = Annotated[int, Field(ge=0)]
READ: dict[str, Any] = {
    "uid": str, "prompt": str, "negative": str | None, "metadata": Json[dict[str, Any]],
    "group": Whole, "latents": str, "row": Whole,
}  # fmt: skip
TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names


def open_store(folder: str | Path) -> Store:
    """The store in a folder. Rows may be removed from its files: such pictures are not in it.

    Raises UserError when there is none, when it is empty, or when a shard is damaged.
    """
    folder = Path(folder)
    about = About.read(folder)
    digest = blake2b((folder / ABOUT).read_bytes(), digest_size=16)
    rows: list[Row] = []
    shard: list[int] = []
    for number in finished_shards(folder):
        try:
            data = rows_file(folder, number).read_bytes()
            found = _rows(data, latents_file(folder, number), about)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise UserError(
                f"shard {number} of {folder} is damaged ({error}): delete "
                f"{rows_file(folder, number)} and collect again as before, which makes only what "
                "is missing"
            ) from error
        digest.update(data)
        rows += found
        shard += [number] * len(found)
    if not rows:
        raise UserError(f"{folder} holds no pictures yet: collect some with flowrl collect")
    columns = [SCORE + name for name in about.names]
    scores = [[math.nan if r[c] is None else r[c] for c in columns] for r in rows]
    return Store(
        folder=folder,
        about=about,
        groups=tuple(_groups(rows)),
        scores=torch.tensor(scores, dtype=torch.float32).view(len(rows), len(columns)),
        shard=torch.tensor(shard),
        row=torch.tensor([r["row"] for r in rows]),
        identity=digest.hexdigest(),
    )


def _rows(data: bytes, latents: Path, about: About) -> list[Row]:
    """The rows of a shard, each with a latent. Raises ValueError or SafetensorError."""
    schema = _schema(about)
    rows = [_row(line, schema) for line in data.decode().split("\n") if line]
    with safe_open(latents, "pt") as file:
        lazy = file.get_slice(LATENTS)
        count, *shape = lazy.get_shape()
        dtype = TYPES.get(lazy.get_dtype())
    if shape != about.latent_shape or dtype != about.dtype or dtype not in DTYPES:
        raise ValueError(f"latents of shape {shape} in {dtype}, expected {about.latent_shape} in "
                         f"{about.dtype}")  # fmt: skip
    seen: set[int] = set()
    for row in rows:
        number = row["row"]
        if row["latents"] != latents.name or number >= count:
            raise ValueError(f"a row names latent {number} of {row['latents']}, "
                             f"which is not among the {count} of {latents.name}")  # fmt: skip
        if number in seen:
            raise ValueError(f"two rows name latent {number}")
        seen.add(number)
    return rows


def _schema(about: About) -> type[BaseModel]:
    """What a row must have; other columns are not read."""
    columns = READ | {SCORE + name: float | None for name in about.names}
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in columns.items()}
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    return create_model("Row", __config__=strict, **fields)


def _row(line: str, schema: type[BaseModel]) -> Row:
    try:
        return schema.model_validate_json(line).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        column = "".join(f"{name}: " for name in first["loc"][:1])
        raise ValueError(f"a row is malformed: {column}{first['msg']}") from error


def _groups(rows: Iterable[Row]) -> Iterable[Group]:
    """Rows of one group number, in the order of their first."""
    members: dict[int, list[int]] = {}
    first: dict[int, Row] = {}
    for place, row in enumerate(rows):
        members.setdefault(row["group"], []).append(place)
        first.setdefault(row["group"], row)
    for number, row in first.items():
        record = PromptRecord(
            uid=row["uid"],
            text=row["prompt"],
            negative=row["negative"],
            metadata=row["metadata"],
        )
        yield Group(key=f"{number}/{record.uid}", record=record, pictures=tuple(members[number]))
