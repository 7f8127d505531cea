"""How much a picture looks like the one that its prompt names."""

import base64
import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rewards.fixtures import fixture, square
from rewards.images import pngs
from rewards.networks.likeness import likeness

_DATA = "data:image/"


class Similarity:
    """Similarity to the picture of metadata["reference"], 1 = the same.

    The reference is a file, or a picture itself as a data URL (data:image/png;base64,...); it is
    brought to the size of the picture. measure: "ssim" (at full size, scikit-image), "pixels",
    "clip", ..., see `rewards.likeness.likeness`. folder: where relative paths start; with one given
    nothing outside it is opened, as it should be when others send the prompts.
    """

    name = "similarity"
    required_metadata = ("reference",)
    bounds = (-1.0, 1.0)
    differentiable = False
    scope = "sample"

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
        """Raises ValueError when the reference is no picture that can be opened."""
        self._reference(metadata["reference"], None)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict]) -> Tensor:
        """images (B, 3, H, W) in [0, 1] -> (B,) float32. Raises ValueError for a reference that
        cannot be opened."""
        size = images.shape[-1], images.shape[-2]
        names = [data["reference"] for data in metadata]
        opened = {name: self._reference(name, size) for name in dict.fromkeys(names)}
        references = torch.stack([opened[name] for name in names])
        return self.likeness.pairs(images.detach().cpu(), references)

    def _reference(self, name: str, size: tuple[int, int] | None) -> Tensor:
        """(3, H, W) in [0, 1], of the wanted (width, height) or its own."""
        from PIL import Image

        try:
            with Image.open(self._source(name)) as file:
                picture = file.convert("RGB")
        except (OSError, ValueError) as error:
            raise ValueError(
                f'metadata["reference"] {str(name)[:80]!r} cannot be opened as a picture ({error}):'
                " expected a path, or a data URL with base64"
            ) from error
        if size is not None and picture.size != size:
            picture = picture.resize(size, Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255

    def _source(self, name: str) -> Path | io.BytesIO:
        if name.startswith(_DATA):
            _, _, data = name.partition(";base64,")
            return io.BytesIO(base64.b64decode(data, validate=True))
        if self.folder is None:
            return Path(name)
        folder = Path(self.folder).resolve()
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise ValueError("it lies outside the reward's folder")
        return path

    def fixtures(self) -> list[dict]:
        """What `flowrl reward-check` shows."""
        red, blue = square("red", 64), square("blue", 64)
        data = base64.b64encode(pngs(red[None], 64)[0]).decode()
        reference = {"reference": f"{_DATA}png;base64,{data}"}
        return [fixture("the reference itself scores above another", red, blue, "", reference)]
