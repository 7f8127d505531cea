import io

import numpy as np
import pytest
import torch
from flowrl_rewards.images import pngs, to_uint8
from PIL import Image


def test_broken_pixels_are_an_error_and_never_a_colour():
    images = torch.zeros(1, 3, 2, 2)
    images[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(images)


def opened(images, longest):
    return np.stack([np.array(Image.open(io.BytesIO(file))) for file in pngs(images, longest)])


def test_files_hold_every_level_and_are_shrunk_in_their_proportions_and_never_enlarged():
    levels = torch.arange(256).byte().view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    assert np.array_equal(opened(levels / 255, 64), levels.permute(0, 2, 3, 1))
    for size, expected in (((40, 80), (16, 32)), ((32, 8), (32, 8))):
        assert opened(torch.rand(1, 3, *size), 32).shape == (1, *expected, 3)
