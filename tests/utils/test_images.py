"""Images keep their pixels where they should."""

import numpy as np
import torch

from flowrl.utils.images import to_pil


def test_pixels_are_rounded_to_bytes_and_bytes_survive():
    # Tensors become the nearest of 256 levels.
    values = torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 1.0, 1.5, -1.0, float("nan")])
    (image,) = to_pil(values.expand(1, 3, 1, -1))
    assert np.asarray(image)[0, :, 0].tolist() == [0, 0, 1, 255, 255, 0, 0]
    # Bytes survive the way through floats.
    levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 2, -1)
    (image,) = to_pil(levels.float() / 255)
    assert torch.equal(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None], levels)
