"""Drawn images: a function of prompt and seed, by the published law, with the planted defects."""

import random
from collections import Counter

import pytest

from flowrl.tiny.world import TAGS, TIERS, split_prompts
from scripts.pretrain_tiny.defects import altered, with_defects
from scripts.pretrain_tiny.draw import layouts, places


def test_layouts_are_those_that_the_prompt_allows_and_equally_likely():
    one = {"class": "star", "count": 1}
    assert len(layouts([one])) == 4 and len(layouts([one | {"count": 2}])) == 12
    assert layouts([one | {"place": "top right"}]) == [("top right",)]
    related = [one, one | {"position": ["left of", 0]}]
    assert set(layouts(related)) == {("top right", "top left"), ("bottom right", "bottom left")}
    rng = random.Random(0)
    counts = Counter(places([one, one], rng) for _ in range(6000))
    assert len(counts) == 12 and all(400 < n < 600 for n in counts.values())


@pytest.mark.parametrize("tag", TAGS)
def test_a_defect_changes_one_demand_and_comes_as_often_as_its_tier_says(tag):
    rng = random.Random(0)
    for prompt in split_prompts(tag, "test")[:30]:
        wrong = altered(prompt, rng)
        assert wrong["prompt"] == prompt["prompt"]
        if tag == "ocr":
            pairs = zip(wrong["ocr_text"], prompt["ocr_text"], strict=True)
            assert sum(a != b for a, b in pairs) == 1
            continue
        changed = [
            (key, a[key], b[key])
            for a, b in zip(wrong["include"], prompt["include"], strict=True)
            for key in b
            if a[key] != b[key]
        ]
        assert len(changed) == (2 if tag == "color_attr" else 1)
        if tag == "counting":
            assert abs(changed[0][1] - changed[0][2]) == 1
    for tier in {p["tier"] for p in split_prompts(tag, "train")}:
        prompt = next(p for p in split_prompts(tag, "train") if p["tier"] == tier)
        right = sum(with_defects(prompt, rng) == prompt for _ in range(2000)) / 2000
        assert abs(right - TIERS[tier]) < 0.035
