import math

import numpy as np
import pytest
import torch

from rewards.geneval import GenEval, load_detector
from rewards.geneval_rules import Detection

WHITE = torch.ones(1, 3, 8, 8)
CAT = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
TWO = {"tag": "counting", "include": [{"class": "cat", "count": 2}]}


def cat(score: float, color: str | None = None) -> Detection:
    return Detection(box=(0, 0, 4, 4), score=score, name="cat", color=color)


class Scripted:
    """Two cats, one of them doubtful."""

    threshold, counting_threshold = 0.3, 0.9
    calls = 0

    def __call__(self, images):
        type(self).calls += 1
        return [[cat(0.95), cat(0.5)] for _ in images]


class Mean:
    """A cat of the colour that dominates the picture's channels in RGB order."""

    def __call__(self, images):
        names = ("red", "green", "blue")
        return [[cat(1.0, names[int(np.argmax(i.mean((0, 1))))])] for i in images]


def scripted(**args) -> GenEval:
    made = GenEval(**args)
    made._find = Scripted()
    return made


def test_counting_has_a_threshold_of_its_own():
    scores = scripted(mode="strict")(WHITE.repeat(2, 1, 1, 1), ["", ""], [TWO, CAT])
    assert scores.tolist() == [0.0, 0.0]
    assert scripted()(WHITE, [""], [TWO]).item() == 0.5  # one sure cat of two
    assert scripted()(WHITE, [""], [CAT]).item() == 0.0  # two cats where one is wanted


def test_a_prompt_of_no_known_kind_is_missing_and_costs_no_detection():
    calls = Scripted.calls
    scores = scripted()(WHITE, [""], [{"tag": "ocr", "ocr_text": "CAT"}])
    assert math.isnan(scores.item()) and Scripted.calls == calls
    assert scripted(compat="flow_grpo")(WHITE, [""], [{}]).item() == -10


def test_the_detector_gets_red_green_blue_in_this_order():
    made = GenEval(mode="strict")
    made._find = Mean()
    picture = torch.zeros(3, 3, 4, 4)
    for channel in range(3):
        picture[channel, channel] = 1
    wanted = [
        CAT | {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": color}]}
        for color in ("red", "green", "blue")
    ]
    assert made(picture, [""] * 3, wanted).tolist() == [1.0, 1.0, 1.0]
    assert made(picture.flip(1), [""] * 3, wanted).tolist() == [0.0, 1.0, 0.0]


def test_a_reward_is_cheap_to_make_and_wrong_names_are_refused():
    assert GenEval()._find is None
    for wrong in ({"mode": "lenient"}, {"compat": "other"}):
        with pytest.raises(ValueError, match="one of|flow_grpo"):
            GenEval(**wrong)
    with pytest.raises(ValueError, match="tiny"):
        GenEval(detector="nothing")(WHITE, [""], [CAT])


def test_a_detector_is_found_by_its_import_path():
    assert load_detector("collections:Counter") == {}


def test_a_detector_that_fails_does_not_score_zero():
    def broken(images):
        raise RuntimeError("out of memory")

    made = GenEval()
    made._find = broken
    with pytest.raises(RuntimeError):
        made(WHITE, [""], [CAT])


def test_bounds_hold_unless_quirks_are_asked_for():
    assert GenEval().bounds == (0.0, 1.0)
    assert GenEval(compat="flow_grpo").bounds == (None, 1.0)
