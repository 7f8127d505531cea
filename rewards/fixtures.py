"""Small images whose order is known, to see that a reward works before anything learns from it.

Drawn with Pillow and the typeface it carries (Aileron Regular by Sora Sagano, CC0). All are
(3, H, W) float32 in [0, 1], multiples of 1/255, the same at every call.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .tiny_palette import COLORS, PAPER

NAMED = COLORS | {
    "orange": (240, 130, 30),
    "pink": (240, 130, 180),
    "brown": (120, 72, 36),
    "white": (255, 255, 255),
}
SUPERSAMPLING = 4
SPOTS = {  # centres on a unit square, in reading order, and the radius that fits
    1: ([(0.5, 0.5)], 14 / 64),
    2: ([(0.25, 0.5), (0.75, 0.5)], 12 / 64),
    3: ([(0.25, 0.25), (0.75, 0.25), (0.5, 0.75)], 7 / 64),
    4: ([(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)], 12.5 / 64),
}
ARM = 0.34  # half the width of the cross's arms
RING = 0.42  # width of the ring, in radii
TIPS = [(-90 + 36 * k, 0.46 if k % 2 else 1.08) for k in range(10)]  # of the star: angle, radius
ALL_SIGNS = [(1, 1), (-1, 1), (-1, -1), (1, -1)]
CORNERS = {
    "square": [(0.88 * u, 0.88 * v) for u, v in ALL_SIGNS],
    "triangle": [(0, -1), (1, 0.85), (-1, 0.85)],
    "star": [(r * math.cos(math.radians(a)), r * math.sin(math.radians(a))) for a, r in TIPS],
}


def fixture(
    says: str,
    better: Tensor,
    worse: Tensor,
    prompt: str = "",
    metadata: dict | None = None,
    more: Sequence[Tensor] = (),
) -> dict:
    """Return two images (3, H, W) of one prompt, the first of which must score above the second.

    says: the claim, for people ("the right word scores above the wrong one"). more: further
    images of the group, for rewards that compare images of one prompt. All are of one size.
    """
    images = torch.stack([better, worse, *more])
    return {"says": says, "prompt": prompt, "metadata": metadata or {}, "images": images}


def square(color: str, size: int = 224) -> Tensor:
    """Return a square of a colour in NAMED on light paper."""
    canvas, pen = _canvas(size)
    _polygon(pen, size, (0.5, 0.5), 0.28, CORNERS["square"], NAMED[color])
    return _tensor(canvas, size)


def blank(size: int = 224) -> Tensor:
    """Return light paper, empty."""
    return _tensor(_canvas(size)[0], size)


def noise(size: int = 224, seed: int = 0) -> Tensor:
    """Return every pixel at random, by a generator of its own."""
    levels = np.random.default_rng(seed).integers(0, 256, (3, size, size), dtype=np.uint8)
    return torch.from_numpy(levels).float() / 255


def word(text: str, size: int = 128) -> Tensor:
    """Return a text in dark letters on one line on light paper, as large as fits."""
    canvas, pen = _canvas(size)
    side = size * SUPERSAMPLING
    left, top, right, bottom = pen.textbbox((0, 0), text, font=ImageFont.load_default(100))
    largest = min(0.88 * side / max(right - left, 1), 0.5 * side / max(bottom - top, 1)) * 100
    font = ImageFont.load_default(int(min(largest, side / 3)))
    stroke = side // 200  # below 100 pixels the regular weight is grey rather than ink
    middle, ink = (side / 2, side / 2), COLORS["black"]
    pen.text(middle, text, font=font, fill=ink, anchor="mm", stroke_width=stroke)
    return _tensor(canvas, size)


def shapes(objects: Sequence[tuple[str, str] | None], size: int = 64) -> Tensor:
    """Return one to four upright shapes of the tiny world, (shape, colour) in reading order.

    Two stand side by side, the first on the left; four fill the quarters. None is an empty place.
    """
    canvas, pen = _canvas(size)
    spots, radius = SPOTS[len(objects)]
    for item, spot in zip(objects, spots, strict=True):
        if item is not None:
            _shape(pen, size, item[0], spot, radius, NAMED[item[1]])
    return _tensor(canvas, size)


# --- fixtures of several rewards ------------------------------------------------------------------


def red_and_blue() -> list[dict]:
    """Return each of two colours above the other when the prompt asks for it: no fixed liking
    passes.
    """
    return [
        fixture(f"a {right} square scores above a {other} one when {right} is asked for",
                square(right), square(other), f"a {right} square")
        for right, other in (("red", "blue"), ("blue", "red"))
    ]  # fmt: skip


def quality() -> list[dict]:
    """Return a clean image and a noisy one, for rewards that do not read the prompt."""
    return [fixture("a clean square is of better quality than noise", square("red"), noise())]


# --- drawing --------------------------------------------------------------------------------------


def _canvas(size: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    canvas = Image.new("RGB", (size * SUPERSAMPLING, size * SUPERSAMPLING), PAPER)
    return canvas, ImageDraw.Draw(canvas)


def _tensor(canvas: Image.Image, size: int) -> Tensor:
    small = canvas.resize((size, size), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float().contiguous() / 255


def _polygon(pen, size, spot, radius, corners, color) -> None:
    side = size * SUPERSAMPLING
    (x, y) = spot
    pen.polygon([((x + radius * u) * side, (y + radius * v) * side) for u, v in corners], color)


def _shape(pen, size, shape, spot, radius, color) -> None:
    side = size * SUPERSAMPLING
    box = [(c + s * radius) * side for s in (-1, 1) for c in spot]
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "ring":
        pen.ellipse(box, outline=color, width=round(RING * radius * side))
    elif shape == "cross":
        for u, v in ((1, ARM), (ARM, 1)):
            arm = [(u * a, v * b) for a, b in ALL_SIGNS]
            _polygon(pen, size, spot, radius, arm, color)
    else:
        _polygon(pen, size, spot, radius, CORNERS[shape], color)
