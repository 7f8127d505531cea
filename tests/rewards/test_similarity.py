import base64

import pytest
import torch
from PIL import Image

from rewards.fixtures import blank, square
from rewards.images import to_uint8
from rewards.similarity import Similarity

RED, BLUE = square("red", 32), square("blue", 32)


@pytest.fixture
def red_file(tmp_path):
    path = tmp_path / "red.png"
    Image.fromarray(to_uint8(RED[None])[0]).save(path)
    return path


def scores(reference, *images, **args):
    made = Similarity(**args)
    return made(torch.stack(images), [""] * len(images), [{"reference": reference}] * len(images))


@pytest.mark.parametrize("measure", ["ssim", "pixels"])
def test_the_reference_itself_scores_1_and_another_picture_less(red_file, measure):
    same, other = scores(str(red_file), RED, BLUE, measure=measure)
    assert same == pytest.approx(1) and other < 0.95


def test_each_picture_is_compared_with_its_own_reference(red_file, tmp_path):
    blue_file = tmp_path / "blue.png"
    Image.fromarray(to_uint8(BLUE[None])[0]).save(blue_file)
    both = [{"reference": str(red_file)}, {"reference": str(blue_file)}]
    right = Similarity()(torch.stack([RED, BLUE]), ["", ""], both)
    wrong = Similarity()(torch.stack([RED, BLUE]), ["", ""], both[::-1])
    assert torch.allclose(right, torch.ones(2)) and wrong.max() < 0.95


def test_a_reference_of_another_size_is_brought_to_the_pictures(red_file):
    large, empty = scores(str(red_file), square("red", 64), blank(64))
    assert large > 0.9 > empty


def test_a_reference_may_be_a_data_url(red_file):
    data = base64.b64encode(red_file.read_bytes()).decode()
    assert scores(f"data:image/png;base64,{data}", RED).item() == pytest.approx(1)


@pytest.mark.parametrize(
    "reference", ["missing.png", "data:image/png;base64,%%%", "data:image/png;base64,AAAA", ""]
)
def test_a_reference_that_cannot_be_opened_is_found_at_the_start(reference):
    with pytest.raises(ValueError, match=r'metadata\["reference"\].*cannot be opened'):
        Similarity().check("", {"reference": reference})


def test_relative_paths_start_in_the_folder_and_never_leave_it(red_file, tmp_path):
    made = Similarity(folder=str(tmp_path))
    made.check("", {"reference": "red.png"})
    inner = Similarity(folder=str(tmp_path / "inner"))
    for outside in ("../red.png", str(red_file)):
        with pytest.raises(ValueError, match="outside the reward's folder"):
            inner.check("", {"reference": outside})


def test_a_file_that_is_no_picture_is_no_reference(tmp_path):
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(ValueError, match="cannot be opened"):
        Similarity().check("", {"reference": str(tmp_path / "a.png")})


def test_its_fixtures_are_in_order():
    for case in Similarity().fixtures():
        pictures = torch.stack([case["better"], case["worse"]])
        better, worse = Similarity()(pictures, [""] * 2, [case["metadata"]] * 2)
        assert better > worse
