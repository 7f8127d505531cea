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


@pytest.mark.parametrize("tag", TAGS)
def test_train_and_test_share_no_text_and_lose_none(tag):
    train, test = ({p["prompt"] for p in split_prompts(tag, s)} for s in ("train", "test"))
    new = {p["prompt"] for p in split_prompts(tag, "test") if p.get("ocr_text") in NEW_WORDS}
    assert not train & test
    assert train | (test - new) == {p["prompt"] for p in all_prompts(tag)}
    assert len(train) + len(test - new) == len(all_prompts(tag))
    assert len(test - new) == len(all_prompts(tag)) // 6
    assert len(new) == (len(NEW_WORDS) * len(WORD_TEMPLATES) if tag == "ocr" else 0)


def test_words_held_out_altogether_are_spelt_with_letters_that_are_drawn():
    assert not set(NEW_WORDS) & set(WORDS)
    assert set("".join(NEW_WORDS)) <= set("".join(WORDS))


def test_words_to_spell_are_new_and_each_is_tested_in_the_one_wording_it_is_not_trained_in():
    assert not set(UNSEEN_WORDS) & {*WORDS, *NEW_WORDS}
    assert set("".join(UNSEEN_WORDS)) <= set("".join(WORDS))
    train, test = (split_prompts(SPELLING, split) for split in ("train", "test"))
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in test}
    assert sorted(p["ocr_text"] for p in test) == sorted(UNSEEN_WORDS)
    assert len(train) == len(UNSEEN_WORDS) * (len(WORD_TEMPLATES) - 1)
    assert {p["tag"] for p in [*train, *test]} == {"ocr"}


@pytest.mark.parametrize("tag", [t for t in TAGS if t != "ocr"])
def test_the_text_asks_for_what_the_metadata_demand(tag):
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


def test_a_position_is_asked_of_the_second_entry_towards_the_first():
    for prompt in all_prompts("position"):
        other, placed = prompt["include"]
        relation, target = placed["position"]
        assert target == 0
        assert f"a {placed['class']} {relation} a {other['class']}" in prompt["prompt"]


def test_counting_forbids_one_more():
    for prompt in all_prompts("counting"):
        (wanted,), (forbidden,) = prompt["include"], prompt["exclude"]
        assert forbidden == {"class": wanted["class"], "count": wanted["count"] + 1}


def test_words_are_quoted_in_their_prompts():
    assert {p["ocr_text"] for p in all_prompts("ocr")} == set(WORDS)
    assert all(f'"{p["ocr_text"]}"' in p["prompt"] for p in all_prompts("ocr"))


def test_an_unknown_kind_or_split_is_named():
    with pytest.raises(ValueError, match="'cats'"):
        all_prompts("cats")
    with pytest.raises(ValueError, match="'valid'"):
        split_prompts("ocr", "valid")
