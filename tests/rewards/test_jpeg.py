import io

import numpy as np
import pytest
import torch
from flowrl_rewards.jpeg import Compressibility, Incompressibility
from PIL import Image

PLAIN = torch.full((1, 3, 64, 64), 0.5)
NOISE = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
BOTH = torch.cat([PLAIN, NOISE])


def test_the_score_is_the_size_of_the_file_in_kilobytes():
    levels = (NOISE[0] * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(levels)).save(file, "JPEG", quality=95)
    assert Incompressibility()(NOISE, [""], [{}]).item() == pytest.approx(
        len(file.getvalue()) / 1000
    )


def test_compressibility_is_minus_the_size_in_500_kilobytes():
    sizes = Incompressibility()(BOTH, ["", ""], [{}, {}])
    assert torch.equal(Compressibility()(BOTH, ["", ""], [{}, {}]), -sizes / 500)
    assert sizes[0] < sizes[1]


def test_another_encoder_agrees():
    """OpenCV brings a libjpeg of its own; both halve the colours' resolution."""
    cv2 = pytest.importorskip("cv2")
    y, x = np.mgrid[0:128, 0:128]
    waves = [np.sin(x / 9) * np.cos(y / 7), np.sin((x + y) / 13), np.cos(x / 5)]
    smooth = torch.from_numpy(np.stack(waves)).float()[None] / 2 + 0.5
    images = [PLAIN, NOISE, smooth]
    for image in images:
        levels = (image[0] * 255).round().byte().permute(1, 2, 0).numpy()[..., ::-1]
        options = [cv2.IMWRITE_JPEG_QUALITY, 95]
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420]
        _, other = cv2.imencode(".jpg", np.ascontiguousarray(levels), options)
        own = Incompressibility()(image, [""], [{}]).item()
        assert own == pytest.approx(len(other) / 1000, rel=0.02)


def test_fixtures_are_judged_in_their_right_order():
    for reward in (Compressibility(), Incompressibility()):
        for item in reward.fixtures():
            scores = reward(torch.stack([item["better"], item["worse"]]), ["", ""], [{}, {}])
            assert scores[0] > scores[1], item["says"]


def test_quality_counts_must_be_one_and_versions_tell_it_and_the_two_rewards_apart():
    best, worse = (Incompressibility(quality)(NOISE, [""], [{}]) for quality in (95, 30))
    assert worse < best
    with pytest.raises(ValueError, match="between 1 and 100"):
        Incompressibility(0)
    made = [kind(quality) for kind in (Compressibility, Incompressibility) for quality in (30, 95)]
    assert len({reward.version for reward in made}) == len(made)
