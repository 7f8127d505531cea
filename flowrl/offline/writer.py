"""Filling a store: a sampler's iterations become shards, one after the other."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowrl.backbones.base import Backbone
from flowrl.errors import UserError
from flowrl.offline.format import (
    ABOUT,
    PAIRS,
    DatasetMetadata,
    OfflineDataset,
    StoredImage,
    append,
    create,
    finished_shards,
    open_store,
    rows_file,
)
from flowrl.prompts.records import PromptRecord, load_prompts
from flowrl.sampling.rollout import Stopwatch, occurrences
from flowrl.sampling.source import Sampler
from flowrl.trajectory import Rollout
from flowrl.utils.distributed import Runtime
from flowrl.utils.images import to_tensor


def fill(
    folder: Path,
    about: DatasetMetadata,
    sampler: Sampler,
    *,
    shards: int,
    first: int = 0,
    watch: Stopwatch | None = None,
    advance: Callable[[Rollout], None] = lambda rollout: None,
) -> OfflineDataset:
    """Make those of the shards 0, 1, ... that are missing, from the sampler's iterations.

    Shard k is iteration `first` + k, whatever was made before, by however many processes. All of
    them call this; the main one writes. advance: is told of each new shard.
    """
    runtime = sampler.stage.runtime
    if runtime.is_main:
        create(folder, about)
    runtime.wait()
    missing = sorted(set(range(shards)) - set(finished_shards(folder)))
    runtime.wait()  # nobody writes before all have looked
    for shard in missing:
        iteration = first + shard
        rollout = sampler.collect(iteration, watch or Stopwatch())
        x0 = gather_latents(rollout.tree.leaves(), runtime)
        if runtime.is_main:
            images = list(_images(rollout, sampler, iteration, shard))
            append(folder, shard, x0, images)
        advance(rollout)
    runtime.wait()
    return open_store(folder)


def gather_latents(x0: Tensor, runtime: Runtime) -> Tensor:
    """The latents of all processes, in order; as bytes, since back ends differ in formats."""
    if runtime.world_size == 1:
        return x0
    raw = x0.contiguous().view(torch.uint8)
    return runtime.gather(raw).view(x0.dtype)


def _images(
    rollout: Rollout, sampler: Sampler, iteration: int, shard: int
) -> Iterator[StoredImage]:
    """The rows of all processes' images; groups are numbered through the whole store."""
    records = sampler.prompts.at(iteration)
    before = occurrences(records)
    groups, leaves = rollout.group.tolist(), len(rollout.tree.leaf)
    seen: list[int] = [0] * len(records)
    size = len(groups) // len(records)
    scores, valid = rollout.scores.tolist(), rollout.valid.tolist()
    trees = size // leaves
    # Places of a group's trees among all that were drawn of it, and how many those were.
    chosen = torch.arange(trees).expand(len(records), -1)
    if rollout.explored is not None:
        chosen, trees = rollout.explored.chosen, rollout.explored.proxy.shape[1]
    for i, group in enumerate(groups):
        yield StoredImage(
            record=records[group],
            group=shard * len(records) + group,
            image=seen[group],
            valid=valid[i],
            scores=scores[i],
            seed=sampler.seed,
            iteration=iteration,
            root=before[group] * trees + int(chosen[group, seen[group] // leaves]),
        )
        seen[group] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """Draws a store anew with the policy as it is: as many groups, from prompts not yet drawn.

    like: the store that is replaced; about: what is said of the new ones; every: iterations
    between them, so that each has iterations of the sampler for itself. Raises UserError when
    the store holds images that no policy drew.
    """

    like: OfflineDataset
    about: DatasetMetadata
    sampler: Sampler
    every: int

    def __post_init__(self) -> None:
        if PAIRS in self.like.about.recipe:
            raise UserError(
                f"{self.like.folder} holds pairs of given images, which the policy cannot draw "
                "anew: set rollout.store.refresh_every to null"
            )

    @property
    def shards(self) -> int:
        return -(-len(self.like.groups) // self.sampler.prompts.per_iteration)

    def __call__(self, iteration: int, folder: Path) -> OfflineDataset:
        about = replace(self.about, lora={"iteration": iteration})
        runtime = self.sampler.stage.runtime
        # Shards that were begun before the recipe changed do not belong to this policy.
        if runtime.is_main and (folder / ABOUT).exists():
            if DatasetMetadata.read(folder).text() != about.text():
                shutil.rmtree(folder)
        first = iteration // self.every * self.shards
        return fill(folder, about, self.sampler, shards=self.shards, first=first)

    def finished(self, folder: Path) -> bool:
        return set(finished_shards(folder)) >= set(range(self.shards))


# --- Pairs of images of which a person chose one, from a JSONL file and the files it names ---

REWARD = "preference"
MEMBERS = ("chosen", "rejected")
SHARD = 128  # pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One line of the file: the prompt, the files of two images, and where it stands."""

    record: PromptRecord
    chosen: Path
    rejected: Path
    where: str


def read_pairs(source: Path) -> list[Pair]:
    """The pairs of a .jsonl file: {prompt, chosen, rejected} and metadata, a line each.

    Paths of images are relative to the file. Raises UserError for a file that is missing, empty
    or malformed; whether the images are there is seen when they are loaded.
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
            raise UserError(f'{where}: expected the paths of two images under "chosen" and '
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


def load_image(path: Path, size: tuple[int, int]) -> Image.Image:
    """A file as an RGB image of `size` (height, width): scaled until it covers that, then cut
    evenly on both sides. Turned upright as its camera says; what is transparent becomes white."""
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return ImageOps.fit(
            image.convert("RGB"), (size[1], size[0]), method=Image.Resampling.LANCZOS
        )


def load_pair(pair: Pair, size: tuple[int, int]) -> Tensor:
    """(2, 3, H, W) in [0, 1], the chosen one first. Raises UserError, naming the line, for files
    that are missing, unreadable or the same image."""
    loaded = []
    for name in MEMBERS:
        path = getattr(pair, name)
        try:
            loaded.append(load_image(path, size))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            reason = "is not there" if not path.is_file() else f"cannot be read ({error})"
            raise UserError(f"{pair.where}: the {name} image {path} {reason}") from error
    images = to_tensor(loaded)
    if torch.equal(images[0], images[1]):
        raise UserError(
            f"{pair.where}: chosen and rejected are the same image, expected two of which one "
            "was preferred"
        )
    return images


def write_pairs(
    folder: Path, pairs: Sequence[Pair], backbone: Backbone, *, batch_size: int
) -> Iterator[list[str]]:
    """Encode and write the shards that are not whole; after each, why pairs of it were left out.

    The store must have been begun. batch_size: most images in the encoder at once.
    """
    for first in range(0, len(pairs), SHARD):
        part = range(first, min(first + SHARD, len(pairs)))
        if _is_whole(folder, pairs, part):
            yield []
        else:
            yield _write(folder, pairs, part, backbone, max(1, batch_size // 2))


def _is_whole(folder: Path, pairs: Sequence[Pair], part: range) -> bool:
    """The shard has every image as its file is now; files may be gone since they were read."""
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
    rows: list[StoredImage] = []
    latents: list[Tensor] = []
    for start in range(part.start, part.stop, per_batch):
        images = []
        for number in range(start, min(start + per_batch, part.stop)):
            try:
                images.append(load_pair(pairs[number], backbone.image_size()))
                rows += _rows(pairs[number], number)
            except UserError as error:
                reasons.append(str(error))
        if images:
            latents.append(backbone.encode_images(torch.cat(images)).cpu())
    if rows:
        append(folder, part.start // SHARD, torch.cat(latents), rows)
    return reasons


def _rows(pair: Pair, number: int) -> Iterator[StoredImage]:
    for image, path in enumerate((pair.chosen, pair.rejected)):
        yield StoredImage(
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
