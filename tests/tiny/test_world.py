"""The tiny world's prompts: GenEval's form, and a held-out part that is never seen."""

import re

import pytest

from flowrl.tiny.world import (
    COLORS,
    NEW_WORDS,
    NUMBERS,
    SHAPES,
    SPELLING,
    TAGS,
    UNSEEN_WORDS,
    WORD_TEMPLATES,
    WORDS,
    all_prompts,
    split_prompts,
)


def test_train_and_test_share_nothing_and_lose_nothing():
    # Train and test share no text and lose none.
    for tag in TAGS:
        train, test = ({p["prompt"] for p in split_prompts(tag, s)} for s in ("train", "test"))
        new = {p["prompt"] for p in split_prompts(tag, "test") if p.get("ocr_text") in NEW_WORDS}
        assert not train & test
        assert train | (test - new) == {p["prompt"] for p in all_prompts(tag)}
        assert len(train) + len(test - new) == len(all_prompts(tag))
        assert len(test - new) == len(all_prompts(tag)) // 6
        assert len(new) == (len(NEW_WORDS) * len(WORD_TEMPLATES) if tag == "ocr" else 0)
    # Words held out altogether are spelt with letters that are drawn.
    assert not set(NEW_WORDS) & set(WORDS)
    assert set("".join(NEW_WORDS)) <= set("".join(WORDS))
    # Words to spell are new and each is tested in the one wording it is not trained in.
    assert not set(UNSEEN_WORDS) & {*WORDS, *NEW_WORDS}
    assert set("".join(UNSEEN_WORDS)) <= set("".join(WORDS))
    train, test = (split_prompts(SPELLING, split) for split in ("train", "test"))
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in test}
    assert sorted(p["ocr_text"] for p in test) == sorted(UNSEEN_WORDS)
    assert len(train) == len(UNSEEN_WORDS) * (len(WORD_TEMPLATES) - 1)
    assert {p["tag"] for p in [*train, *test]} == {"ocr"}


def test_texts_ask_for_what_the_metadata_demand():
    for tag in [t for t in TAGS if t != "ocr"]:
        for prompt in all_prompts(tag):
            assert prompt["tag"] == tag
            for entry in prompt["include"]:
                assert entry["class"] in SHAPES
                noun = entry["class"]
                if entry["count"] > 1:
                    assert f"{NUMBERS[entry['count']]} {noun}" in prompt["prompt"]
                elif "color" in entry:
                    assert f"{entry['color']} {noun}" in prompt["prompt"]
                else:
                    assert re.search(rf"\ban? {noun}\b", prompt["prompt"])
                assert entry.get("color") in (*COLORS, None)
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
    # Words are quoted in their prompts.
    assert {p["ocr_text"] for p in all_prompts("ocr")} == set(WORDS)
    assert all(f'"{p["ocr_text"]}"' in p["prompt"] for p in all_prompts("ocr"))
    # An unknown kind or split is named.
    with pytest.raises(ValueError, match="'cats'"):
        all_prompts("cats")
    with pytest.raises(ValueError, match="'valid'"):
        split_prompts("ocr", "valid")
