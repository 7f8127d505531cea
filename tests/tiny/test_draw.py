"""Drawn images: the same for the same seed, on a light ground, objects apart and placed."""

import random

import cv2
import numpy as np

from flowrl.tiny.draw import PALETTE, SIZE, draw
from flowrl.tiny.world import TAGS, split_prompts


def drawn(prompt: dict, seed: int) -> np.ndarray:
    return draw(prompt, random.Random(seed))


def count_blobs(image: np.ndarray) -> int:
    """How many connected regions are far from the light ground."""
    ink = np.abs(image.astype(int) - np.median(image.reshape(-1, 3), axis=0)).sum(-1) > 120
    _, _, stats, _ = cv2.connectedComponentsWithStats(ink.astype(np.uint8))
    return int((stats[1:, cv2.CC_STAT_AREA] > 12).sum())


def test_an_image_is_a_function_of_prompt_and_seed():
    for tag in TAGS:
        prompt = split_prompts(tag, "train")[0]
        first = drawn(prompt, 1)
        assert first.shape == (SIZE, SIZE, 3) and first.dtype == np.uint8
        assert np.array_equal(first, drawn(prompt, 1))
        others = [drawn(prompt, seed) for seed in range(2, 6)]
        same = all(np.array_equal(first, other) for other in others)
        assert same == (tag == "ocr")  # a word has one place and one ink


def test_as_many_objects_and_words_inside_as_are_asked_for():
    # As many objects in their colours and places as are asked for.
    # As many separate objects as are asked for.
    for tag in [t for t in TAGS if t != "ocr"]:
        for seed, prompt in enumerate(split_prompts(tag, "test")[:40]):
            wanted = sum(entry["count"] for entry in prompt["include"])
            assert count_blobs(drawn(prompt, seed)) == wanted, prompt["prompt"]
    # Relations hold between the centres of the two objects.
    axis_sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
    for seed, prompt in enumerate(split_prompts("position", "test")[:40]):
        # Told apart by colour, which the prompt leaves open.
        include = [
            dict(e, color=c) for e, c in zip(prompt["include"], ("blue", "red"), strict=True)
        ]
        image = drawn(dict(prompt, include=include), seed).astype(int)
        axis, sign = axis_sign[include[1]["position"][0]]
        b, a = (np.argwhere(near(image, c)).mean(0)[::-1] for c in ("blue", "red"))
        assert sign * (a[axis] - b[axis]) > abs(a[1 - axis] - b[1 - axis]), prompt["prompt"]
    # A named colour is the one that is drawn.
    for color in PALETTE:
        prompt = {"tag": "colors", "include": [{"class": "square", "count": 1, "color": color}]}
        image = drawn(prompt, 3).astype(int)
        counts = {name: int(near(image, name).sum()) for name in PALETTE}
        assert counts[color] > 100 and counts[color] == max(counts.values())
    # Words stay inside the image.
    for seed, prompt in enumerate(split_prompts("ocr", "test")):
        image = drawn(prompt, seed).astype(int)
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        assert border.min() > 180, prompt["ocr_text"]
        assert image.min() < 120


def near(image: np.ndarray, color: str) -> np.ndarray:
    return np.abs(image - np.array(PALETTE[color])).max(-1) < 40
