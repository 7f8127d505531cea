import numpy as np
import pytest
import torch
from flowrl_rewards.geneval import GenEval
from flowrl_rewards.geneval_rules import Detection
from flowrl_rewards.networks.sharing import Shared

WHITE = torch.ones(1, 3, 8, 8)
CAT = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
TWO = {"tag": "counting", "include": [{"class": "cat", "count": 2}]}


def cat(score: float, color: str | None = None) -> Detection:
    return Detection(box=(0, 0, 4, 4), score=score, name="cat", color=color)


def colored(color: str) -> dict:
    return {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": color}]}


class Scripted:
    """Two cats, one of them doubtful."""

    threshold, counting_threshold = 0.3, 0.9

    def __call__(self, images):
        return [[cat(0.95), cat(0.5)] for _ in images]


class Mean:
    """A cat of the colour that dominates the image's channels in RGB order."""

    def __call__(self, images):
        names = ("red", "green", "blue")
        return [[cat(1.0, names[int(np.argmax(i.mean((0, 1))))])] for i in images]


def scripted(find=None, **args) -> GenEval:
    made = GenEval(**args)
    made._find, made._detectors = find or Scripted(), Shared()
    return made


def scores_of(reward: GenEval, images, metadata) -> torch.Tensor:
    """Scores, when none may be missing."""
    scores, reasons = reward(images, [""] * len(metadata), metadata)
    assert not reasons
    return scores


def test_counting_has_a_threshold_of_its_own():
    scores = scores_of(scripted(mode="strict"), WHITE.repeat(2, 1, 1, 1), [TWO, CAT])
    assert scores.tolist() == [0.0, 0.0]
    for wanted, score in (
        (TWO, 0.5),  # one sure cat of two
        (CAT, 0),  # two cats where one is wanted
    ):
        assert scores_of(scripted(), WHITE, [wanted]).item() == score


def test_a_misspelled_tag_or_a_colour_that_nothing_can_tell_is_found_before_training():
    wrong = CAT | {"tag": "colours"}
    assert GenEval().applies("", wrong) and not GenEval().applies("", {"tag": "ocr"})
    pink = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "pink"}]}
    for metadata, words in ((wrong, "'colours'.*single_object"), (pink, "'tiny' .*'pink', .*red")):
        with pytest.raises(ValueError, match=words):
            GenEval().check("", metadata)
    GenEval(colors="clip").check("", pink)


def test_the_detector_gets_red_green_blue_in_this_order():
    made = scripted(Mean(), mode="strict")
    image = torch.zeros(3, 3, 4, 4)
    for channel in range(3):
        image[channel, channel] = 1
    wanted = [colored(color) for color in ("red", "green", "blue")]
    assert scores_of(made, image, wanted).tolist() == [1.0, 1.0, 1.0]
    assert scores_of(made, image.flip(1), wanted).tolist() == [0.0, 1.0, 0.0]


def test_a_prompt_that_cannot_be_judged_is_missing_with_a_reason_and_spoils_no_other():
    position = {"tag": "position", "include": ["cat"]}
    for wrong in ({"tag": "single_object"}, position, TWO | {"exclude": 3}):
        scores, reasons = scripted(Mean())(WHITE.repeat(2, 1, 1, 1), ["", ""], [wrong, CAT])
        assert scores[0].isnan() and scores[1] == 1, wrong
        assert list(reasons) == [0] and "clude" in reasons[0], wrong


@pytest.mark.weights
def test_the_published_detector_sees_the_cat():
    made = GenEval("official", detector="mask2former")
    (item,) = made.fixtures()
    assert scores_of(made, item["images"], [item["metadata"]] * 2).tolist() == [1, 0]
