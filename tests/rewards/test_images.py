import pytest
import torch

from rewards.images import to_uint8


def test_every_level_survives_the_round_trip():
    levels = torch.arange(256, dtype=torch.float32).reshape(1, 1, 16, 16).repeat(1, 3, 1, 1)
    assert (to_uint8(levels / 255)[0, :, :, 0] == levels[0, 0].numpy()).all()


def test_broken_pixels_are_an_error_and_never_a_colour():
    images = torch.zeros(1, 3, 2, 2)
    images[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(images)
