"""The tiny world: requests in canonical form, split so that no request crosses."""

import re
from collections import Counter

from flowrl.tiny.world import (
    COLORS,
    NUMBERS,
    SHAPES,
    SPLITS,
    TAGS,
    TIERS,
    WORDS,
    Request,
    Thing,
    all_prompts,
    prompts_of,
    requests,
    split_prompts,
    split_requests,
    tier,
)


def test_the_splits_share_no_request_and_lose_none():
    for tag in TAGS:
        parts = {split: {r.name for r in split_requests(tag, split)} for split in SPLITS}
        assert sum(map(len, parts.values())) == len(set.union(*parts.values()))
        assert set.union(*parts.values()) == {r.name for r in requests(tag)}
        for split, names in parts.items():
            assert {p["request"] for p in split_prompts(tag, split)} == names
        texts = [{p["prompt"] for p in split_prompts(tag, split)} for split in SPLITS]
        assert sum(map(len, texts)) == len(set.union(*texts)) == len(all_prompts(tag))


def test_every_tier_is_tested_and_two_thirds_of_each_kind_are_drawn_right():
    for tag in TAGS:
        shares = Counter(tier(r) for r in requests(tag))
        right = sum(TIERS[name] * count for name, count in shares.items()) / len(requests(tag))
        assert 0.6 < right < 0.7
    assert {p["tier"] for tag in TAGS for p in split_prompts(tag, "test")} == set(TIERS)


def test_two_wordings_of_one_request_have_one_name():
    a, b = Thing("circle"), Thing("star", color="red", size="small")
    (left,) = [r for r in requests("position") if r.name == "position: circle left of square"]
    texts = {p["prompt"] for p in prompts_of(left)}
    assert {"a circle left of a square", "a photo of a square right of a circle"} <= texts
    assert all("circle right of" not in text for text in texts)
    assert Request("two_object", (a, b)).name == "two_object: circle + small red star"
    for tag in ("two_object", "color_attr"):
        pairs = [frozenset(r.things) for r in requests(tag)]
        assert len(set(pairs)) == len(pairs)  # unordered
    names = [r.name for tag in TAGS for r in requests(tag)]
    assert len(set(names)) == len(names)


def test_texts_ask_for_what_the_metadata_demand():
    for tag in [t for t in TAGS if t != "ocr"]:
        for prompt in all_prompts(tag):
            assert prompt["tag"] == tag
            for entry in prompt["include"]:
                assert entry["class"] in SHAPES and entry.get("color") in (*COLORS, None)
                words = [entry.get("size"), entry.get("color"), entry["class"]]
                noun = " ".join(word for word in words if word)
                assert re.search(rf"\b{NUMBERS[entry['count']]} {noun}(e?s)?\b", prompt["prompt"])
                assert entry.get("place", "") in prompt["prompt"]
    # A position is asked of the second entry towards the first.
    for prompt in all_prompts("position"):
        other, placed = prompt["include"]
        relation, target = placed["position"]
        assert target == 0
        assert f"a {placed['class']} {relation} a {other['class']}" in prompt["prompt"]
    # Counting forbids one more.
    for prompt in all_prompts("counting"):
        (wanted,), (forbidden,) = prompt["include"], prompt["exclude"]
        assert forbidden == {"class": wanted["class"], "count": wanted["count"] + 1}
    assert {p["ocr_text"] for p in all_prompts("ocr")} == set(WORDS)
    assert all(f'"{p["ocr_text"]}"' in p["prompt"] for p in all_prompts("ocr"))
