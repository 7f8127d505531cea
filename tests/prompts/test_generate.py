from collections import Counter

import pytest
from flowrl_rewards.geneval_rules import TAGS
from flowrl_rewards.ocr import OCR, quoted
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import UserError
from flowrl.prompts.generate.geneval import KINDS, RATIO, TEST_RATIO, geneval_sets
from flowrl.prompts.generate.ocr import ocr_sets
from flowrl.prompts.generate.templates import apportion, article, plural, write_sets
from flowrl.prompts.overlap import request_of
from flowrl.prompts.records import load_prompts

few = settings(max_examples=15)


@few
@given(st.integers(0, 1500), st.integers(0, 300), st.integers(0, 99))
def test_geneval_sets_share_nothing_and_repeat_no_text(count, held_out, seed):
    train, test = geneval_sets(count, held_out, seed)
    assert (len(train), len(test)) == (count, held_out)
    texts = [row["prompt"].casefold() for row in train + test]
    assert len(set(texts)) == len(texts)
    assert not set(map(request_of, train)) & set(map(request_of, test))


@few
@given(st.integers(0, 99))
def test_sets_are_a_function_of_the_seed(seed):
    for sets in (geneval_sets, ocr_sets):
        assert sets(60, 30, seed) == sets(60, 30, seed)
        assert sets(60, 30, seed) != sets(60, 30, seed + 1)


def test_kinds_have_their_shares_and_are_mixed():
    # The kinds have the parts of the ratio and the held out ones are balanced.
    train, test = geneval_sets(1700, 300)
    expected = {kind: 100 * part for kind, part in zip(KINDS, RATIO, strict=True) if part}
    assert Counter(row["tag"] for row in train) == expected
    assert Counter(row["tag"] for row in test) == dict.fromkeys(KINDS, 50)
    assert set(KINDS) == set(TAGS)
    # Kinds are mixed so that the first lines have each.
    train, _ = geneval_sets(1700, 0)
    assert {row["tag"] for row in train[:100]} == set(KINDS[:5])
    # Combinations are said once before any is said again.
    train, test = geneval_sets(180, 60, ratio=(0, 1, 0, 0, 0, 0))
    # 240 ways to count: ten are held out, and each of the 180 has its own.
    assert len(set(map(request_of, train))) == 180
    assert len({request_of(row) for row in test if row["tag"] == "counting"}) == 10


def test_a_prompt_says_what_its_metadata_ask_for():
    for row in geneval_sets(200, 60, seed=3)[1]:
        text, include = row["prompt"], row["include"]
        for entry in include:
            many = entry["count"] > 1
            colored = f"{entry['color']} {entry['class']}" if "color" in entry else entry["class"]
            spoken = plural(entry["class"]) if many else article(colored)
            assert spoken in text
        if row["tag"] == "counting":
            (wanted,), (limit,) = include, row["exclude"]
            assert {2: "two", 3: "three", 4: "four"}[wanted["count"]] in text
            assert limit == {"class": wanted["class"], "count": wanted["count"] + 1}
        if row["tag"] == "position":
            b, a = include
            relation, other = a["position"]
            assert other == 0
            assert text.endswith(f"{article(a['class'])} {relation} {article(b['class'])}")


def test_excluded_requests_are_in_neither_list_in_any_words():
    published, _ = geneval_sets(300, 0, 1, ratio=TEST_RATIO)
    excluded = frozenset(map(request_of, published))
    sets = geneval_sets(600, 60, 0, excluded=excluded)
    train, test = ({request_of(row) for row in rows} for rows in sets)
    assert not (train | test) & excluded and not train & test
    usual, _ = geneval_sets(600, 60, 0)
    assert {request_of(row) for row in usual} & excluded  # without, some are drawn


@few
@given(st.integers(0, 1000), st.integers(0, 200), st.integers(0, 99))
def test_ocr_sets_share_no_text(count, held_out, seed):
    train, test = ocr_sets(count, held_out, seed)
    assert (len(train), len(test)) == (count, held_out)
    assert len({row["prompt"] for row in train + test}) == count + held_out
    shown, held = (
        {row["ocr_text"].replace(" ", "").casefold() for row in rows} for rows in (train, test)
    )
    assert not shown & held


def test_texts_have_their_lengths_and_the_reward_finds_them():
    for row in ocr_sets(200, 50)[0]:
        assert quoted(row["prompt"]) == [row["ocr_text"]]
        assert OCR().targets(row["prompt"], row) == [row["ocr_text"]]
        assert 1 <= len(row["ocr_text"].split()) <= 4
    # Lengths have their parts and words do not repeat in a text.
    train, _ = ocr_sets(1000, 0)
    texts = [row["ocr_text"].split() for row in train]
    assert Counter(map(len, texts)) == {1: 100, 2: 300, 3: 300, 4: 300}
    assert all(len(set(text)) == len(text) for text in texts)


def test_files_are_read_back_and_lists_have_no_repeats(tmp_path):
    # Files are read back as they were drawn and never overwritten.
    sets = geneval_sets(20, 6)
    assert write_sets(tmp_path, sets) == [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    for rows, name in zip(sets, ("train", "test"), strict=True):
        prompts = load_prompts(tmp_path / f"{name}.jsonl")
        assert [{"prompt": p.text} | p.metadata for p in prompts] == rows
    with pytest.raises(UserError, match="train.jsonl is there already"):
        write_sets(tmp_path, sets)
    assert write_sets(tmp_path / "new", ([], sets[1])) == [tmp_path / "new" / "test.jsonl"]


def test_the_largest_remainders_get_what_is_left():
    """10 by 1:1:2 is 2.5, 2.5 and 5: the first of the equal halves gets the tenth."""
    assert apportion(10, "abc", (1, 1, 2)) == {"a": 3, "b": 2, "c": 5}
    assert apportion(7, "abc", (5, 1, 1)) == {"a": 5, "b": 1, "c": 1}
    assert apportion(3, "ab", (1, 5)) == {"a": 1, "b": 2}
