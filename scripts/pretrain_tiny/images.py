"""The images that pretraining sees, with or without the planted defects."""

import functools
import random
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from flowrl.tiny.draw import draw
from flowrl.tiny.world import TAGS, Prompt, prompts_of, requests, with_defects
from flowrl.utils.files import atomic_path

SHARES = {  # how often each kind is drawn
    "single_object": 1.0, "two_object": 2.0, "counting": 2.0, "colors": 1.5,
    "position": 2.0, "color_attr": 3.5, "ocr": 1.5,
}  # fmt: skip
CHUNK = 500  # images that one process draws at a time


def images(
    folder: Path, count: int, seed: int, workers: int, *, defects: bool
) -> tuple[np.ndarray, list[str]]:
    """Draw `count` images (count, 64, 64, 3) uint8 with their captions, cached in `folder`.

    Requests of all splits are drawn. With `defects` some images are wrong and keep their captions
    (`flowrl/tiny/world.py`).
    """
    path = folder / f"images-{'defects' if defects else 'clean'}-{seed}-{count}.npz"
    if not path.exists():
        starts = range(0, count, CHUNK)
        jobs = [(seed, start, min(start + CHUNK, count), defects) for start in starts]
        with get_context("spawn").Pool(workers) as pool:
            parts = pool.starmap(_draw_range, jobs)
        drawn = np.concatenate([part[0] for part in parts])
        captions = np.array([caption for part in parts for caption in part[1]])
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, images=drawn, captions=captions)
    stored = np.load(path, allow_pickle=False)
    return stored["images"], stored["captions"].tolist()


def _draw_range(seed: int, start: int, stop: int, defects: bool) -> tuple[np.ndarray, list[str]]:
    drawn, captions = [], []
    for index in range(start, stop):
        rng = random.Random(f"{seed}/{index}")
        prompt = _choose(rng)
        drawn.append(draw(with_defects(prompt, rng) if defects else prompt, rng))
        captions.append(prompt["prompt"])
    return np.stack(drawn), captions


def _choose(rng: random.Random) -> Prompt:
    tag = rng.choices(TAGS, [SHARES[t] for t in TAGS])[0]
    return rng.choice(_prompts(rng.choice(requests(tag))))


_prompts = functools.cache(prompts_of)
