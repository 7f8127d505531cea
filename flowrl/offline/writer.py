"""Write offline data sets: iterations of a sampler, or pairs of images that people compared."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.errors import DamagedFile, UserError
from flowrl.offline.format import (
    DatasetMetadata,
    OfflineDataset,
    append_shard,
    create_dataset,
    finished_shards,
    open_dataset,
    read_shard,
    shard_file,
)
from flowrl.offline.pairs import Pair
from flowrl.sampling.rollout import Sampler, Timer
from flowrl.trajectory import Rollout
from flowrl.utils.files import locked_folder
from flowrl.utils.images import to_tensor


def write_groups(
    folder: Path,
    metadata: DatasetMetadata,
    sampler: Sampler,
    *,
    shards: int,
    advance: Callable[[Rollout], None] = lambda rollout: None,
) -> OfflineDataset:
    """Write the missing shards of 0, 1, ...; a shard is the iteration of its number.

    All processes call this; the main one writes. advance: called after each new shard.
    """
    runtime = sampler.generator.runtime
    with locked_folder(folder, "dataset") if runtime.is_main else nullcontext():
        if runtime.is_main:
            create_dataset(folder, metadata)
        runtime.wait()
        missing = sorted(set(range(shards)) - set(finished_shards(folder)))
        runtime.wait()  # the main process writes after all have looked
        for shard in missing:
            rollout = sampler.collect(shard, Timer())
            x0 = rollout.tree.leaves()
            if runtime.world_size > 1:  # as bytes, since back ends differ in the dtypes they gather
                x0 = runtime.gather(x0.contiguous().view(torch.uint8)).view(x0.dtype)
            if runtime.is_main:
                records, groups = sampler.prompts.at(shard), rollout.group.tolist()
                append_shard(
                    folder, shard, x0, rollout.scores, [records[group] for group in groups],
                    [shard * len(records) + group for group in groups],
                )  # fmt: skip
            advance(rollout)
        runtime.wait()
        return open_dataset(folder)


# --- pairs of images ----------------------------------------------------------------------------

REWARD = "preference"
SHARD = 128  # pairs


def fit_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return an RGB image, scaled and cropped to `size` (height, width).

    It is turned upright by its EXIF data; transparent pixels become white.
    """
    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return ImageOps.fit(image.convert("RGB"), (size[1], size[0]), method=Image.Resampling.LANCZOS)


def _load_pair(pair: Pair, size: tuple[int, int]) -> Tensor:
    """Return (2, 3, H, W) in [0, 1], the chosen image first.

    Raises UserError, naming the line, for files that are missing, unreadable or the same image.
    """
    loaded = []
    for name, cell in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        try:
            with cell.open() as file:
                loaded.append(fit_image(file, size))
        except (OSError, ValueError, SyntaxError, UserError, Image.DecompressionBombError) as error:
            raise UserError(
                f"{pair.where}: cannot read the {name} image {cell}: {error}"
            ) from error
    images = to_tensor(loaded)
    if torch.equal(images[0], images[1]):
        raise UserError(f"{pair.where}: chosen and rejected are the same image")
    return images


def write_pairs(
    folder: Path, pairs: Sequence[Pair], backbone: PipelineBackbone, *, batch_size: int
) -> Iterator[list[str]]:
    """Encode and write the incomplete shards; yield why pairs of each shard were left out.

    A shard that lacks a pair is encoded again. batch_size: images in the encoder at once.
    """
    metadata = DatasetMetadata.read(folder)
    for first in range(0, len(pairs), SHARD):
        part = range(first, min(first + SHARD, len(pairs)))
        try:
            rows, _ = read_shard(shard_file(folder, first // SHARD), metadata)
        except DamagedFile:  # or missing
            rows = []
        complete = len(rows) == 2 * len(part)
        yield (
            [] if complete else _write_shard(folder, pairs, part, backbone, max(1, batch_size // 2))
        )


def _write_shard(
    folder: Path, pairs: Sequence[Pair], part: range, backbone: PipelineBackbone, per_batch: int
) -> list[str]:
    """Encode and write one shard, unless no pair of it is usable; return why pairs were not."""
    reasons: list[str] = []
    groups: list[int] = []  # a pair is a group
    latents: list[Tensor] = []
    for start in range(part.start, part.stop, per_batch):
        images = []
        for number in range(start, min(start + per_batch, part.stop)):
            try:
                images.append(_load_pair(pairs[number], backbone.image_size()))
                groups += [number, number]
            except UserError as error:
                reasons.append(str(error))
        if images:
            latents.append(backbone.encode_images(torch.cat(images)).cpu())
    if groups:
        scores = torch.tensor([[1.0], [0.0]]).repeat(len(groups) // 2, 1)  # chosen, rejected
        records = [pairs[number].record for number in groups]
        append_shard(folder, part.start // SHARD, torch.cat(latents), scores, records, groups)
    return reasons
