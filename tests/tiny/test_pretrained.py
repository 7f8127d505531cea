"""The built-in pipelines as a user meets them: loaded by diffusers, called with a plain prompt."""

from typing import Any

import pytest
import torch

from flowrl.backbones.loading import TINY, pipeline_path
from flowrl.prompts.records import load_prompts
from flowrl.scoring.scorer import score
from flowrl.scoring.spec import RewardSpec, load_reward
from flowrl.utils.images import to_tensor

SMALL = {"height": 64, "width": 64}


# The pipeline's class, and what a call must say of the size.
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-sd3": ("StableDiffusion3Pipeline", {}),
    "tiny-flux": ("FluxPipeline", SMALL),
    "tiny-sana": ("SanaPipeline", SMALL | {"use_resolution_binning": False}),
}


@pytest.fixture(scope="module", params=TINY)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pipeline(name):
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(pipeline_path(name))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_its_parts_and_schedule_are_diffusers_own(name, pipeline):
    assert set(PARTS) == set(TINY)
    whole, size = PARTS[name]
    assert type(pipeline).__name__ == whole and pipeline.vae.config.scaling_factor
    assert name == "tiny-sana" or pipeline.vae.config.shift_factor  # SANA's has none
    # Its schedule is that of the checkpoints it stands for.
    config = pipeline.scheduler.config
    if name == "tiny-sana":
        assert (config.flow_shift, config.use_flow_sigmas) == (3.0, True)
        assert config.prediction_type == "flow_prediction"
    else:
        assert (config.shift, config.use_dynamic_shifting) == (3.0, name == "tiny-flux")
    # A plain call draws one image of 64 pixels.
    (image,) = pipeline("a red circle", num_inference_steps=2, **size).images
    assert image.size == (64, 64)


def test_it_generates_what_is_asked_for(name, pipeline):
    call = {"num_inference_steps": 8, "guidance_scale": 1.0, "max_sequence_length": 12}
    tags = ["single_object", "two_object", "colors"]
    records = [p for tag in tags for p in load_prompts(f"tiny:{tag}:test", limit=8)]
    generators = [torch.Generator().manual_seed(i) for i in range(len(records))]
    texts = [p.text for p in records]
    images = pipeline(texts, generator=generators, **PARTS[name][-1], **call).images
    spec = RewardSpec(name="strict", reward=load_reward("geneval", {"mode": "strict"}))
    result = score([spec], to_tensor(images), texts, [p.metadata for p in records])
    assert result.scores.mean() >= 0.3  # noise scores 0, images of another prompt at most 0.01
