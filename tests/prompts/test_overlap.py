"""Held-out prompts must not ask for what training prompts ask for, in whatever words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import UserError
from flowrl.prompts.generate.geneval import KINDS, geneval_kinds
from flowrl.prompts.overlap import (
    check_overlap,
    hold_out,
    overlaps,
    plain_text,
    request_of,
    requests_in,
)
from flowrl.prompts.records import PromptRecord, records_of
from flowrl.tiny.world import SPLITS, TAGS, requests, split_prompts

KINDS_OF = {kind.name: kind for kind in geneval_kinds(["cat", "dog", "bus", "cup"])}


def record(text: str, **metadata) -> PromptRecord:
    return PromptRecord(uid=text, text=text, metadata=metadata)


def one(name: str, count: int = 1, **more) -> dict:
    return {"class": name, "count": count, **more}


@given(st.sampled_from(KINDS), st.data())
def test_a_request_is_the_same_in_every_wording_and_another_for_every_combination(name, data):
    kind = KINDS_OF[name]
    a, b = (data.draw(st.integers(0, kind.combinations - 1)) for _ in range(2))
    words = st.integers(0, kind.wordings - 1)
    first, second = (request_of(kind.make(i, data.draw(words))) for i in (a, b))
    assert (first == second) == (a == b)


def test_what_makes_two_requests_the_same():
    cat, dog = one("cat"), one("dog")

    def on(relation, a=cat, b=dog):
        return request_of({"include": [b, a | {"position": [relation, 0]}]})

    assert on("left of") == on("right of", dog, cat) != on("right of")
    assert on("above") == on("below", dog, cat) != on("left of")
    assert request_of({"include": [cat, dog]}) == request_of({"include": [dog, cat]}) != on("above")
    red, blue = one("cat", color="red"), one("dog", color="blue")
    swapped = [one("cat", color="blue"), one("dog", color="red")]
    assert request_of({"include": [red, blue]}) != request_of({"include": swapped})
    # Two, and not three, is two; two and no dog is more.
    two = {"include": [one("cat", 2)]}
    assert request_of(two) == request_of(two | {"exclude": [one("cat", 3)], "tag": "counting"})
    assert request_of(two) != request_of(two | {"exclude": [dog]})
    assert request_of(two) != request_of({"include": [one("cat", 3)]})
    assert request_of({"ocr_text": "New York"}) == request_of({"ocr_text": "newyork"})
    assert request_of({"tag": "style", "include": []}) is None


def test_metadata_decide_where_both_have_any_and_texts_otherwise():
    training = [
        record("a photo of two cats", include=[one("cat", 2)]),
        record("A house, by the lake!"),
    ]
    held_out = [
        record("a photo of two cats", include=[one("cat", 3)]),  # the same words ask for more
        record("2 cats", include=[one("cat", 2)]),
        record("a house by the  lake"),
        record("a house, by the lake", include=[one("house")]),
        record("a photo of two cats"),
        record("a house on a hill"),
    ]
    shared = [text for text, _ in overlaps(training, held_out)]
    assert shared == [prompt.text for prompt in held_out[1:-1]]


def test_overlap_is_refused_with_the_first_pair_unless_allowed():
    training, held_out = [record("a red cat")], [record("a dog"), record("A red cat.")]
    with pytest.raises(UserError, match="'A red cat.' and 'a red cat'.*allow_overlap"):
        check_overlap(training, held_out, allowed=False)
    check_overlap(training, held_out, allowed=True)
    check_overlap(training, held_out[:1], allowed=False)


def test_requests_of_files_are_read_from_metadata_alone(tmp_path):
    path = tmp_path / "test.jsonl"
    rows = [{"prompt": "x", "include": [one("cat")]}, {"prompt": "y", "ocr_text": "Hi"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert requests_in([path]) == {request_of(row) for row in rows}
    path.write_text('{"prompt": "a cat"}\n')
    with pytest.raises(UserError, match="'a cat' has neither include"):
        requests_in([path])


def test_prompts_held_out_share_no_request_with_those_of_training_whatever_the_words():
    rows = [{"prompt": f"{number} {shape}"} for number in range(20) for shape in ("red", "Red!")]
    rows += [{"prompt": "0 red", "include": [one("cat")]}]
    prompts = records_of(rows)
    training, held_out = hold_out(prompts, 0.25)
    assert not overlaps(training, held_out)
    assert sorted(p.uid for p in (*training, *held_out)) == sorted(p.uid for p in prompts)
    requested = {plain_text(prompt.text) for prompt in held_out}
    assert len(requested) in (5, 6)  # of 21 requests; 5 where one is asked for in the same words
    again = hold_out(prompts[::-1], 0.25)[1]
    assert {p.uid for p in again} == {p.uid for p in held_out}
    with pytest.raises(UserError, match="prompts.held_out to null"):
        hold_out(records_of([{"prompt": "a cat"}, {"prompt": "A cat."}]), 0.1)


def test_a_tenth_of_eight_prompts_is_four_and_of_seven_it_is_refused():
    """One held-out prompt of eight was the base of an interval."""
    colors = ("red", "blue", "green", "gold", "grey", "pink", "teal", "lime")
    prompts = records_of([{"prompt": f"a {color} cat"} for color in colors])
    assert [len(part) for part in hold_out(prompts, 0.1)] == [4, 4]
    with pytest.raises(UserError, match="prompts.held_out to null"):
        hold_out(prompts[1:], 0.1)


def test_no_request_of_the_tiny_world_is_in_two_splits():
    """By the metadata that the check reads: class, count, colour, size, place, relation."""
    each = [{request_of(p) for tag in TAGS for p in split_prompts(tag, s)} for s in SPLITS]
    assert sum(map(len, each)) == len(set.union(*each)) == sum(len(requests(t)) for t in TAGS)
