"""Pictures keep their pixels where they should, and text stays inside its place."""

import base64
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowrl.utils.images import Stack, data_url, fit, font, sheet, to_pil, wrap

WIDTH = 192


def test_tensors_become_the_nearest_of_256_levels():
    values = torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 1.0, 1.5, -1.0, float("nan")])
    (picture,) = to_pil(values.expand(1, 3, 1, -1))
    assert np.asarray(picture)[0, :, 0].tolist() == [0, 0, 1, 255, 255, 0, 0]


def test_bytes_survive_the_way_through_floats():
    levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 2, -1)
    (picture,) = to_pil(levels.float() / 255)
    assert torch.equal(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None], levels)


@pytest.mark.parametrize("webp", [True, False])
def test_a_data_url_gives_the_same_pixels_back(monkeypatch, webp):
    from flowrl.utils import images as pictures

    if webp and not pictures.features.check("webp"):
        pytest.skip("Pillow was built without WebP")
    monkeypatch.setattr(pictures.features, "check", lambda name: webp)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    head, _, body = data_url(Image.fromarray(pixels)).partition(";base64,")
    assert head == ("data:image/webp" if webp else "data:image/png")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(body)))), pixels)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((64, 64), (192, 192)), ((64, 32), (192, 96)), ((100, 50), (100, 50)), ((1024, 1), (192, 1))],
)
def test_pictures_are_enlarged_by_whole_factors_and_reduced_to_the_box(size, expected):
    assert fit(Image.new("RGB", size), WIDTH).size == expected


def test_enlarging_repeats_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    large = np.asarray(fit(Image.fromarray(pixels), WIDTH))
    assert np.array_equal(large, pixels.repeat(3, 0).repeat(3, 1))


@settings(deadline=None)
@given(text=st.text(max_size=300), lines=st.integers(1, 4))
def test_wrapped_text_never_leaves_its_column(text, lines):
    wrapped = wrap(text, WIDTH, lines=lines)
    assert len(wrapped) <= lines
    assert all(font(15).getlength(line) <= WIDTH for line in wrapped)


def test_text_that_fits_is_whole_and_text_that_does_not_says_so():
    words = "a photo of three red circles and one blue star"
    assert " ".join(wrap(words, WIDTH)) == words
    assert wrap("word " * 100, WIDTH)[-1].endswith("…")


def test_a_sheet_is_refused_without_pictures():
    with pytest.raises(ValueError, match="at least one picture"):
        sheet([])


def test_a_heading_stands_above_and_moves_the_pictures_down():
    stack = Stack(caption="", pictures=[Image.new("RGB", (64, 64), "red")])
    plain, headed = sheet([stack]), sheet([stack], heading=["one line"])
    assert headed.width == plain.width and headed.height > plain.height
    assert np.array_equal(np.asarray(headed)[-plain.height + 12 :], np.asarray(plain)[12:])
