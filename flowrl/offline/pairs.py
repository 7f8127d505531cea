"""Pairs of pictures of which a person chose one, from a JSONL file and the files it names."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowrl.backbones.base import Backbone
from flowrl.errors import UserError
from flowrl.offline.format import Picture, append, rows_file
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.utils.images import to_tensor

REWARD = "preference"
MEMBERS = ("chosen", "rejected")
SHARD = 128  # pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One line of the file: the prompt, the files of two pictures, and where it stands."""

    record: PromptRecord
    chosen: Path
    rejected: Path
    where: str


def read_pairs(source: Path) -> list[Pair]:
    """The pairs of a .jsonl file: {prompt, chosen, rejected} and metadata, a line each.

    Paths of pictures are relative to the file. Raises UserError for a file that is missing, empty
    or malformed; whether the pictures are there is seen when they are loaded.
    """
    if source.suffix != ".jsonl":
        raise UserError(f"cannot read pairs {source}: expected a .jsonl file with prompt, chosen "
                        "and rejected in each line")  # fmt: skip
    records = load_prompts(source)
    lines = source.read_text(encoding="utf-8-sig").splitlines()
    numbers = (number for number, line in enumerate(lines, start=1) if line.strip())
    pairs = []
    for number, record in zip(numbers, records, strict=True):
        where = f"{source}, line {number}"
        paths = [record.metadata.get(name) for name in MEMBERS]
        if not all(isinstance(path, str) and path for path in paths):
            raise UserError(f'{where}: expected the paths of two pictures under "chosen" and '
                            '"rejected"')  # fmt: skip
        rest = {k: v for k, v in record.metadata.items() if k not in MEMBERS}
        chosen, rejected = (source.parent / str(path) for path in paths)
        pairs.append(
            Pair(
                record=replace(record, metadata=rest), chosen=chosen, rejected=rejected, where=where
            )
        )
    return pairs


def pairs_digest(source: Path) -> str:
    return blake2b(source.read_bytes(), digest_size=16).hexdigest()


def load_picture(path: Path, size: tuple[int, int]) -> Image.Image:
    """A file as an RGB picture of `size` (height, width): scaled until it covers that, then cut
    evenly on both sides. Turned upright as its camera says; what is transparent becomes white."""
    with Image.open(path) as file:
        picture = ImageOps.exif_transpose(file)
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return ImageOps.fit(
            picture.convert("RGB"), (size[1], size[0]), method=Image.Resampling.LANCZOS
        )


def load_pair(pair: Pair, size: tuple[int, int]) -> Tensor:
    """(2, 3, H, W) in [0, 1], the chosen one first. Raises UserError, naming the line, for files
    that are missing, unreadable or the same picture."""
    pictures = []
    for name in MEMBERS:
        path = getattr(pair, name)
        try:
            pictures.append(load_picture(path, size))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = "is not there" if not path.is_file() else f"cannot be read ({error})"
            raise UserError(f"{pair.where}: the {name} picture {path} {reason}") from error
    images = to_tensor(pictures)
    if torch.equal(images[0], images[1]):
        raise UserError(
            f"{pair.where}: chosen and rejected are the same picture, expected two of which one "
            "was preferred"
        )
    return images


def write_pairs(
    folder: Path, pairs: Sequence[Pair], backbone: Backbone, *, batch_size: int
) -> Iterator[list[str]]:
    """Encode and write the shards that are not whole; after each, why pairs of it were left out.

    The store must have been begun. batch_size: most pictures in the encoder at once.
    """
    for first in range(0, len(pairs), SHARD):
        part = range(first, min(first + SHARD, len(pairs)))
        if _is_whole(folder, pairs, part):
            yield []
        else:
            yield _write(folder, pairs, part, backbone, max(1, batch_size // 2))


def _is_whole(folder: Path, pairs: Sequence[Pair], part: range) -> bool:
    """The shard has every picture as its file is now; files may be gone since they were read."""
    try:
        text = rows_file(folder, part.start // SHARD).read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        found = {(row["group"], row["image"]): row["seed"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return all(
        (number, image) in found
        and (not path.is_file() or found[number, image] == file_number(path))
        for number in part
        for image, path in enumerate((pairs[number].chosen, pairs[number].rejected))
    )


def _write(
    folder: Path, pairs: Sequence[Pair], part: range, backbone: Backbone, per_batch: int
) -> list[str]:
    """Encode and write one shard, unless nothing of it can be used. -> why pairs were left out."""
    reasons: list[str] = []
    rows: list[Picture] = []
    latents: list[Tensor] = []
    for start in range(part.start, part.stop, per_batch):
        images = []
        for number in range(start, min(start + per_batch, part.stop)):
            try:
                images.append(load_pair(pairs[number], backbone.picture_size()))
                rows += _rows(pairs[number], number)
            except UserError as error:
                reasons.append(str(error))
        if images:
            latents.append(backbone.encode_images(torch.cat(images)).cpu())
    if rows:
        append(folder, part.start // SHARD, torch.cat(latents), rows)
    return reasons


def _rows(pair: Pair, number: int) -> Iterator[Picture]:
    for image, path in enumerate((pair.chosen, pair.rejected)):
        yield Picture(
            record=pair.record,
            group=number,
            image=image,
            valid=True,
            scores=[1.0 - image],
            seed=file_number(path),
            iteration=number // SHARD,
            root=image,
        )


def file_number(path: Path) -> int:
    """63 bits that stand for what is in a file; they fit a signed column."""
    return int.from_bytes(blake2b(path.read_bytes(), digest_size=8).digest(), "big") >> 1
