"""How much an image looks like the one that its prompt names."""

import base64
import io
import math
import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from .fixtures import fixture, square
from .images import pngs
from .networks.likeness import likeness

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 2**25  # of a reference: a camera's image has fewer
_DATA = "data:image/"


class Similarity:
    """Similarity to the image of metadata["reference"], 1 = the same.

    The reference is an image itself, as a data URL (data:image/png;base64,...), or a file in
    `folder`: its path there, or a whole one that ends up there. Nothing else is opened, so without
    a folder no file is: prompts may be others', as on a server. PNG, JPEG and WebP, brought to the
    size of the image. measure: "ssim" (at full size, scikit-image), "pixels", "clip", ..., see
    `networks.likeness`.
    """

    name = "similarity"
    required_metadata = ("reference",)
    bounds = (-1.0, 1.0)
    differentiable = False

    def __init__(
        self,
        measure: str = "ssim",
        *,
        folder: str | None = None,
        device: str = "auto",
        dtype: str = "fp32",
    ):
        self.likeness = likeness(measure, device=device, dtype=dtype)
        self.folder = folder
        self.version = f"similarity-1/{self.likeness.version}"

    def check(self, prompt: str, metadata: dict) -> None:
        """Raises ValueError when the reference is no image that can be opened, or too large a
        one. Its pixels are not unpacked."""
        self._opened(metadata["reference"], None)

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict]
    ) -> tuple[Tensor, dict[int, str]]:
        """images (B, 3, H, W) in [0, 1] -> scores (B,) float32 and why some are NaN, by row."""
        size = images.shape[-1], images.shape[-2]
        names = [data["reference"] for data in metadata]
        opened: dict[str, Tensor | str] = {}
        for name in dict.fromkeys(names):
            try:
                opened[name] = self._opened(name, size)
            except ValueError as error:
                opened[name] = str(error)
        reasons = {i: why for i, n in enumerate(names) if isinstance(why := opened[n], str)}
        rows = [row for row in range(len(names)) if row not in reasons]
        scores = torch.full((len(names),), math.nan)
        if rows:
            references = torch.stack([torch.as_tensor(opened[names[row]]) for row in rows])
            scores[rows] = self.likeness.pairs(images[rows].detach().cpu(), references)
        return scores, reasons

    def _opened(self, name: str, size: tuple[int, int] | None) -> Tensor:
        """(3, H, W) in [0, 1] of the wanted (width, height); with None only looked at, empty."""
        from PIL import Image

        try:
            with self._source(name) as source, Image.open(source, formats=FORMATS) as file:
                if file.width * file.height > MAX_PIXELS:
                    raise ValueError(
                        f"it has {file.width} x {file.height} pixels, at most {MAX_PIXELS} are read"
                    )
                if size is None:
                    file.verify()
                    return torch.empty(0)
                image = file.convert("RGB")
        except Exception as error:  # Pillow has no common class for what it finds in broken files
            raise ValueError(
                f'metadata["reference"] {str(name)[:80]!r} cannot be opened as an image ({error})'
            ) from error
        if image.size != size:
            image = image.resize(size, Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255

    def _source(self, name: str) -> BinaryIO:
        if not isinstance(name, str):
            raise ValueError("expected text")
        if name.startswith(_DATA):
            _, _, data = name.partition(";base64,")
            return io.BytesIO(base64.b64decode(data, validate=True))
        if self.folder is None:
            raise ValueError("without folder it must be a data URL; give the reward its folder")
        folder = Path(self.folder).resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise ValueError("it lies outside the reward's folder")
        return _plain_file(path)

    def fixtures(self) -> list[dict]:
        """What `flowrl reward-check` shows."""
        red, blue = square("red", 64), square("blue", 64)
        data = base64.b64encode(pngs(red[None], 64)[0]).decode()
        reference = {"reference": f"{_DATA}png;base64,{data}"}
        return [fixture("the reference itself scores above another", red, blue, "", reference)]


def _plain_file(path: Path) -> BinaryIO:
    """Opened without waiting, as a pipe would have it. Raises ValueError for what is no file."""
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return os.fdopen(opened, "rb")
    os.close(opened)
    raise ValueError("it is no plain file")
