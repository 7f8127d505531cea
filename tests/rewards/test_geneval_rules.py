"""The rules, with scripted boxes: no image, no detector."""

from dataclasses import replace

import pytest
from flowrl_rewards.geneval_rules import (
    MAX_PER_CLASS,
    TAGS,
    Detection,
    by_class,
    check,
    official,
    partial,
    relations,
    strict,
)
from hypothesis import given
from hypothesis import strategies as st


def box(x: float, y: float, size: float = 10) -> tuple[float, float, float, float]:
    return (x - size / 2, y - size / 2, x + size / 2, y + size / 2)


def thing(name: str, x: float = 50, y: float = 50, color: str | None = None, score: float = 0.9):
    return Detection(box=box(x, y), score=score, name=name, color=color)


def one(name: str, **extra) -> dict:
    return {"class": name, "count": 1, **extra}


CAT, DOG = thing("cat", 20), thing("dog", 80)
RED_CAT, BLUE_CAT = thing("cat", 20, color="red"), thing("cat", 20, color="blue")
BLUE_DOG, RED_DOG = thing("dog", 80, color="blue"), thing("dog", 80, color="red")
ONE_CAT = [one("cat")]
PAIR = [one("cat"), one("dog")]
TWO_CATS = [{"class": "cat", "count": 2}]
NO_THIRD = [{"class": "cat", "count": 3}]
LEFT = [one("dog"), one("cat", position=["left of", 0])]
RIGHT = [one("dog"), one("cat", position=["right of", 0])]
COLORED = [one("cat", color="red")]
ATTRIBUTES = [one("cat", color="red"), one("dog", color="blue")]

CASES = [  # tag, found, include, exclude, official, strict, partial
    ("single_object", [CAT], ONE_CAT, [], 1, 1, 1),
    ("single_object", [], ONE_CAT, [], 0, 0, 0),
    ("single_object", [CAT, CAT], ONE_CAT, [], 1, 0, 0),
    ("two_object", [CAT, DOG], PAIR, [], 1, 1, 1),
    ("two_object", [CAT], PAIR, [], 0, 0, 1 / 2),
    ("counting", [CAT] * 2, TWO_CATS, NO_THIRD, 1, 1, 1),
    ("counting", [CAT], TWO_CATS, NO_THIRD, 0, 0, 1 / 2),
    ("counting", [CAT] * 3, TWO_CATS, NO_THIRD, 0, 0, 1 / 2),
    ("counting", [CAT] * 3, TWO_CATS, [], 1, 0, 1 / 2),
    ("counting", [CAT] * 9, TWO_CATS, NO_THIRD, 0, 0, 0),
    ("colors", [RED_CAT], COLORED, [], 1, 1, 1),
    ("colors", [BLUE_CAT], COLORED, [], 0, 0, 1 / 2),
    ("colors", [RED_CAT, RED_CAT], COLORED, [], 1, 0, 0),
    ("position", [CAT, DOG], LEFT, [], 1, 1, 1),
    ("position", [CAT, DOG], RIGHT, [], 0, 0, 2 / 3),
    ("position", [CAT], LEFT, [], 0, 0, 1 / 3),
    ("color_attr", [RED_CAT, BLUE_DOG], ATTRIBUTES, [], 1, 1, 1),
    ("color_attr", [BLUE_CAT, RED_DOG], ATTRIBUTES, [], 0, 0, 1 / 2),
    ("color_attr", [RED_CAT, RED_DOG], ATTRIBUTES, [], 0, 0, 3 / 4),
]


def test_every_kind_is_judged_as_defined_in_every_mode():
    assert {case[0] for case in CASES} == set(TAGS)
    for case in CASES:
        _, found, include, exclude, by_official, by_strict, by_partial = case
        objects = by_class(found, 0.3)
        assert official(objects, include, exclude) == by_official, case
        assert strict(objects, include) == by_strict, case
        assert partial(objects, include) == pytest.approx(by_partial), case


