"""Convert images from and to tensors, PNG and data URLs, and lay them out in captioned grids."""

import base64
import io
import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.errors import UserError
from flowrl.utils.untrusted import read_bytes

LOG = logging.getLogger(__name__)
Color = tuple[int, int, int]

PAPER: Color = (255, 255, 255)
INK: Color = (31, 35, 40)
GREY: Color = (101, 109, 118)
GREEN: Color = (26, 127, 55)
RED: Color = (207, 34, 46)

SMALL = 256  # pixels: images up to this side are enlarged with hard edges, not blurred
PAD = 12  # pixels between cells
TEXT, NOTE = 15, 13  # pixels, text sizes
LINE = 20  # pixels, distance of text lines
CAPTION_LINES = 3
PLAIN = str.maketrans({"→": "->", "–": "-", "—": "-", "−": "-"})  # Pillow's typeface lacks these


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One column of a grid: a caption, images below each other, then short notes."""

    caption: str
    images: Sequence[Image.Image]
    notes: Sequence[tuple[str, Color]] = ()


def to_pil(images: Tensor) -> list[Image.Image]:
    """Convert (B, 3, H, W) float in [0, 1] to B RGB images, rounded to 256 levels."""
    levels = (images.detach().float().nan_to_num(0).clamp(0, 1) * 255).round()
    rows = levels.byte().permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return [Image.fromarray(row) for row in rows]


def to_tensor(images: Sequence[Image.Image]) -> Tensor:
    """Convert B images of one size to (B, 3, H, W) float32 in [0, 1]."""
    rows = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(rows).permute(0, 3, 1, 2).float() / 255


def read_image(path: Path) -> Image.Image:
    """Return an image file in RGB.

    Raises errors of `flowrl.utils.untrusted.read_bytes`, and of Pillow for what is no image.
    """
    with Image.open(io.BytesIO(read_bytes(path))) as image:
        return image.convert("RGB")


def is_whole_png(path: Path) -> bool:
    """Return whether a PNG file exists and has the checksums that it was written with."""
    try:
        with Image.open(io.BytesIO(read_bytes(path)), formats=["PNG"]) as image:
            image.verify()
    except (OSError, SyntaxError, ValueError, UserError, Image.DecompressionBombError) as error:
        if not isinstance(error, FileNotFoundError):
            LOG.warning("%s is damaged, and is generated again: %s", path, error)
        return False
    return True


def png_of_file(path: Path) -> bytes | None:
    """Return an image file as PNG, and None for one that is not there or no image."""
    try:
        return png(read_image(path))
    except (OSError, ValueError, UserError, Image.DecompressionBombError):
        return None


def data_url(image: Image.Image) -> str:
    """Return the image as a `data:` URL of a lossless WebP."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "WEBP", lossless=True, quality=80, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def fit(image: Image.Image, side: int) -> Image.Image:
    """Resize the image into a box of `side` pixels: by a whole factor if enlarged."""
    longest = max(image.size)
    if longest <= side:
        factor = side // longest
        size = (image.width * factor, image.height * factor)
        return image.convert("RGB").resize(size, Image.Resampling.NEAREST)
    width, height = (max(1, round(length * side / longest)) for length in image.size)
    return image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return Pillow's own typeface, so that a grid looks the same on every machine."""
    return ImageFont.load_default(size)


def wrap(text: str, width: int, *, size: int = TEXT, lines: int = CAPTION_LINES) -> list[str]:
    """Break `text` into at most `lines` lines of `width` pixels, with an ellipsis if cut."""
    face = font(size)
    broken, rest = [], " ".join(text.split()).translate(PLAIN)
    while rest and len(broken) < lines:
        if face.getlength(rest) <= width:
            return [*broken, rest]
        last = len(broken) == lines - 1
        end = "…" if last else ""
        # Of a prompt of many pages, no more letters than a line has pixels are measured.
        lengths = range(1, min(len(rest), width) + 1)
        fits = bisect_right(lengths, width, key=lambda n, e=end: face.getlength(rest[:n] + e))
        space = rest.rfind(" ", 0, fits + 1)
        cut = max(1, fits) if last or space <= 0 else space
        broken.append(rest[:cut].rstrip() + end)
        rest = rest[cut:].lstrip()
    return broken


def image_grid(
    stacks: Sequence[Stack],
    *,
    heading: Sequence[str] = (),
    rows: Sequence[str] = (),
    across: int = 8,
) -> Image.Image:
    """Lay out columns side by side, `across` in a band, with a heading above.

    Images get boxes of the largest one's side within [192, 320] pixels. rows: names of the rows of
    images, shown in the left margin.
    """
    side = min(320, max(192, *(max(p.size) for s in stacks for p in s.images)))
    margin = PAD + max((round(font(TEXT).getlength(row)) + PAD for row in rows), default=0)
    width = margin + min(across, len(stacks)) * (side + PAD)
    head = [line for text in heading for line in wrap(text, width - 2 * PAD, lines=6)]
    bands = [
        _band(stacks[i : i + across], rows, margin, side) for i in range(0, len(stacks), across)
    ]
    top = PAD + len(head) * LINE + (PAD if head else 0)
    canvas = Image.new("RGB", (width, top + sum(band.height for band in bands)), PAPER)
    _lines(ImageDraw.Draw(canvas), PAD, PAD, [(line, INK) for line in head])
    for band in bands:
        canvas.paste(band, (0, top))
        top += band.height
    return canvas


def _band(stacks: Sequence[Stack], rows: Sequence[str], margin: int, side: int) -> Image.Image:
    captions = [wrap(stack.caption, side) for stack in stacks]
    notes = [
        [(line, color) for text, color in s.notes for line in wrap(text, side, size=NOTE, lines=2)]
        for s in stacks
    ]
    text = max(map(len, captions)) * LINE
    row_height = side + PAD // 2
    top = text + (PAD // 2 if text else 0)
    below = top + max(len(stack.images) for stack in stacks) * row_height
    size = (margin + len(stacks) * (side + PAD), below + max(map(len, notes)) * LINE + PAD)
    band = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(band)
    for row, name in enumerate(rows):
        pen.text((PAD, top + row * row_height + side // 2), name, GREY, font(TEXT), anchor="lm")
    for column, stack in enumerate(stacks):
        x = margin + column * (side + PAD)
        caption = [(line, INK) for line in captions[column]]
        _lines(pen, x, text - len(caption) * LINE, caption)
        for row, image in enumerate(stack.images):
            band.paste(fit(image, side), (x, top + row * row_height))
        _lines(pen, x, below, notes[column], NOTE)
    return band


def _lines(
    pen: ImageDraw.ImageDraw, x: int, y: int, lines: list[tuple[str, Color]], size: int = TEXT
) -> None:
    for i, (text, color) in enumerate(lines):
        pen.text((x, y + i * LINE), text, color, font(size))
