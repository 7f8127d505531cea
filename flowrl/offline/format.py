"""Define the folder of an offline data set: groups of scored images, generated once, used often.

    store.json                   how they were made
    README.md                    a dataset card, so that `datasets.load_dataset(folder)` works
    latents/000000.safetensors   x0 (n, *latent), as they were generated
    data/000000.jsonl            one row an image

A shard is one iteration of collecting. Its rows are written last and make it count, so a process
that is killed leaves complete shards. Metadata and rows carry digests of their content, and a row
that of its latent with the header of the file, so that rows can be removed and latents read alone.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, create_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from flowrl.errors import DamagedFile, UserError
from flowrl.prompts.records import PromptRecord
from flowrl.utils.digests import content_digest, digest
from flowrl.utils.files import write_bytes, write_text

FORMAT = 2  # 1 had no digests
DIGEST = "digest"  # of a line's content, and of the metadata's
LATENT = "latent"  # column: digest of the header of the file with latents, and of the row's
METADATA, README = "store.json", "README.md"
LATENTS = "x0"  # name of the tensor in a latents file
SCORE = "reward/"  # before a reward's name, its column
PAIRS = "pairs"  # the key of a recipe whose images were given
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
COLUMNS = {
    "uid": "string", "prompt": "string", "negative": "string", "metadata": "string",
    "group": "int64", "image": "int64", "valid": "bool", "latents": "string", "row": "int64",
    "seed": "int64", "iteration": "int64", "root": "int64", "latent": "string", "digest": "string",
}  # fmt: skip
OLD = (LATENT, DIGEST)  # columns that format 1 lacks
Row = dict[str, Any]
Whole = Annotated[int, Field(ge=0)]
READ: dict[str, Any] = {
    "uid": str, "prompt": str, "negative": str | None, "metadata": Json[dict[str, Any]],
    "group": Whole, "latents": str, "row": Whole,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetMetadata:
    """How the images were made, as plain JSON."""

    pipeline: str  # path or name
    backbone: str  # family
    latent_shape: list[int]  # of one image
    dtype: str  # one of DTYPES
    sigmas: list[float]  # (T+1,) of the rollout
    rewards: list[dict[str, Any]]  # {name, version, weight}, a column each
    recipe: dict[str, Any]  # the options that decided the images
    lora: dict[str, Any] | None = None  # of the model that generated them, None for the base
    format: int = FORMAT

    @property
    def names(self) -> list[str]:
        """The rewards' names in the order of the score columns."""
        return [reward["name"] for reward in self.rewards]

    @staticmethod
    def read(folder: Path) -> "DatasetMetadata":
        """Raises UserError when the folder is no data set, one of a newer flowrl, or damaged."""
        path = folder / METADATA
        if not path.is_file():
            raise UserError(f"{folder} is no offline data set, it has no {METADATA}: make one with "
                            f"flowrl collect RECIPE -o {folder}")  # fmt: skip
        try:
            found = json.loads(path.read_bytes())
            _check_digest(found, path, needed=found["format"] != 1)
            if found["format"] not in (1, FORMAT):
                raise ValueError(f"its format is {found['format']}, not {FORMAT}")
            return DatasetMetadata(**found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} cannot be read by this version ({error}): collect into another folder"
            ) from error

    def text(self) -> str:
        content = {"format": self.format} | asdict(self)
        if self.format > 1:
            content[DIGEST] = content_digest(content)
        return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _check_digest(content: Row, where: Path | str, *, needed: bool) -> None:
    """Take the digest out of JSON content. Raises DamagedFile when it is of something else."""
    wanted = content.pop(DIGEST, None)
    if (wanted is not None or needed) and wanted != content_digest(content):
        raise DamagedFile(f"{where} is damaged: it is not what its digest was taken of")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """One row to write."""

    record: PromptRecord
    group: int
    image: int  # number in its group
    valid: bool
    scores: Sequence[float]  # by reward, NaN where missing
    seed: int
    iteration: int
    root: int  # number of its tree in the group


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """Images of one prompt, by their numbers in the data set."""

    key: str  # unique in the data set
    record: PromptRecord
    images: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineDataset:
    """An opened folder: prompts and scores in memory, the latents of N images on disk."""

    folder: Path
    metadata: DatasetMetadata
    groups: tuple[StoredGroup, ...]
    scores: Tensor  # (N, K) fp32, NaN where missing
    shard: Tensor  # (N,) long, the file of each image's latent
    row: Tensor  # (N,) long, its place in that file
    digests: tuple[str | None, ...] = field(repr=False)  # N, of the latents, None in format 1
    identity: str = field(repr=False)  # digest of metadata and rows

    def __len__(self) -> int:
        return len(self.scores)

    def latents(self, images: Tensor) -> Tensor:
        """Read the latents of images (n,) long -> (n, *latent) on the CPU, in the stored dtype.

        Raises DamagedFile for one that is not what was written.
        """
        shape, dtype = self.metadata.latent_shape, DTYPES[self.metadata.dtype]
        found = torch.empty(len(images), *shape, dtype=dtype)
        shards, rows = self.shard[images], self.row[images]
        for number in shards.unique().tolist():
            path = latents_file(self.folder, number)
            header = _header_of(path)
            with safe_open(path, "pt") as file:
                lazy = file.get_slice(LATENTS)
                for place in (shards == number).nonzero().flatten().tolist():
                    row = int(rows[place])
                    found[place] = lazy[row : row + 1][0]
                    wanted = self.digests[int(images[place])]
                    if wanted is not None and wanted != latent_digest(header, found[place]):
                        raise DamagedFile(
                            f"{path} is damaged: latent {row} is not what its digest was taken "
                            f"of; {_remedy(self.folder, number)}"
                        )
        return found


