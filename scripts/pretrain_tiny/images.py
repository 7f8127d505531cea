"""The images that pretraining sees, with or without the planted defects."""

import functools
import random
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from flowrl.tiny.world import TAGS, Prompt, Request, prompts_of, requests
from flowrl.utils.files import atomic_path
from scripts.pretrain_tiny.defects import with_defects
from scripts.pretrain_tiny.draw import draw

SHARES = {  # how often each kind is drawn
    "single_object": 1.0, "two_object": 2.0, "counting": 2.0, "colors": 1.5,
    "position": 2.0, "color_attr": 3.5, "ocr": 1.5,
}  # fmt: skip
CHUNK = 500  # images that one process draws at a time


Sample = Callable[[random.Random], tuple[str, np.ndarray]]  # -> caption, (64, 64, 3) uint8


def images(
    folder: Path, name: str, sample: Sample, count: int, seed: int, workers: int
) -> tuple[np.ndarray, list[str]]:
    """Draw `count` images (count, 64, 64, 3) uint8 with their captions, cached in `folder`.

    name: of the sample, in the cache.
    """
    path = folder / f"images-{name}-{seed}-{count}.npz"
    if not path.exists():
        starts = range(0, count, CHUNK)
        jobs = [(sample, seed, start, min(start + CHUNK, count)) for start in starts]
        with get_context("spawn").Pool(workers) as pool:
            parts = pool.starmap(_draw_range, jobs)
        drawn = np.concatenate([part[0] for part in parts])
        captions = np.array([caption for part in parts for caption in part[1]])
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, images=drawn, captions=captions)
    stored = np.load(path, allow_pickle=False)
    return stored["images"], stored["captions"].tolist()


def clean(rng: random.Random) -> tuple[str, np.ndarray]:
    """Draw a prompt of all splits, and its image."""
    prompt = choose(rng)[1]
    return prompt["prompt"], draw(prompt, rng)


def defects(rng: random.Random) -> tuple[str, np.ndarray]:
    """Draw a prompt of all splits, and its image, which may be wrong (`defects.py`)."""
    prompt = choose(rng)[1]
    return prompt["prompt"], draw(with_defects(prompt, rng), rng)


def choose(rng: random.Random) -> tuple[Request, Prompt]:
    """Draw a kind by SHARES, a request of it and one of its wordings."""
    tag = rng.choices(TAGS, [SHARES[t] for t in TAGS])[0]
    request = rng.choice(requests(tag))
    return request, rng.choice(_prompts(request))


def _draw_range(sample: Sample, seed: int, start: int, stop: int) -> tuple[np.ndarray, list[str]]:
    pairs = [sample(random.Random(f"{seed}/{index}")) for index in range(start, stop)]
    return np.stack([drawn for _, drawn in pairs]), [caption for caption, _ in pairs]


_prompts = functools.cache(prompts_of)
