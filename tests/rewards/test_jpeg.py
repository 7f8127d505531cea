import io

import numpy as np
import pytest
import torch
from flowrl_rewards.jpeg import Compressibility, Incompressibility
from PIL import Image

NOISE = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
BOTH = torch.cat([torch.full((1, 3, 64, 64), 0.5), NOISE])


def test_scores_are_the_size_of_the_file_in_kilobytes_and_minus_it_in_500():
    levels = (NOISE[0] * 255).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(levels)).save(file, "JPEG", quality=95)
    sizes = Incompressibility()(BOTH, ["", ""], [{}, {}])
    assert sizes[1].item() == pytest.approx(len(file.getvalue()) / 1000)
    assert torch.equal(Compressibility()(BOTH, ["", ""], [{}, {}]), -sizes / 500)
    assert sizes[0] < sizes[1]
