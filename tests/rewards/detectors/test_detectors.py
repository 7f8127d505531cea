import numpy as np
import pytest
import torch
from flowrl_rewards.detectors import (
    detect,
    load_color_namer,
    load_detector,
)
from flowrl_rewards.geneval_rules import Detection

CAT = Detection(box=(0, 0, 4, 4), score=0.9, name="cat")
IMAGES = np.stack([np.full((8, 8, 3), level, np.uint8) for level in (10, 20, 30)])


def test_detectors_and_namers_of_colours_are_found_by_name_or_import_path():
    assert load_detector("collections:Counter") == {}
    assert load_detector("collections:Counter", {"cats": 2}) == {"cats": 2}
    assert load_color_namer("collections:Counter") == {}
    for load in (load_detector, load_color_namer):
        with pytest.raises(ValueError, match="or 'module:attribute'"):
            load("nothing")


def test_one_bad_image_spoils_no_other():
    def picky(images):
        if (images == 20).any():
            raise RuntimeError("not this one")
        return [[CAT] for _ in images]

    first, second, third = detect(picky, IMAGES)
    assert first == third == [CAT]
    assert isinstance(second, RuntimeError) and str(second) == "not this one"


def test_what_concerns_all_images_is_raised_and_an_answer_of_another_length_is_a_failure():
    for error in (ImportError("scipy"), torch.cuda.OutOfMemoryError("full")):

        def broken(images, error=error):
            raise error

        with pytest.raises(type(error)):
            detect(broken, IMAGES)
    answers = detect(lambda images: [], IMAGES)
    assert all("0 of 1" in str(answer) for answer in answers)
