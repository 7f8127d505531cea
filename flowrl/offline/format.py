"""Offline data sets: groups of scored images, generated once and read by many runs.

    store.json                   how the images were made
    shards/000000.safetensors    latents and scores of one iteration; its rows are in the header

Every file has a digest of its content. A shard is written whole or not at all, so that a killed
process leaves complete shards.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from flowrl.config.load import differences
from flowrl.errors import DamagedFile, UserError
from flowrl.prompts.records import PromptRecord
from flowrl.utils.digests import check_seal, content_digest, notes_of, seal
from flowrl.utils.files import foreign_entries, write_bytes, write_text
from flowrl.utils.untrusted import read_bytes, read_json

METADATA, SHARDS = "store.json", "shards"
LATENTS, SCORES, ROWS = "x0", "scores", "rows"  # names in a shard's file
DIGEST = "digest"  # in the metadata
PAIRS = "pairs"  # the key of a recipe whose images came from files
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Row = dict[str, Any]


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

    @property
    def names(self) -> list[str]:
        """The rewards' names in the order of the score columns."""
        return [reward["name"] for reward in self.rewards]

    @staticmethod
    def read(folder: Path) -> "DatasetMetadata":
        """Raises UserError when the folder is no data set, or its metadata are damaged."""
        path = folder / METADATA
        if not path.is_file():
            raise UserError(f"{folder} is no offline data set, it has no {METADATA}: make one with "
                            f"flowrl collect RECIPE -o {folder}")  # fmt: skip
        try:
            content = read_json(path)
            if content.pop(DIGEST, None) != content_digest(content):
                raise ValueError("its digest is of other content")
            return DatasetMetadata(**content)
        except (ValueError, TypeError, AttributeError, UserError) as error:
            raise DamagedFile(
                f"{path} is damaged, or of another version ({error}): collect into another folder"
            ) from error

    def text(self) -> str:
        content = asdict(self)
        return json.dumps(content | {DIGEST: content_digest(content)}, indent=1) + "\n"


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
    shard: Tensor  # (N,) long, the number of each image's shard
    row: Tensor  # (N,) long, its row there

    def __len__(self) -> int:
        return len(self.scores)

    def latents(self, images: Tensor) -> Tensor:
        """Read latents of images (n,) long -> (n, *latent) on the CPU, in the stored dtype."""
        shape, dtype = self.metadata.latent_shape, DTYPES[self.metadata.dtype]
        latents = torch.empty(len(images), *shape, dtype=dtype)
        shards, rows = self.shard[images], self.row[images]
        for number in shards.unique().tolist():
            with safe_open(shard_file(self.folder, number), "pt") as file:
                stored = file.get_slice(LATENTS)
                for place in (shards == number).nonzero().flatten().tolist():
                    row = int(rows[place])
                    latents[place] = stored[row : row + 1][0]
        return latents


def shard_file(folder: Path, shard: int) -> Path:
    return folder / SHARDS / f"{shard:06d}.safetensors"


def finished_shards(folder: Path) -> list[int]:
    """Return the numbers of the shards, ascending."""
    files = folder.glob(f"{SHARDS}/*.safetensors")
    return sorted(int(path.stem) for path in files if path.stem.isdigit())


# --- writing ------------------------------------------------------------------------------------


def create_dataset(folder: Path, metadata: DatasetMetadata) -> None:
    """Begin a data set, or continue one that was made in the same way or has no shard yet.

    Raises UserError when the folder's images were made in another way, naming the first different
    option, or when it holds other files.
    """
    before = DatasetMetadata.read(folder) if (folder / METADATA).exists() else None
    if before is None and foreign_entries(folder, "dataset"):
        raise UserError(f"{folder} holds something that is no offline data set: use another")
    if before is None or not finished_shards(folder):
        write_text(folder / METADATA, metadata.text())
        return
    changed = differences(asdict(before), asdict(metadata))
    if changed:
        name, (was, now) = next(iter(changed.items()))
        raise UserError(
            f"{folder} was collected with {name} = {json.dumps(was)}, and this recipe has "
            f"{json.dumps(now)}: use that recipe, or another folder"
        )


