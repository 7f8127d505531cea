"""Images of the tiny world's prompts, drawn with Pillow.

Shapes are drawn at twice the size and reduced with Lanczos; words use the typeface that Pillow
carries (Aileron Regular by Sora Sagano, CC0). An object fills one quarter of the image, so four
image tokens of the tiny transformers; a letter fills two. What a prompt leaves open is drawn by a
published law: the quarters are equally likely, the radius and the centre vary by a pixel, an
object without a named colour is black. With free places a transformer of three million weights
drew no whole shape after 3,900 training steps.
"""

import functools
import math
import random
from itertools import permutations

import numpy as np
from flowrl_rewards.tiny_palette import COLORS, PAPER
from PIL import Image, ImageDraw, ImageFont

from flowrl.tiny.world import Prompt

SIZE = 64  # pixels a side
SCALE = 2  # supersampling
INK = "black"  # of everything without a named colour
QUARTERS = {
    "top left": (16, 16),
    "top right": (48, 16),
    "bottom left": (16, 48),
    "bottom right": (48, 48),
}  # centres x, y, in pixels
RADII = {"": (12, 13), "small": (7, 8)}  # pixels
JITTER = 1  # pixels that a centre may lie beside that of its quarter
COLUMN = SIZE // 4  # pixels of one letter

Spot = tuple[int, int]  # centre x, y, in pixels


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
    for entry, place in zip(wanted, places(include, rng), strict=True):
        x, y = (c + rng.randint(-JITTER, JITTER) for c in QUARTERS[place])
        radius = rng.choice(RADII[entry.get("size", "")])
        _shape(pen, entry["class"], (x, y), radius, COLORS[entry.get("color", INK)])


def layouts(include: list[dict]) -> list[tuple[str, ...]]:
    """List the quarters that the objects of a prompt may have, in the order of its entries.

    All are equally likely. With a relation, [B, A] share a row or a column.
    """
    entries = [entry for entry in include for _ in range(entry["count"])]
    return [
        chosen
        for chosen in permutations(QUARTERS, len(entries))
        if all(entry.get("place", q) == q for entry, q in zip(entries, chosen, strict=True))
        and all(_holds(e, chosen) for e in include if "position" in e)
    ]


def _holds(entry: dict, chosen: tuple[str, ...]) -> bool:
    """Return whether the second object lies as asked to the first, along one axis."""
    axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[
        entry["position"][0]
    ]
    first, second = (QUARTERS[quarter] for quarter in chosen)
    return sign * (second[axis] - first[axis]) > 0 and second[1 - axis] == first[1 - axis]


def places(include: list[dict], rng: random.Random) -> tuple[str, ...]:
    """Draw the quarters of the objects of a prompt."""
    return rng.choice(layouts(include))


def _polygon(spot: Spot, r: int, corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    x, y = spot
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


def _shape(
    pen: ImageDraw.ImageDraw, shape: str, spot: Spot, radius: int, color: tuple[int, int, int]
) -> None:
    if shape in CORNERS:
        pen.polygon(_polygon(spot, radius, CORNERS[shape]), fill=color)
        return
    box = [c for corner in _polygon(spot, radius, [(-1, -1), (1, 1)]) for c in corner]
    if shape == "circle":
        pen.ellipse(box, fill=color)
    else:
        pen.ellipse(box, outline=color, width=round(0.42 * radius * SCALE))


@functools.cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(18 * SCALE)


def _word(pen: ImageDraw.ImageDraw, text: str) -> None:
    """Write four letters, one in the middle of each column of `COLUMN` pixels."""
    for i, letter in enumerate(text):
        x = (i + 0.5) * COLUMN * SCALE
        # A thin stroke: at 64 pixels the regular weight is grey rather than ink.
        pen.text(
            (x, SIZE * SCALE / 2), letter, font=_font(), fill=COLORS[INK], stroke_width=1,
            anchor="mm",
        )  # fmt: skip
