import numpy as np
import pytest
import torch
from flowrl_rewards.detectors import detect, load_detector

IMAGES = np.stack([np.full((8, 8, 3), level, np.uint8) for level in (10, 20, 30)])


def test_detectors_are_found_by_name_or_import_path():
    assert load_detector("collections:Counter") == {}
    assert load_detector("collections:Counter", {"cats": 2}) == {"cats": 2}
    with pytest.raises(ValueError, match="or 'module:attribute'"):
        load_detector("nothing")


def test_what_concerns_all_images_is_raised_and_an_answer_of_another_length_is_a_failure():
    for error in (ImportError("scipy"), torch.cuda.OutOfMemoryError("full")):

        def broken(images, error=error):
            raise error

        with pytest.raises(type(error)):
            detect(broken, IMAGES)
    answers = detect(lambda images: [], IMAGES)
    assert all("0 of 1" in str(answer) for answer in answers)
