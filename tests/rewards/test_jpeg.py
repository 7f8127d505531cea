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
