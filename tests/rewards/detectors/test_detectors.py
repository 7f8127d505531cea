import subprocess
import sys

import numpy as np
import pytest
import torch

from rewards.detectors import (
    COLOR_NAMERS,
    DETECTORS,
    detect,
    load_color_namer,
    load_detector,
)
from rewards.geneval_rules import Detection

CAT = Detection(box=(0, 0, 4, 4), score=0.9, name="cat")
PICTURES = np.stack([np.full((8, 8, 3), level, np.uint8) for level in (10, 20, 30)])
ASKED = [("cat",), ("dog",), ("cat",)]


def test_detectors_and_namers_of_colours_are_found_by_name_or_import_path():
    assert load_detector("collections:Counter") == {}
    assert load_detector("collections:Counter", {"cats": 2}) == {"cats": 2}
    assert load_color_namer("collections:Counter") == {}
    for load in (load_detector, load_color_namer):
        with pytest.raises(ValueError, match="or 'module:attribute'"):
            load("nothing")


def test_every_name_stands_for_something_that_is_made_without_weights_and_says_what_it_knows():
    for name in DETECTORS:
        find = load_detector(name)
        assert callable(find) and isinstance(find.colors, tuple)
        assert getattr(find, "open_vocabulary", False) or find.classes
    for name in COLOR_NAMERS:
        assert len(load_color_namer(name).colors) == 10


def test_making_detectors_imports_no_network():
    code = (
        "import sys; from rewards.detectors import *\n"
        "for name in DETECTORS: load_detector(name)\n"
        "for name in COLOR_NAMERS: load_color_namer(name)\n"
        "sys.exit(bool({'transformers', 'torchvision', 'open_clip'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_detector_is_asked_once_and_one_of_open_vocabulary_is_told_what_to_find():
    calls = []

    def find(*given):
        calls.append(given)
        return [[CAT]] * 3

    assert detect(find, PICTURES, ASKED) == [[CAT]] * 3
    find.open_vocabulary = True
    detect(find, PICTURES, ASKED)
    assert [len(given) for given in calls] == [1, 2] and calls[1][1] == ASKED


def test_one_bad_picture_spoils_no_other():
    def picky(images, classes):
        if (images == 20).any():
            raise RuntimeError("not this one")
        return [[Detection(box=CAT.box, score=0.9, name=names[0])] for names in classes]

    picky.open_vocabulary = True
    first, second, third = detect(picky, PICTURES, ASKED)
    assert first == third == [CAT]
    assert isinstance(second, RuntimeError) and str(second) == "not this one"


def test_an_answer_of_another_length_is_a_failure():
    answers = detect(lambda images: [], PICTURES, ASKED)
    assert all("answered for 0 of 1 pictures" in str(answer) for answer in answers)


@pytest.mark.parametrize("error", [ImportError("scipy"), torch.cuda.OutOfMemoryError("full")])
def test_what_concerns_all_pictures_is_raised(error):
    def broken(images):
        raise error

    with pytest.raises(type(error)):
        detect(broken, PICTURES, ASKED)
