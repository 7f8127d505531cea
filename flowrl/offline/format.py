"""Groups of images on disk, drawn once and learned from often: the folder and its files.

    store.json                   how they were made
    README.md                    so that `datasets.load_dataset(folder)` reads the rows
    latents/000000.safetensors   x0 (n, *latent), as it was drawn
    data/000000.jsonl            a row an image

A shard is one iteration of collecting. Its latents are written first, and it counts when its rows
are there, so that whatever is killed leaves whole shards.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, create_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.errors import UserError
from flowrl.prompts.records import PromptRecord
from flowrl.utils.files import atomic_path, write_text

FORMAT = 1
ABOUT, README = "store.json", "README.md"
LATENTS = "x0"  # name of the tensor in a latents file
SCORE = "reward/"  # before a reward's name, its column
PAIRS = "pairs"  # the key of a recipe whose images were given
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLUMNS = {
    "uid": "string", "prompt": "string", "negative": "string", "metadata": "string",
    "group": "int64", "image": "int64", "valid": "bool", "latents": "string", "row": "int64",
    "seed": "int64", "iteration": "int64", "root": "int64",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetMetadata:
    """How the images of a store were made; what is plain JSON only.

    pipeline: its path or name; backbone: its family; latent_shape: of one; dtype: one of DTYPES;
    sigmas: (T+1,) of the rollout; rewards: [{name, version, weight}], a column each; recipe: the
    options that decided the images; lora: of the model that drew them, None for the base.
    """

    pipeline: str
    backbone: str
    latent_shape: list[int]
    dtype: str
    sigmas: list[float]
    rewards: list[dict[str, Any]]
    recipe: dict[str, Any]
    lora: dict[str, Any] | None = None

    @property
    def names(self) -> list[str]:
        """Of the rewards, in the order of the scores' columns."""
        return [reward["name"] for reward in self.rewards]

    @staticmethod
    def read(folder: Path) -> "DatasetMetadata":
        """Raises UserError when there is no store, or one of another version of flowrl."""
        path = folder / ABOUT
        if not path.is_file():
            raise UserError(f"{folder} is not a store of groups, it has no {ABOUT}: make one with "
                            f"flowrl collect RECIPE -o {folder}")  # fmt: skip
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            about = DatasetMetadata(**found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} cannot be read by this version of flowrl ({error}): collect the groups "
                "again into another folder"
            ) from error
        return about

    def text(self) -> str:
        content = {"format": FORMAT} | asdict(self)
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """One row to write. scores: by reward, NaN where missing; root: of its tree in the group."""

    record: PromptRecord
    group: int
    image: int
    valid: bool
    scores: Sequence[float]
    seed: int
    iteration: int
    root: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """Images of one prompt, by their numbers in the store. key: a name of its own."""

    key: str
    record: PromptRecord
    images: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineDataset:
    """What is in a folder: prompts and scores in memory, the latents of N images on disk.

    scores: (N, K) fp32, NaN where missing; shard, row: (N,) long, where each image's latent is.
    identity: of everything in it.
    """

    folder: Path
    about: DatasetMetadata
    groups: tuple[StoredGroup, ...]
    scores: Tensor
    shard: Tensor
    row: Tensor
    identity: str = field(repr=False)

    def __len__(self) -> int:
        """N, the number of images."""
        return len(self.scores)

    def latents(self, images: Tensor) -> Tensor:
        """Images (n,) long -> (n, *latent) as they were drawn, on the CPU; reads no others."""
        shape, dtype = self.about.latent_shape, DTYPES[self.about.dtype]
        found = torch.empty(len(images), *shape, dtype=dtype)
        shards, rows = self.shard[images], self.row[images]
        for number in shards.unique().tolist():
            with safe_open(latents_file(self.folder, number), "pt") as file:
                lazy = file.get_slice(LATENTS)
                for place in (shards == number).nonzero().flatten().tolist():
                    row = int(rows[place])
                    found[place] = lazy[row : row + 1][0]
        return found


def latents_file(folder: Path, shard: int) -> Path:
    return folder / "latents" / f"{shard:06d}.safetensors"


def rows_file(folder: Path, shard: int) -> Path:
    return folder / "data" / f"{shard:06d}.jsonl"


def finished_shards(folder: Path) -> list[int]:
    """Numbers of the shards that are whole, ascending."""
    return sorted(int(p.stem) for p in folder.glob("data/*.jsonl") if p.stem.isdigit())


# --- writing ------------------------------------------------------------------------------------


