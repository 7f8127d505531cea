"""The images that a person is asked about, and the features that they are compared by."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from flowrl.errors import UserError
from flowrl.scoring.files import labelled_images
from flowrl.utils.files import load_state, save_state
from flowrl.utils.images import to_tensor
from flowrl.utils.progress import Steps
from flowrl.utils.untrusted import is_readable

FEATURES = "features.safetensors"
KIND = "cells, whole and palette"  # of features that were saved
GRID = 4  # cells of the autoencoder's latents, each way
LEVELS = 3  # of each of red, green and blue in the palette
MOST = 64  # features that are kept
BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Images, several of each prompt."""

    folder: Path
    files: tuple[str, ...]  # (N,) below the folder
    texts: tuple[str, ...]  # (N,) the prompts
    numbers: tuple[int, ...]  # (N,) of the prompts
    features: Tensor  # (N, D) float32, of mean 0 and at most unit spread; D = 0: not looked at


def read_candidates(folder: Path, autoencoder: Any | None) -> Candidates:
    """Read a folder of images that says their prompts; compute features, or find them there.

    Args:
        folder: in GenEval's layout, or with metadata.jsonl (see `labelled_images`).
        autoencoder: encodes images (B, 3, H, W) in [0, 1] into latents (B, C, h, w); images of
            other sizes are made as large as it says in `size`, (height, width). None looks at no
            image.

    Raises UserError for a folder without prompts, and when no prompt has two images.
    """
    images = labelled_images(folder)
    if images is None:
        raise UserError(
            f"{folder} does not say what its images show: expected 00000/metadata.jsonl beside "
            "00000/samples, or metadata.jsonl with file_name and prompt"
        )
    for image in images:
        if not is_readable(image.path, inside=folder):
            raise UserError(f"{image.path} is no image file inside of {folder}: leave its row out")
    texts = tuple(image.prompt for image in images)
    order = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    numbers = tuple(order[text] for text in texts)
    if len(order) == len(texts):
        raise UserError(f"no prompt of {folder} has two images, and votes compare two of a prompt")
    files = tuple(image.path.relative_to(folder).as_posix() for image in images)
    features = torch.zeros(len(files), 0)
    if autoencoder is not None:
        features = _features(folder, files, autoencoder)
    return Candidates(folder=folder, files=files, texts=texts, numbers=numbers, features=features)


def _features(folder: Path, files: Sequence[str], autoencoder: Any) -> Tensor:
    path = folder / FEATURES
    if path.is_file():
        saved = load_state(path)
        if saved["files"] == list(files) and saved.get("kind") == KIND:
            return saved["features"]
    latents, palettes = [], []
    with Steps("looking", -(-len(files) // BATCH)) as steps:
        for start in range(0, len(files), BATCH):
            names = files[start:][:BATCH]
            batch = torch.cat([_image(folder / name, autoencoder.size) for name in names])
            latents.append(autoencoder(batch).float().cpu())
            palettes.append(palette(batch))
            steps.advance()
    features = compressed(described(torch.cat(latents), torch.cat(palettes)))
    save_state(path, {"kind": KIND, "files": list(files), "features": features})
    return features


def _image(path: Path, size: tuple[int, int]) -> Tensor:
    try:
        with Image.open(path) as image:
            pixels = to_tensor([image.convert("RGB")])
    except (OSError, UnidentifiedImageError) as error:
        raise UserError(f"{path} is no image that can be read: {error}") from error
    if pixels.shape[-2:] != size:
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    return pixels


def palette(images: Tensor) -> Tensor:
    """Return the square roots of the shares of LEVELS^3 colours in images (N, 3, H, W). (N, D)

    images: in [0, 1]. Of roots, two images differ by Hellinger's distance of their colours.
    """
    levels = (images * LEVELS).long().clamp(max=LEVELS - 1).flatten(2)  # (N, 3, H * W)
    colours = levels[:, 0] * LEVELS**2 + levels[:, 1] * LEVELS + levels[:, 2]
    shares = torch.zeros(len(images), LEVELS**3, dtype=torch.float64)
    each = torch.ones_like(colours, dtype=torch.float64) / colours.shape[1]
    return shares.scatter_add_(1, colours, each).sqrt()


def described(latents: Tensor, palettes: Tensor) -> Tensor:
    """Return what is where in an image, and what is in it wherever it is. (N, D)

    latents: (N, C, h, w). The first part are means over a grid's cells, for a taste in layouts; the
    next each channel's mean, spread and extremes, for one in amounts and styles; the last is the
    palette (N, D'). Few votes would not find these in cells. Every part has the same spread in all.
    """
    cells = latents.flatten(2)  # (N, C, h * w)
    parts = [
        F.adaptive_avg_pool2d(latents, GRID).flatten(1),
        cells.mean(2),
        cells.std(2),
        cells.quantile(0.1, 2),
        cells.quantile(0.9, 2),
        palettes,
    ]
    centred = [part.double() - part.double().mean(0) for part in parts]
    return torch.cat([x / x.square().sum(1).mean().sqrt().clamp(min=1e-12) for x in centred], 1)


def compressed(x: Tensor) -> Tensor:
    """Return the principal components of rows (N, D), at most MOST, the widest with spread 1."""
    centred = x.double() - x.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    kept = s[:MOST] > 1e-6 * s[:1].clamp(min=1e-12)
    parts = (u * s)[:, :MOST][:, kept]
    spread = parts.std(0).max().clamp(min=1e-12) if parts.numel() else 1.0
    return (parts / spread).float()
