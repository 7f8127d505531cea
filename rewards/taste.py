"""A voter's taste as a reward: a linear model of image features, learned from votes on pairs.

`flowrl vote --train` writes it. It knows colours, where they are and how busy the image is, and
neither the prompt nor what objects there are: train on it beside a reward that reads the prompt.
"""

import functools
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

FILE = "taste.safetensors"
SIDE = 64  # pixels to which images are resized
GRID = 8  # cells, each way
LEVELS = 3  # of each of red, green and blue in the palette
# Features of each part of a description: colours and edges of cells, means, spreads, palette.
WIDTHS = (3 * GRID**2, GRID**2, 3, 3, LEVELS**3)


class Taste:
    """The probability that an image is preferred to an average one, 0 to 1.

    path: a file `taste.safetensors`, or the folder of votes that has it.
    """

    name = "taste"
    bounds = (0.0, 1.0)

    def __init__(self, *, path: str = "votes"):
        self.path = Path(path)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        centre, weights = self._model
        features = describe(images) - centre.to(images.device)
        return torch.sigmoid(features @ weights.to(images.device))

    @property
    def version(self) -> str:
        """The digest of the file: more votes are another reward."""
        data = self._file.read_bytes() if self._file.is_file() else b""
        return f"taste-1/{hashlib.blake2b(data, digest_size=8).hexdigest()}"

    @property
    def _file(self) -> Path:
        return self.path / FILE if self.path.is_dir() else self.path

    @functools.cached_property
    def _model(self) -> tuple[Tensor, Tensor]:
        """Return the centre and the weights of features, (P,) each."""
        if not self._file.is_file():
            raise FileNotFoundError(f"{self._file} is not there: `flowrl vote --train` writes it")
        tensors = load(self._file.read_bytes())
        return tensors["centre"], tensors["weights"]


def describe(images: Tensor) -> Tensor:
    """Return features (B, P) float32 of images (B, 3, H, W) in [0, 1].

    The colours of a grid's cells, the edges in each, and of the whole image each channel's mean and
    spread, and square roots of the shares of LEVELS^3 colours, whose distances are Hellinger's.
    """
    x = F.interpolate(images.float(), (SIDE, SIDE), mode="bilinear", antialias=True).clamp(0, 1)
    edges = (x.diff(dim=2)[..., :-1].square() + x.diff(dim=3)[:, :, :-1].square()).sum(1, True)
    parts = [
        F.adaptive_avg_pool2d(x, GRID).flatten(1),
        F.adaptive_avg_pool2d((edges + 1e-12).sqrt(), GRID).flatten(1),
        x.mean((2, 3)),
        x.std((2, 3)),
        palette(x),
    ]
    return torch.cat(parts, 1)


def palette(images: Tensor) -> Tensor:
    """Return the square roots of the shares of LEVELS^3 colours in images (B, 3, H, W). (B, D)"""
    levels = (images * LEVELS).long().clamp(max=LEVELS - 1).flatten(2)  # (B, 3, H * W)
    colours = levels[:, 0] * LEVELS**2 + levels[:, 1] * LEVELS + levels[:, 2]
    return F.one_hot(colours, LEVELS**3).float().mean(1).sqrt()
