"""A call that begins near other noise."""

import numpy as np
import pytest
import torch

from flowrl.backbones.first_noise import noise_near


def image(pipeline, seed: int = 7) -> np.ndarray:
    draw = torch.Generator().manual_seed(seed)
    call = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "np"}
    if type(pipeline).__name__ == "SanaPipeline":
        call["use_resolution_binning"] = False
    return pipeline("a red circle", generator=draw, **call).images[0]


@pytest.mark.parametrize("family", ["sd3", "flux", "sana"])
def test_a_share_of_0_or_1_is_one_seeds_noise_and_the_pipeline_is_as_it_was(load_tiny, family):
    pipeline = load_tiny(family=family)
    before = [image(pipeline, seed) for seed in (7, 8)]
    for share, expected in zip((0.0, 1.0), before, strict=True):
        with noise_near(pipeline, (7, 8), share):
            assert np.array_equal(image(pipeline), expected)
    with noise_near(pipeline, (7, 8), 0.6):
        mixed = image(pipeline)
    assert not any(np.array_equal(mixed, one) for one in before)
    assert np.array_equal(image(pipeline), before[0])


def test_the_mixture_of_noises_moves_and_keeps_its_variance():
    class Prepares:
        def prepare_latents(self, shape, generator):
            return torch.randn(shape, generator=generator), "ids"

    pipeline, shape = Prepares(), (200_000,)
    a, b, c = (torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in (1, 2, 3))
    with noise_near(pipeline, (1, 2, 3), 0.6):
        mixed, ids = pipeline.prepare_latents(shape, generator=torch.Generator())
    torch.testing.assert_close(mixed, 0.8 * (0.8 * a + 0.6 * b) + 0.6 * c)
    assert ids == "ids" and mixed.var().item() == pytest.approx(1, abs=0.02)
    assert pipeline.prepare_latents(shape, torch.Generator().manual_seed(1))[0].equal(a)