def test_size_and_place_count_where_they_are_asked_and_told():
    small = replace(CAT, size="small", place="top left")
    large = replace(CAT, size="large", place="top left")
    for found, include, expected in (
        (small, [one("cat", size="small")], 1),
        (large, [one("cat", size="small")], 1 / 2),
        (large, [one("cat", place="top left")], 1),
        (large, [one("cat", place="top right", size="small")], 1 / 3),
        (large, ONE_CAT, 1),
        (CAT, [one("cat", size="small")], 1 / 2),  # a detector that tells no sizes
    ):
        objects = by_class([found], 0.3)
        assert partial(objects, include) == pytest.approx(expected), include
        assert strict(objects, include) == (expected == 1)
        assert official(objects, include, []) == 1  # the published verdict knows neither


def test_confidence_must_exceed_the_threshold_and_only_sixteen_boxes_count():
    assert by_class([thing("cat", score=0.3)], 0.3)["cat"] == []
    scores = [0.5 + i / 100 for i in range(20)]
    kept = by_class([thing("cat", score=s) for s in scores], 0.3)["cat"]
    assert [d.score for d in kept] == sorted(scores, reverse=True)[:MAX_PER_CLASS]


detections = st.builds(
    thing,
    st.sampled_from(("cat", "dog")),
    st.integers(5, 60),
    st.integers(5, 60),
    st.sampled_from(("red", "blue", None)),
    st.sampled_from((0.2, 0.5, 0.9)),
)
prompts = st.sampled_from([ONE_CAT, PAIR, TWO_CATS, LEFT, RIGHT, COLORED, ATTRIBUTES])


@given(st.lists(detections, max_size=20), prompts)
def test_partial_lies_in_0_to_1_and_is_1_exactly_when_strict_is(found, include):
    objects = by_class(found, 0.3)
    score = partial(objects, include)
    assert 0 <= score <= 1
    assert (strict(objects, include) == 1) == (score == 1)
    assert not strict(objects, include) or official(objects, include, []) == 1


@given(st.integers(-100, 100), st.integers(-100, 100), st.integers(1, 40))
def test_relations_point_the_right_way_diagonals_have_two_and_one_centre_none(x, y, size):
    assert relations(box(20, 50), box(80, 50)) == {"left of"}
    assert relations(box(50, 20), box(50, 80)) == {"above"}  # y points down
    assert relations(box(80, 80), box(20, 20)) == {"right of", "below"}
    assert relations(box(x, y, size), box(x, y, 2 * size)) == set()


def test_a_prompt_that_could_never_be_met_is_refused_with_what_is_wrong():
    def cat_at(position):
        return [one("dog"), one("cat", position=position)]

    for tag, include, says in (
        ("shapes", ONE_CAT, "'shapes'.*single_object"),
        ("counting", [], r"include is \[\]"),
        ("single_object", [{"class": "cat", "count": True}], "count"),
        ("counting", [{"count": 2}], "class"),
        ("single_object", ["circle"], "'circle'"),
        ("single_object", "cat", "include is 'cat'.*list"),
        ("position", cat_at(["on", 0]), "left of"),
        ("position", [one("cat", position=["above", 0])], "earlier"),
        ("position", cat_at("left of"), "'left of'"),
        ("position", PAIR, "no position"),
        ("colors", ONE_CAT, "no color"),
        ("single_object", [one("cat", size=7)], "size"),
        ("single_object", [one("cat", place=["top left"])], "place"),
    ):
        with pytest.raises(ValueError, match=says):
            check({"tag": tag, "include": include})
    for exclude, says in (([{"class": "cat"}], "count"), ("cat", "exclude")):
        with pytest.raises(ValueError, match=says):
            check({"tag": "counting", "include": TWO_CATS, "exclude": exclude})
    for include in (ONE_CAT, PAIR, TWO_CATS, LEFT, RIGHT, COLORED, ATTRIBUTES):
        for exclude in (NO_THIRD, None):  # these are in the benchmark's form
            check({"tag": "two_object", "include": include, "exclude": exclude})
