"""Images keep their pixels where they should, and text stays inside its place."""

import base64
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flowrl.utils.images import Stack, data_url, fit, font, image_grid, to_pil, wrap

WIDTH = 192


def test_pixels_are_rounded_to_bytes_and_bytes_survive():
    # Tensors become the nearest of 256 levels.
    values = torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 1.0, 1.5, -1.0, float("nan")])
    (image,) = to_pil(values.expand(1, 3, 1, -1))
    assert np.asarray(image)[0, :, 0].tolist() == [0, 0, 1, 255, 255, 0, 0]
    # Bytes survive the way through floats.
    levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 2, -1)
    (image,) = to_pil(levels.float() / 255)
    assert torch.equal(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None], levels)


def test_a_data_url_gives_the_same_pixels_back():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    body = data_url(Image.fromarray(pixels)).removeprefix("data:image/webp;base64,")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(body)))), pixels)


def test_images_are_enlarged_by_whole_factors():
    # Images are enlarged by whole factors and reduced to the box.
    for size, expected in [
        ((64, 64), (192, 192)),
        ((64, 32), (192, 96)),
        ((100, 50), (100, 50)),
        ((1024, 1), (192, 1)),
    ]:
        assert fit(Image.new("RGB", size), WIDTH).size == expected
    # Enlarging repeats pixels.
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    large = np.asarray(fit(Image.fromarray(pixels), WIDTH))
    assert np.array_equal(large, pixels.repeat(3, 0).repeat(3, 1))


@given(text=st.text(max_size=300), lines=st.integers(1, 4))
def test_wrapped_text_never_leaves_its_column(text, lines):
    wrapped = wrap(text, WIDTH, lines=lines)
    assert len(wrapped) <= lines
    assert all(font(15).getlength(line) <= WIDTH for line in wrapped)


def test_text_says_when_it_is_cut_and_a_sheet_has_a_heading():
    # Text that fits is whole and text that does not says so.
    words = "a photo of three red circles and one blue star"
    assert " ".join(wrap(words, WIDTH)) == words
    assert wrap("word " * 100, WIDTH)[-1].endswith("…")
    # A sheet needs images and moves them below its heading.
    # A sheet is refused without images.
    with pytest.raises(ValueError, match="at least one image"):
        image_grid([])
    # A heading stands above and moves the images down.
    stack = Stack(caption="", images=[Image.new("RGB", (64, 64), "red")])
    plain, headed = image_grid([stack]), image_grid([stack], heading=["one line"])
    assert headed.width == plain.width and headed.height > plain.height
    assert np.array_equal(np.asarray(headed)[-plain.height + 12 :], np.asarray(plain)[12:])
