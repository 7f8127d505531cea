"""Flaws of quality: what is shown is right, and badly drawn."""

import random
from collections.abc import Callable

import numpy as np
from flowrl_rewards.tiny_palette import PAPER

Image = np.ndarray  # (64, 64, 3) uint8


def ragged(image: Image, rng: random.Random) -> Image:
    """Move each pair of rows by up to two pixels, so that outlines are torn."""
    out = image.copy()
    for row in range(0, len(image), 2):
        out[row : row + 2] = np.roll(image[row : row + 2], rng.randint(-2, 2), axis=1)
    return out


def ghost(image: Image, rng: random.Random) -> Image:
    """Add a faint second copy, some pixels beside the first."""
    shift = (rng.choice((-5, 5)), rng.choice((-5, 5)))
    copy = np.roll(image, shift, axis=(0, 1)).astype(float)
    faint = np.asarray(PAPER) + 0.35 * (copy - np.asarray(PAPER))
    return np.minimum(image, faint.round()).astype(np.uint8)


def tint(image: Image, rng: random.Random) -> Image:
    """Colour the paper."""
    channel = rng.randrange(3)
    out = image.astype(float)
    out[..., channel] *= 0.8
    return out.round().astype(np.uint8)


FLAWS: dict[str, Callable[[Image, random.Random], Image]] = {
    "ghost": ghost,
    "ragged edges": ragged,
    "tinted paper": tint,
}
