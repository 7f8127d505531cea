"""A second judge of the tiny world: a small network that learned from drawn images alone.

It names what stands in each quarter of an image (shape, colour, size), or that it is nothing
that the drawing program draws, and the letters of a word. It has never seen a generated image,
and shares no code with the classical detector that quickstarts train on. It was made by
`python -m scripts.pretrain_tiny.judge`.
"""

import functools
from collections.abc import Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .detectors.tiny_shapes import SHAPES
from .fixtures import fixture, shapes
from .networks.loading import small_network
from .tiny_palette import COLORS

SIDE = 64  # pixels
QUARTERS = ("top left", "top right", "bottom left", "bottom right")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVXYZ"
SIZES = ("", "small")
# What a quarter holds: nothing, something that is no clean object, or one of 72 objects.
OBJECTS = (None, "other", *product(SHAPES, COLORS, SIZES))
SIGNS = (None, "other", *LETTERS)  # what a column holds
WEIGHTS = Path(__file__).parent / "weights" / "tiny_judge.safetensors"
BATCH = 256


class JudgeNetwork(nn.Module):
    """Reads quarters and columns of images: two small convolutional networks."""

    def __init__(self) -> None:
        super().__init__()
        self.quarters = _reader(len(OBJECTS), (32, 32))
        self.columns = _reader(len(SIGNS), (32, 16))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Score images (B, 3, 64, 64) in [0, 1]: logits (B, 4, objects) and (B, 4, signs)."""
        x = images * 2 - 1
        quarters = torch.stack(
            [x[..., r : r + 32, c : c + 32] for r in (0, 32) for c in (0, 32)], 1
        )
        columns = torch.stack([x[..., 16:48, c : c + 16] for c in range(0, SIDE, 16)], 1)
        return tuple(
            reader(parts.flatten(0, 1)).unflatten(0, parts.shape[:2])
            for reader, parts in ((self.quarters, quarters), (self.columns, columns))
        )


def _reader(classes: int, size: tuple[int, int]) -> nn.Module:
    """Return a network for patches of `size` (height, width) in pixels."""
    width = 24
    flat = 2 * width * (size[0] // 8) * (size[1] // 8)
    return nn.Sequential(
        nn.Conv2d(3, width, 5, stride=2, padding=2),
        nn.GELU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(flat, 96),
        nn.GELU(),
        nn.Linear(96, classes),
    )


class TinyJudge:
    """1 when an image shows all that the prompt asks for, and nothing else; 0 when not.

    For prompts of the tiny world: `include` in GenEval's form, with "size" and "place" where
    they are asked, or `ocr_text`. NaN for other prompts.
    """

    name = "tiny_judge"
    bounds = (0.0, 1.0)
    differentiable = False
    version = "tiny-judge-1"

    @functools.cached_property
    def _network(self) -> JudgeNetwork:
        return small_network(JudgeNetwork, WEIGHTS)

    def applies(self, prompt: str, metadata: dict) -> bool:
        return bool(metadata.get("include")) or len(metadata.get("ocr_text", "")) == 4

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """Score images (B, 3, H, W) in [0, 1]: (B,) float32 of 0 and 1."""
        read = self.read(images)
        return torch.tensor(
            [
                float(meets(quarters, signs, wanted)) if self.applies("", wanted) else torch.nan
                for (quarters, signs), wanted in zip(read, metadata, strict=True)
            ]
        )

    def fixtures(self) -> list[dict]:
        red, ring = ("circle", "red"), ("ring", "blue")
        wanted = {"include": [{"class": "circle", "count": 1, "color": "red"}]}
        beside = {"include": [{"class": "ring", "count": 1}, {"class": "circle", "count": 1}]}
        beside["include"][1]["position"] = ["left of", 0]
        right, mirrored = shapes([red, ring, None, None]), shapes([ring, red, None, None])
        alone, other = shapes([None, red, None, None]), shapes([None, ring, None, None])
        return [
            fixture("what is asked for scores above another", alone, other, "a red circle", wanted),
            fixture("nothing else may be there", alone, right, "a red circle", wanted),
            fixture("sides count", right, mirrored, "a circle left of a ring", beside),
        ]

    def read(self, images: Tensor) -> list[tuple[list[Any], list[Any]]]:
        """Return what stands in the quarters and in the columns of each image."""
        levels = (images.float().cpu().clamp(0, 1) * 255).round() / 255
        if levels.shape[-2:] != (SIDE, SIDE):
            levels = F.interpolate(levels, (SIDE, SIDE), mode="area")
        read = []
        for part in levels.split(BATCH):
            quarters, columns = (logits.argmax(-1).tolist() for logits in self._network(part))
            read += [
                ([OBJECTS[i] for i in q], [SIGNS[i] for i in c])
                for q, c in zip(quarters, columns, strict=True)
            ]
        return read


def meets(quarters: Sequence[Any], signs: Sequence[Any], wanted: dict) -> bool:
    """Return whether what was read is what a prompt asks for, and nothing else."""
    if "ocr_text" in wanted:
        return list(signs) == list(wanted["ocr_text"])
    objects = [(name, read) for name, read in zip(QUARTERS, quarters, strict=True) if read]
    entries = [entry for entry in wanted["include"] for _ in range(entry["count"])]
    if len(objects) != len(entries) or any(read == "other" for _, read in objects):
        return False
    return any(_fits(entries, order) for order in permutations(objects))


def _fits(entries: list[dict], objects: Sequence[tuple[str, tuple[str, str, str]]]) -> bool:
    """Return whether each object, with its quarter, is what the entry of its place asks for."""
    places = [place for place, _ in objects]
    return all(
        entry["class"] == shape
        and entry.get("color", color) == color
        and entry.get("size", size) == size
        and entry.get("place", place) == place
        and ("position" not in entry or _related(place, places, entry["position"]))
        for entry, (place, (shape, color, size)) in zip(entries, objects, strict=True)
    )


def _related(place: str, places: list[str], position: Sequence) -> bool:
    """Return whether a quarter lies as asked to that of an earlier entry, along one axis."""
    relation, index = position
    row, column = divmod(QUARTERS.index(place), 2)
    other_row, other_column = divmod(QUARTERS.index(places[index]), 2)
    return {
        "left of": row == other_row and column < other_column,
        "right of": row == other_row and column > other_column,
        "above": column == other_column and row < other_row,
        "below": column == other_column and row > other_row,
    }[relation]
