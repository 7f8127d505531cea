"""Evaluation as deployed: the pipeline's own call, from given noise."""

import diffusers
import pytest
import torch

from flowrl.backbones.call import call_arguments
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.small import small_pipeline
from flowrl.prompts.records import PromptRecord
from flowrl.training.evaluate import PipelineCall

PROMPTS = [PromptRecord(uid=text, text=text) for text in ("a red circle", "a small blue star")]
STEPS = 2


@pytest.mark.parametrize(
    "name",
    ["StableDiffusion3Pipeline", "FluxPipeline", "Flux2KleinPipeline", "QwenImagePipeline",
     "ZImagePipeline", pytest.param("Krea2Pipeline", marks=pytest.mark.slow),
     pytest.param("LongCatImagePipeline", marks=pytest.mark.slow)],
)  # fmt: skip
def test_any_class_draws_the_given_noise_as_its_own_call_does(name):
    pipeline = small_pipeline(getattr(diffusers, name))
    pipeline.set_progress_bar_config(disable=True)
    size = {"guidance": 3.0, "max_sequence_length": 64, "height": 64, "width": 64}
    backbone = PipelineBackbone(pipeline, **size)
    noise = torch.randn(2, *backbone.latent_shape(), generator=torch.Generator().manual_seed(0))
    call = PipelineCall(arguments=call_arguments(pipeline, **size))
    images = call(backbone, PROMPTS, noise, STEPS)
    assert images.shape == (2, 3, 64, 64) and images.std() > 0
    # Euler's steps along the backbone's velocities end in the same images.
    cond = backbone.encode([p.text for p in PROMPTS], ["", ""])
    sigmas, x = backbone.sigmas(STEPS), noise.to(backbone.dtype)
    with torch.no_grad():
        for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
            v = backbone.velocity(x, now.expand(2), cond)
            x = x + (after - now) * v
        expected = backbone.decode(x).clamp(0, 1)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-5)
