"""Images of the tiny world's prompts, drawn with Pillow.

Shapes are drawn at twice the size and reduced with Lanczos; words use the typeface that Pillow
carries (Aileron Regular by Sora Sagano, CC0). What has no named colour is black; places are drawn
at random on a grid of 16 pixels, the size of a patch of the tiny transformers; sizes follow from
the number of objects. With places and colours free, a transformer of three million weights drew no
whole shape after 3,900 training steps; on a grid of 8 it never learned two colours in one prompt.
"""

import functools
import math
import random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flowrl.tiny.world import Prompt

SIZE = 64  # pixels a side
SCALE = 2  # supersampling
PALETTE = {
    "red": (222, 40, 40),
    "yellow": (242, 204, 32),
    "green": (40, 164, 64),
    "blue": (40, 84, 224),
    "purple": (146, 52, 184),
    "black": (28, 28, 28),
}
PAPER = (240, 240, 240)
INK = "black"  # of everything without a named colour
RADII = {1: 14, 2: 12, 3: 7, 4: 7}  # pixels, by number of objects
GRID = 16  # pixels
GAP = 2  # pixels at least between two bounding boxes, and to the border

Spot = tuple[int, int, int]  # centre x, centre y, radius, in pixels


def draw(prompt: Prompt, rng: random.Random) -> np.ndarray:
    """An image that satisfies the prompt: (64, 64, 3) uint8."""
    canvas = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), PAPER)
    pen = ImageDraw.Draw(canvas)
    if prompt["tag"] == "ocr":
        _word(pen, prompt["ocr_text"])
    else:
        _objects(pen, prompt["include"], rng)
    return np.asarray(canvas.resize((SIZE, SIZE), Image.Resampling.LANCZOS))


def _objects(pen: ImageDraw.ImageDraw, include: list[dict], rng: random.Random) -> None:
    wanted = [entry for entry in include for _ in range(entry["count"])]
    related = "position" in include[-1]
    spots = _relate(include, rng) if related else _scatter(len(wanted), rng)
    for entry, spot in zip(wanted, spots, strict=True):
        _shape(pen, entry["class"], spot, PALETTE[entry.get("color", INK)])


def _spot(count: int, rng: random.Random) -> Spot:
    r = RADII[count]
    places = [p for p in range(GRID, SIZE, GRID) if r + GAP <= p <= SIZE - r - GAP]
    return rng.choice(places), rng.choice(places), r


def _apart(a: Spot, b: Spot) -> bool:
    return max(abs(a[0] - b[0]), abs(a[1] - b[1])) >= a[2] + b[2] + GAP


def _scatter(count: int, rng: random.Random) -> list[Spot]:
    """`count` places whose boxes do not touch; starts over when the canvas is full."""
    while True:
        spots: list[Spot] = []
        for _ in range(40):
            spot = _spot(count, rng)
            if all(_apart(spot, other) for other in spots):
                spots.append(spot)
            if len(spots) == count:
                return spots


def _relate(include: list[dict], rng: random.Random) -> list[Spot]:
    """Places for [B, A] such that A stands in the asked relation to B, clearly along one axis."""
    relation = include[-1]["position"][0]
    axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[
        relation
    ]
    while True:
        b, a = _scatter(2, rng)
        along, across = sign * (a[axis] - b[axis]), abs(a[1 - axis] - b[1 - axis])
        if along > 0 and across < 0.6 * along:
            return [b, a]


def _polygon(spot: Spot, corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    x, y, r = spot
    return [((x + r * u) * SCALE, (y + r * v) * SCALE) for u, v in corners]


def _star_corners() -> list[tuple[float, float]]:
    angles = [(-90 + 36 * k, 1.08 if k % 2 == 0 else 0.46) for k in range(10)]
    return [(s * math.cos(math.radians(a)), s * math.sin(math.radians(a))) for a, s in angles]


_ARM = 0.34  # half the width of the cross's arms
CORNERS = {
    "square": [(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
    "triangle": [(0, -1), (1, 0.85), (-1, 0.85)],
    "star": _star_corners(),
    "cross": [
        (-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM),
        (_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM),
    ],
}  # fmt: skip


def _shape(pen: ImageDraw.ImageDraw, shape: str, spot: Spot, color: tuple[int, int, int]) -> None:
    if shape in CORNERS:
        pen.polygon(_polygon(spot, CORNERS[shape]), fill=color)
        return
    box = [c for corner in _polygon(spot, [(-1, -1), (1, 1)]) for c in corner]
    if shape == "circle":
        pen.ellipse(box, fill=color)
    else:
        pen.ellipse(box, outline=color, width=round(0.42 * spot[2] * SCALE))


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _word(pen: ImageDraw.ImageDraw, text: str) -> None:
    width = 58 * SCALE
    font = _font(min(30 * SCALE, int(40 * width / pen.textlength(text, font=_font(40)))))
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font, stroke_width=1)
    x, y = (SIZE * SCALE - (right - left)) / 2, (SIZE * SCALE - (bottom - top)) / 2
    # A thin stroke: at 64 pixels the regular weight is grey rather than ink.
    pen.text((x - left, y - top), text, font=font, fill=PALETTE[INK], stroke_width=1)