def latent_digest(header: bytes, latent: Tensor) -> str:
    """Return the digest of one latent (*latent) in a file with this header."""
    return digest(header + latent.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _header_of(path: Path) -> bytes:
    """Return the first bytes of a safetensors file: its header and how long that is."""
    with open(path, "rb") as file:
        size = file.read(8)
        return size + file.read(min(int.from_bytes(size, "little"), path.stat().st_size))


def _remedy(folder: Path, shard: int) -> str:
    return f"delete {rows_file(folder, shard)} and collect again, which adds only what is missing"


def latents_file(folder: Path, shard: int) -> Path:
    return folder / "latents" / f"{shard:06d}.safetensors"


def rows_file(folder: Path, shard: int) -> Path:
    return folder / "data" / f"{shard:06d}.jsonl"


def finished_shards(folder: Path) -> list[int]:
    """Return the numbers of the complete shards, ascending."""
    return sorted(int(p.stem) for p in folder.glob("data/*.jsonl") if p.stem.isdigit())


# --- writing ------------------------------------------------------------------------------------


def create_dataset(folder: Path, metadata: DatasetMetadata) -> None:
    """Begin a data set, or continue one that was made in the same way or has no shard yet.

    Raises UserError when the folder's images were made in another way, naming what differs, or
    when it holds other files. Hidden files and a README are kept.
    """
    before = DatasetMetadata.read(folder) if (folder / METADATA).exists() else None
    if before is None:
        if any(p.name != README and not p.name.startswith(".") for p in folder.glob("*")):
            raise UserError(f"{folder} holds something that is no offline data set: use another")
        write_text(folder / METADATA, metadata.text())
    elif finished_shards(folder):
        _check_same(folder, before, metadata)
    elif before.text() != metadata.text():
        (folder / README).unlink(missing_ok=True)
        write_text(folder / METADATA, metadata.text())
    if not (folder / README).exists():
        write_text(folder / README, _readme(metadata))


def _check_same(folder: Path, before: DatasetMetadata, after: DatasetMetadata) -> None:
    # Shards of a data set are all of its format.
    after = replace(after, format=before.format)
    was, now = (_flat(asdict(metadata)) for metadata in (before, after))
    for name in [*now, *was]:
        if was.get(name) != now.get(name):
            raise UserError(
                f"{folder} was collected with {name} = {json.dumps(was.get(name))}, and this "
                f"recipe has {json.dumps(now.get(name))}: use that recipe, or another folder"
            )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    inner = (_flat(v, f"{name}.{k}" if name else k) for k, v in value.items())
    return {k: v for part in inner for k, v in part.items()}


def _readme(metadata: DatasetMetadata) -> str:
    """Return a dataset card that gives every column a type, also where all values are null."""
    known = {k: v for k, v in COLUMNS.items() if metadata.format > 1 or k not in OLD}
    columns = known | {SCORE + name: "float64" for name in metadata.names}
    features = [{"name": name, "dtype": dtype} for name, dtype in columns.items()]
    header = {
        "configs": [{"config_name": "default", "data_files": "data/*.jsonl"}],
        "dataset_info": {"config_name": "default", "features": features},
    }
    text = "A store of groups, made by `flowrl collect`; store.json says how."
    return f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n{text}\n"


def append_shard(folder: Path, shard: int, x0: Tensor, images: Sequence[StoredImage]) -> None:
    """Write the latents x0 (n, *latent) of n images, then their rows."""
    if len(x0) != len(images):
        raise ValueError(f"got {len(x0)} latents of {len(images)} images")
    metadata = DatasetMetadata.read(folder)
    path, x0 = latents_file(folder, shard), x0.detach().cpu().contiguous()
    write_bytes(path, save({LATENTS: x0}))
    header = _header_of(path)
    digests = [latent_digest(header, latent) for latent in x0]
    lines = [
        _line(image, row, path.name, digests[row], metadata) for row, image in enumerate(images)
    ]
    write_text(rows_file(folder, shard), "".join(lines))


def _line(
    image: StoredImage, row: int, latents: str, latent: str, metadata: DatasetMetadata
) -> str:
    """Return one image as a line of ASCII JSON: no prompt can end it, and NaN is null."""
    record = image.record
    scores = {
        SCORE + name: score if math.isfinite(score) else None
        for name, score in zip(metadata.names, image.scores, strict=True)
    }
    content: Row = {
        "uid": record.uid, "prompt": record.text, "negative": record.negative,
        "metadata": json.dumps(record.metadata), "group": image.group, "image": image.image,
        "valid": image.valid, "latents": latents, "row": row, "seed": image.seed,
        "iteration": image.iteration, "root": image.root,
    }  # fmt: skip
    content |= scores
    if metadata.format > 1:
        content[LATENT] = latent
        content[DIGEST] = content_digest(content)
    return json.dumps(content, allow_nan=False) + "\n"


# --- reading ------------------------------------------------------------------------------------


def open_dataset(folder: str | Path) -> OfflineDataset:
    """Read and check every row, but no latent. Rows may have been removed from the files.

    Raises UserError when there is no data set, when it is empty, or when a shard is damaged.
    """
    folder = Path(folder)
    metadata = DatasetMetadata.read(folder)
    identity = blake2b((folder / METADATA).read_bytes(), digest_size=16)
    rows: list[Row] = []
    shard: list[int] = []
    for number in finished_shards(folder):
        try:
            data = rows_file(folder, number).read_bytes()
            found = _read_rows(data, latents_file(folder, number), metadata)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise DamagedFile(
                f"shard {number} of {folder} is damaged ({error}): {_remedy(folder, number)}"
            ) from error
        identity.update(data)
        rows += found
        shard += [number] * len(found)
    if not rows:
        raise UserError(f"{folder} holds no images yet: collect some with flowrl collect")
    columns = [SCORE + name for name in metadata.names]
    scores = [[math.nan if r[c] is None else r[c] for c in columns] for r in rows]
    return OfflineDataset(
        folder=folder,
        metadata=metadata,
        groups=tuple(_groups(rows)),
        scores=torch.tensor(scores, dtype=torch.float32).view(len(rows), len(columns)),
        shard=torch.tensor(shard),
        row=torch.tensor([r["row"] for r in rows]),
        digests=tuple(r.get(LATENT) for r in rows),
        identity=identity.hexdigest(),
    )


def _read_rows(data: bytes, latents: Path, metadata: DatasetMetadata) -> list[Row]:
    """Return the rows of a shard, each with a latent. Raises ValueError or SafetensorError."""
    types = READ | {SCORE + name: float | None for name in metadata.names}
    types |= {LATENT: str} if metadata.format > 1 else {}
    columns: dict[str, Any] = {name: (kind, ...) for name, kind in types.items()}
    schema = create_model("Row", __config__=ConfigDict(strict=True, allow_inf_nan=False), **columns)
    sealed = metadata.format > 1
    rows = [_parse_row(line, schema, sealed) for line in data.decode().split("\n") if line]
    with safe_open(latents, "pt") as file:
        lazy = file.get_slice(LATENTS)
        count, *shape = lazy.get_shape()
        dtype = SAFETENSORS_DTYPES.get(lazy.get_dtype())
    if shape != metadata.latent_shape or dtype != metadata.dtype or dtype not in DTYPES:
        raise ValueError(f"latents of shape {shape} in {dtype}, expected {metadata.latent_shape} "
                         f"in {metadata.dtype}")  # fmt: skip
    seen: set[int] = set()
    for row in rows:
        number = row["row"]
        if row["latents"] != latents.name or number >= count:
            where = f"is not among the {count} of {latents.name}"
            raise ValueError(f"a row names latent {number} of {row['latents']}, which {where}")
        if number in seen:
            raise ValueError(f"two rows name latent {number}")
        seen.add(number)
    return rows


def _parse_row(line: str, schema: type[BaseModel], sealed: bool) -> Row:
    if sealed:
        _check_line(line)
    try:
        return schema.model_validate_json(line).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        column = "".join(f"{name}: " for name in first["loc"][:1])
        raise ValueError(f"a row is malformed: {column}{first['msg']}") from error


def _check_line(line: str) -> None:
    """Raise ValueError for a row that is not what its digest was taken of."""
    content = json.loads(line)
    if not isinstance(content, dict) or content.pop(DIGEST, None) != content_digest(content):
        raise ValueError("a row is not what its digest was taken of")


def _groups(rows: Iterable[Row]) -> Iterable[StoredGroup]:
    """Yield the rows of each group number, in the order of their first."""
    members: dict[int, list[tuple[int, Row]]] = {}
    for place, row in enumerate(rows):
        members.setdefault(row["group"], []).append((place, row))
    for number, found in members.items():
        first = found[0][1]
        record = PromptRecord(
            uid=first["uid"], text=first["prompt"], negative=first["negative"],
            metadata=first["metadata"],
        )  # fmt: skip
        images = tuple(place for place, _ in found)
        yield StoredGroup(key=f"{number}/{record.uid}", record=record, images=images)