def create(folder: Path, about: DatasetMetadata) -> None:
    """Begin a store, or go on with one that was made in the same way, or holds nothing yet.

    Raises UserError when the folder's images were made in another way, naming what differs, and
    when it holds other files. Hidden ones are no matter, nor a README, which is kept.
    """
    was = DatasetMetadata.read(folder) if (folder / ABOUT).exists() else None
    if was is None:
        if folder.exists() and any(_is_foreign(path) for path in folder.iterdir()):
            raise UserError(f"{folder} holds something that is not a store: choose another folder")
        write_text(folder / ABOUT, about.text())
    elif finished_shards(folder):
        _check_same(folder, was, about)
    elif was.text() != about.text():
        (folder / README).unlink(missing_ok=True)
        write_text(folder / ABOUT, about.text())
    if not (folder / README).exists():
        write_text(folder / README, _readme(about))


def _is_foreign(path: Path) -> bool:
    return path.name != README and not path.name.startswith(".")


def _check_same(folder: Path, before: DatasetMetadata, after: DatasetMetadata) -> None:
    was, now = (_flat(json.loads(about.text())) for about in (before, after))
    for name in [*now, *was]:
        if was.get(name) != now.get(name):
            raise UserError(
                f"{folder} was collected with {name} = {json.dumps(was.get(name))}, and this "
                f"recipe has {json.dumps(now.get(name))}: use the recipe it was collected with, or "
                "another folder"
            )


def append(folder: Path, shard: int, x0: Tensor, images: Sequence[StoredImage]) -> None:
    """Write a shard: latents x0 (n, *latent) of n images, then their rows."""
    if len(x0) != len(images):
        raise ValueError(f"got {len(x0)} latents of {len(images)} images")
    names = DatasetMetadata.read(folder).names
    path = latents_file(folder, shard)
    with atomic_path(path) as temporary:
        save_file({LATENTS: x0.detach().cpu().contiguous()}, temporary)
    lines = [_line(p, i, path.name, names) for i, p in enumerate(images)]
    write_text(rows_file(folder, shard), "".join(lines))


def _line(image: StoredImage, row: int, latents: str, names: Sequence[str]) -> str:
    """One image as a line of ASCII JSON: no prompt can end it, and NaN is null."""
    record = image.record
    scores = {
        SCORE + name: score if abs(score) < float("inf") else None
        for name, score in zip(names, image.scores, strict=True)
    }
    content = {
        "uid": record.uid,
        "prompt": record.text,
        "negative": record.negative,
        "metadata": json.dumps(record.metadata),
        "latents": latents,
        "row": row,
    } | {name: getattr(image, name) for name in _OWN}
    return json.dumps({name: content[name] for name in COLUMNS} | scores, allow_nan=False) + "\n"


_OWN = [f.name for f in fields(StoredImage) if f.name in COLUMNS]


def _readme(about: DatasetMetadata) -> str:
    """A dataset card: with the types given, a column of nothing but null has one too."""
    columns = COLUMNS | {SCORE + name: "float64" for name in about.names}
    features = [{"name": name, "dtype": dtype} for name, dtype in columns.items()]
    header = {
        "configs": [{"config_name": "default", "data_files": "data/*.jsonl"}],
        "dataset_info": {"config_name": "default", "features": features},
    }
    text = "A store of groups, made by `flowrl collect`; store.json says how."
    return f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n{text}\n"


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    inner = (_flat(v, f"{name}.{k}" if name else k) for k, v in value.items())
    return {k: v for part in inner for k, v in part.items()}


# --- Opening a store: every row is read and checked, no latent is ------------------------------

Row = dict[str, Any]
Whole = Annotated[int, Field(ge=0)]
READ: dict[str, Any] = {
    "uid": str, "prompt": str, "negative": str | None, "metadata": Json[dict[str, Any]],
    "group": Whole, "latents": str, "row": Whole,
}  # fmt: skip
TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names


def open_store(folder: str | Path) -> OfflineDataset:
    """The store in a folder. Rows may be removed from its files: such images are not in it.

    Raises UserError when there is none, when it is empty, or when a shard is damaged.
    """
    folder = Path(folder)
    about = DatasetMetadata.read(folder)
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
        raise UserError(f"{folder} holds no images yet: collect some with flowrl collect")
    columns = [SCORE + name for name in about.names]
    scores = [[math.nan if r[c] is None else r[c] for c in columns] for r in rows]
    return OfflineDataset(
        folder=folder,
        about=about,
        groups=tuple(_groups(rows)),
        scores=torch.tensor(scores, dtype=torch.float32).view(len(rows), len(columns)),
        shard=torch.tensor(shard),
        row=torch.tensor([r["row"] for r in rows]),
        identity=digest.hexdigest(),
    )


def _rows(data: bytes, latents: Path, about: DatasetMetadata) -> list[Row]:
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


def _schema(about: DatasetMetadata) -> type[BaseModel]:
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


def _groups(rows: Iterable[Row]) -> Iterable[StoredGroup]:
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
        yield StoredGroup(
            key=f"{number}/{record.uid}", record=record, images=tuple(members[number])
        )
