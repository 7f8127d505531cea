from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import UserError
from flowrl.prompts.records import (
    PromptRecord,
    PromptSampler,
    load_prompts,
    prompt_uid,
)
from flowrl.tiny.world import GENEVAL_TAGS, TAGS, TIERS, split_prompts


def records(count: int, tag: str = "a") -> list[PromptRecord]:
    return [PromptRecord(uid=f"{tag}{i}", text=str(i), metadata={"tag": tag}) for i in range(count)]


def test_the_tiny_world_is_read_by_name_and_kinds_take_turns():
    geneval = load_prompts("tiny:geneval:test")
    assert Counter(p.metadata["tag"] for p in geneval) == {
        tag: len(split_prompts(tag, "test")) for tag in GENEVAL_TAGS
    }
    assert [p.metadata["tag"] for p in load_prompts("tiny:all:train", limit=7)] == list(TAGS)
    word = load_prompts("tiny:ocr:train", limit=1)[0]
    text, tier = word.metadata["ocr_text"], word.metadata["tier"]
    expected = {"tag": "ocr", "ocr_text": text, "request": f"ocr: {text}", "tier": tier}
    assert word.metadata == expected
    assert text in word.text and tier in TIERS


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 40), st.integers(0, 3))
def test_an_iteration_repeats_a_prompt_only_when_it_must(count, size, iteration, seed):
    batch = PromptSampler(records(count), size, seed).at(iteration)
    uses = Counter(p.uid for p in batch)
    assert len(batch) == size
    assert max(uses.values()) == -(-size // count)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_shows_every_prompt_once(size, iterations, epoch):
    sampler = PromptSampler(records(size * iterations), size, seed=0)
    start = epoch * iterations
    seen = [p.uid for i in range(start, start + iterations) for p in sampler.at(i)]
    assert sorted(seen) == sorted(p.uid for p in records(size * iterations))


def test_an_epoch_is_a_function_of_iteration_and_seed(tmp_path):
    # An iteration depends on its number and seed alone.
    prompts = records(50)
    sampler = PromptSampler(prompts, 8, seed=1)
    later = [p.uid for p in sampler.at(5)]
    for i in range(5):
        sampler.at(i)
    assert [p.uid for p in sampler.at(5)] == later
    assert [p.uid for p in PromptSampler(prompts, 8, seed=1).at(5)] == later
    assert [p.uid for p in PromptSampler(prompts, 8, seed=2).at(5)] != later
    whole = PromptSampler(prompts, 50, seed=1)
    assert [p.uid for p in whole.at(0)] != [p.uid for p in whole.at(1)]  # two epochs
    # A uid is the content and nothing else.
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("a\nb\nb\n")
    two.write_text("b\na\n")
    a, b, again = load_prompts(one)
    assert {p.text: p.uid for p in load_prompts(two)} == {"a": a.uid, "b": b.uid}
    assert again.uid != b.uid  # so that repeated prompts draw different noise
    assert prompt_uid("a", None, {"k": 1, "l": 2}) == prompt_uid("a", None, {"l": 2, "k": 1})
    assert len({prompt_uid("a", n, m) for n in (None, "b") for m in ({}, {"k": 1})}) == 4
    assert prompt_uid("a cat", None, {}) == "c5188dd6a29bbcaf"  # the same on every machine


@given(
    st.integers(0, 3), st.integers(0, 4), st.integers(1, 3), st.integers(1, 9), st.integers(1, 6)
)
def test_a_kind_is_sampled_as_often_as_it_weighs(first, second, third, size, rounds):
    prompts = records(40, "a") + records(3, "b") + records(1, "c")
    weights = {"a": first, "b": second, "c": third}
    sampler = PromptSampler(prompts, size, seed=0, balance="tag", weights=weights)
    whole = rounds * (first + second + third)
    tags = [p.metadata["tag"] for i in range(-(-whole // size)) for p in sampler.at(i)]
    uses = Counter(tags[:whole])
    assert all(uses[tag] == rounds * weight for tag, weight in weights.items())


def test_weights_of_one_change_nothing_and_those_that_fit_no_prompt_are_refused():
    prompts = records(5, "a") + records(7, "b")
    plain = PromptSampler(prompts, 3, 0, balance="tag")
    weighed = PromptSampler(prompts, 3, 0, balance="tag", weights={"b": 1})
    assert all(plain.at(i) == weighed.at(i) for i in range(9))
    with pytest.raises(UserError, match="'kind'"):
        PromptSampler(records(3), 2, 0, balance="kind")
    with pytest.raises(UserError, match="prompts.weights names 'c'"):
        PromptSampler(prompts, 3, 0, balance="tag", weights={"c": 2})
    with pytest.raises(UserError, match="prompts.weights"):
        PromptSampler(prompts, 3, 0, balance="tag", weights={"a": 0, "b": 0})