def append_shard(
    folder: Path,
    shard: int,
    x0: Tensor,
    scores: Tensor,
    records: Sequence[PromptRecord],
    groups: Sequence[int],
) -> None:
    """Write n images as one file.

    Args:
        x0: latents (n, *latent).
        scores: (n, K), a column for each reward; what is not finite is stored as missing, NaN.
        records: n prompts.
        groups: n numbers of groups in the data set.
    """
    rows = [
        {
            "uid": record.uid, "prompt": record.text, "negative": record.negative,
            "metadata": record.metadata, "group": group,
        }
        for record, group in zip(records, groups, strict=True)
    ]  # fmt: skip
    scores = torch.where(scores.isfinite(), scores, torch.nan).float().cpu()
    tensors = {LATENTS: x0.detach().cpu().contiguous(), SCORES: scores.contiguous()}
    write_bytes(shard_file(folder, shard), seal(save(tensors, metadata={ROWS: json.dumps(rows)})))


# --- reading ------------------------------------------------------------------------------------


def open_dataset(folder: str | Path) -> OfflineDataset:
    """Read prompts and scores, and check the digests of all files.

    Raises UserError when there is no data set, when it is empty, or when a file is damaged.
    """
    folder = Path(folder)
    metadata = DatasetMetadata.read(folder)
    parts, rows, shard, row = [], [], [], []
    for number in finished_shards(folder):
        part, scores = read_shard(shard_file(folder, number), metadata)
        parts.append(scores)
        rows += part
        shard += [number] * len(part)
        row += range(len(part))
    if not rows:
        raise UserError(f"{folder} holds no images yet: collect some with flowrl collect")
    return OfflineDataset(
        folder=folder,
        metadata=metadata,
        groups=tuple(_groups(rows)),
        scores=torch.cat(parts),
        shard=torch.tensor(shard),
        row=torch.tensor(row),
    )


def read_shard(path: Path, metadata: DatasetMetadata) -> tuple[list[Row], Tensor]:
    """Return the rows of a shard and their scores (n, K). Raises DamagedFile."""
    try:
        status = path.stat()
        rows, scores, shape = _read_file(path, status.st_mtime_ns, status.st_size)
        if [*shape[1:]] != metadata.latent_shape:
            raise ValueError(f"latents of shape {[*shape[1:]]}")
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, DamagedFile) as error:
        raise DamagedFile(
            f"{path} is damaged ({error}): delete it and collect again, which makes only missing "
            "shards"
        ) from error
    return rows, scores


@functools.cache  # a process opens a data set several times
def _read_file(path: Path, mtime: int, size: int) -> tuple[list[Row], Tensor, torch.Size]:
    """Return rows, scores, and the shape of the latents of a file, checked by its digest."""
    data = read_bytes(path, limit=None)
    if not check_seal(data, path):
        raise ValueError("it has no digest")
    tensors = load(data)
    return json.loads(notes_of(data)[ROWS]), tensors[SCORES], tensors[LATENTS].shape


def _groups(rows: Iterable[Row]) -> Iterator[StoredGroup]:
    """Yield the rows of each group number, in the order of their first."""
    members: dict[int, list[tuple[int, Row]]] = {}
    for place, row in enumerate(rows):
        members.setdefault(row["group"], []).append((place, row))
    for number, images in members.items():
        first = images[0][1]
        record = PromptRecord(
            uid=first["uid"], text=first["prompt"], negative=first["negative"],
            metadata=first["metadata"],
        )  # fmt: skip
        places = tuple(place for place, _ in images)
        yield StoredGroup(key=f"{number}/{record.uid}", record=record, images=places)
