"""Worlds of the arena: splits that share nothing, and defects as often as a tier says."""

import random

import pytest

from flowrl.tiny.world import TAGS, requests
from scripts.arena.flaws import FLAWS
from scripts.arena.world import CHANGES_OF, SPLITS, altered, canonical, world
from scripts.pretrain_tiny.draw import draw, layouts

SEEDS = (1, 2, 17)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_request_and_no_withheld_family_crosses_a_split(seed):
    split = world(seed).split
    forms = {part: {canonical(r) for r, p in split.items() if p == part} for part in SPLITS}
    assert sum(map(len, forms.values())) == len(set.union(*forms.values()))
    names = {part: {p["request"] for p in world(seed).prompts(part)} for part in SPLITS}
    assert sum(map(len, names.values())) == len(set.union(*names.values()))
    families = {part: {p["family"] for p in world(seed).prompts(part)} for part in SPLITS}
    assert not families["new families"] & families["train"]
    assert families["new requests"] <= families["train"] and len(families["new families"]) >= 7
    assert min(map(len, names.values())) >= 80


def test_what_is_not_named_is_the_drawings_default():
    rings = {
        canonical(r)
        for r in requests("counting")
        if r.name in ("counting: 2 ring", "counting: 2 black ring")
    }
    assert len(rings) == 1
    assert len({canonical(r) for r in requests("position")}) == len(requests("position"))


@pytest.mark.parametrize("seed", SEEDS)
def test_images_are_right_as_often_as_the_family_says(seed):
    """Words are drawn in one way alone, so that a wrong image is another one."""
    planted, rng, count = world(seed), random.Random(0), 200
    for prompt in [p for p in planted.prompts() if p["tag"] == "ocr"][::25]:
        right = draw(prompt, rng)
        share = sum((planted.image(prompt, rng) == right).all() for _ in range(count)) / count
        assert abs(share - prompt["right"]) < 0.12
    families = {p["family"]: p["right"] for p in planted.prompts()}
    assert 0.4 < sum(families.values()) / len(families) < 0.6


@pytest.mark.parametrize("tag", TAGS)
def test_every_change_makes_another_request_that_can_be_drawn(tag):
    rng = random.Random(0)
    for prompt in [p for p in world(1).prompts() if p["tag"] == tag][::7]:
        for name in CHANGES_OF[tag]:
            wrong = altered(prompt, name, rng)
            assert wrong != prompt
            if tag == "ocr":
                assert wrong["ocr_text"] != prompt["ocr_text"]
            else:
                assert wrong["include"] != prompt["include"] and layouts(wrong["include"])


def test_flaws_change_the_pixels_and_not_the_size():
    prompt = world(1).prompts("train")[0]
    image = world(1).image(prompt | {"right": 1.0}, random.Random(0))
    for flaw in FLAWS.values():
        flawed = flaw(image, random.Random(1))
        assert flawed.shape == image.shape and flawed.dtype == image.dtype
        assert (flawed != image).any()
