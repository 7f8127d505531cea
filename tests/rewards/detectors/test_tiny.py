"""The detector against freshly drawn images; it knows neither the generator nor its labels."""

import functools
import random

import numpy as np
import pytest
from flowrl_rewards.detectors.tiny import TinyDetector
from flowrl_rewards.geneval import GenEval

from flowrl.tiny.world import GENEVAL_TAGS, all_prompts
from scripts.pretrain_tiny.draw import INK, draw

PER_KIND = 80
prompts_of = functools.cache(all_prompts)


@pytest.fixture(scope="module")
def detector() -> TinyDetector:
    return TinyDetector()


def drawn(tag: str, count: int, seed: int = 0):
    rng = random.Random(f"{tag}/{seed}")
    prompts = [rng.choice(prompts_of(tag)) for _ in range(count)]
    return prompts, np.stack([draw(prompt, rng) for prompt in prompts])


def strict_scores(detector: TinyDetector, images, prompts) -> list[float]:
    judge = GenEval(mode="strict").judge
    return [judge(found, p) for found, p in zip(detector(images), prompts, strict=True)]


@pytest.mark.parametrize("tag", GENEVAL_TAGS)
def test_images_are_judged_right_for_their_prompt_and_wrong_for_another(detector, tag):
    """Wrong for prompts they cannot satisfy: other classes, counts, colours, sides."""
    prompts, images = drawn(tag, PER_KIND)
    rng = random.Random(tag)
    others = [_other(tag, prompt, rng) for prompt in prompts]
    assert np.mean(strict_scores(detector, images, prompts)) >= 0.99
    assert np.mean(strict_scores(detector, images, others)) <= 0.01


def _other(tag: str, prompt: dict, rng: random.Random) -> dict:
    while not _differs(prompt, other := rng.choice(prompts_of(tag))):
        pass
    return other


def _differs(drawn_for: dict, other: dict) -> bool:
    """Whether an image of the first prompt must fail the second."""

    def key(prompt: dict):
        return sorted((e["class"], e["count"]) for e in prompt["include"])

    def colors(prompt: dict, where_open: str):
        return sorted((e["class"], e.get("color", where_open)) for e in prompt["include"])

    if key(drawn_for) != key(other):
        return True
    if all("color" in e for e in other["include"]) and colors(drawn_for, INK) != colors(other, ""):
        return True
    sides = [p["include"][-1].get("position", [""])[0] for p in (drawn_for, other)]
    same_order = drawn_for["include"][0]["class"] == other["include"][0]["class"]
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    return sides[0] != "" and sides[1] != (sides[0] if same_order else opposite[sides[0]])


def test_sizes_and_places_are_told_and_judged(detector):
    for tag in GENEVAL_TAGS:
        prompts, images = drawn(tag, PER_KIND, seed=5)
        for prompt, found in zip(prompts, detector(images), strict=True):
            sizes = {e["class"]: e.get("size", "large") for e in prompt["include"]}
            places = {e["class"]: e["place"] for e in prompt["include"] if "place" in e}
            assert len(found) == sum(e["count"] for e in prompt["include"]), prompt["prompt"]
            assert all(one.size == sizes[one.name] for one in found), prompt["prompt"]
            assert all(one.place == places.get(one.name, one.place) for one in found)
    prompts = [p for p in prompts_of("single_object") if "size" in p["include"][0]][:20]
    unsized = [{"class": p["include"][0]["class"], "count": 1} for p in prompts]
    rng = random.Random(7)
    large = np.stack(
        [draw(p | {"include": [e]}, rng) for p, e in zip(prompts, unsized, strict=True)]
    )
    assert np.mean(strict_scores(detector, large, prompts)) == 0
