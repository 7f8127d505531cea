import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import UserError
from flowrl.prompts import PromptRecord, PromptSampler, load_prompts, prompt_uid
from flowrl.tiny.world import GENEVAL_TAGS, TAGS, split_prompts


def records(count: int, tag: str = "a") -> list[PromptRecord]:
    return [PromptRecord(uid=f"{tag}{i}", text=str(i), metadata={"tag": tag}) for i in range(count)]


def test_text_files_hold_one_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffa cat\n\n  a \u201cdog\u201d \n# not a comment\n", encoding="utf-8")
    assert [p.text for p in load_prompts(path)] == ["a cat", "a \u201cdog\u201d", "# not a comment"]
    assert [p.text for p in load_prompts(path, limit=1)] == ["a cat"]


def test_jsonl_keeps_every_other_key_as_metadata(tmp_path):
    path = tmp_path / "prompts.jsonl"
    row = {"tag": "counting", "include": [{"class": "cat", "count": 2}], "exclude": []}
    rows = [row | {"prompt": "two cats"}, {"text": "x", "negative": "blur"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = load_prompts(path)
    assert (first.text, first.negative, first.metadata) == ("two cats", None, row)
    assert (second.text, second.negative, second.metadata) == ("x", "blur", {})


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
        ("p.jsonl", '{"caption": "a"}', 'line 1: expected an object with a text under "prompt"'),
        ("p.jsonl", "[1]", "expected an object"),
        ("p.jsonl", '{"prompt": " "}', "expected an object"),
        ("p.jsonl", '{"prompt": "a", "negative": 3}', "must be a text"),
        ("p.txt", "\n\n", "holds no prompts"),
        ("p.csv", "a", ".txt file"),
    ],
)
def test_a_malformed_file_is_an_error_that_says_where(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        load_prompts(tmp_path / name)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "source", ["none.txt", "tiny:geneval", "tiny:cats:train", "tiny:ocr:dev", "tiny:ocr:test:x"]
)
def test_a_source_that_does_not_exist_is_a_sentence(source):
    with pytest.raises(UserError, match="cannot read prompts"):
        load_prompts(source)


def test_the_tiny_world_is_read_by_name_and_kinds_take_turns():
    geneval = load_prompts("tiny:geneval:test")
    assert Counter(p.metadata["tag"] for p in geneval) == {
        tag: len(split_prompts(tag, "test")) for tag in GENEVAL_TAGS
    }
    assert [p.metadata["tag"] for p in load_prompts("tiny:all:train", limit=7)] == list(TAGS)
    word = load_prompts("tiny:ocr:train", limit=1)[0]
    assert word.metadata == {"tag": "ocr", "ocr_text": word.metadata["ocr_text"]}
    assert word.metadata["ocr_text"] in word.text


def test_a_uid_is_the_content_and_nothing_else(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("a\nb\nb\n")
    two.write_text("b\na\n")
    a, b, again = load_prompts(one)
    assert {p.text: p.uid for p in load_prompts(two)} == {"a": a.uid, "b": b.uid}
    assert again.uid != b.uid  # so that repeated prompts draw different noise
    assert prompt_uid("a", None, {"k": 1, "l": 2}) == prompt_uid("a", None, {"l": 2, "k": 1})
    assert len({prompt_uid("a", n, m) for n in (None, "b") for m in ({}, {"k": 1})}) == 4
    assert prompt_uid("a cat", None, {}) == "c5188dd6a29bbcaf"  # the same on every machine


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


def test_an_iteration_depends_on_its_number_and_seed_alone():
    prompts = records(50)
    sampler = PromptSampler(prompts, 8, seed=1)
    later = [p.uid for p in sampler.at(5)]
    for i in range(5):
        sampler.at(i)
    assert [p.uid for p in sampler.at(5)] == later
    assert [p.uid for p in PromptSampler(prompts, 8, seed=1).at(5)] == later
    assert [p.uid for p in PromptSampler(prompts, 8, seed=2).at(5)] != later


@given(st.integers(1, 9), st.integers(2, 30))
def test_balance_gives_rare_kinds_as_many_turns(size, iterations):
    prompts = records(40, "common") + records(3, "rare") + records(1, "single")
    sampler = PromptSampler(prompts, size, seed=0, balance="tag")
    uses = Counter(p.metadata["tag"] for i in range(iterations) for p in sampler.at(i))
    counts = [uses[tag] for tag in ("common", "rare", "single")]
    assert max(counts) - min(counts) <= 1


def test_balance_by_a_key_that_prompts_lack_is_an_error():
    with pytest.raises(UserError, match="'kind'"):
        PromptSampler(records(3), 2, 0, balance="kind")
