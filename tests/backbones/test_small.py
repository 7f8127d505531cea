"""Small random pipelines of diffusers' classes: built offline, saved, loaded, and run."""

import inspect

import diffusers
import pytest
import torch

from flowrl.backbones.small import small_folder, small_pipeline
from flowrl.errors import UserError

QUICK = "StableDiffusion3Pipeline FluxPipeline QwenImagePipeline ZImagePipeline".split()
CLASSES = """
Flux2Pipeline Flux2KleinPipeline SanaPipeline QwenImage21Pipeline Krea2Pipeline ChromaPipeline
AuraFlowPipeline Lumina2Pipeline CogView4Pipeline LongCatImagePipeline OvisImagePipeline
BriaPipeline BriaFiboPipeline NucleusMoEImagePipeline OmniGenPipeline PRXPipeline
HunyuanImagePipeline ErnieImagePipeline LuminaPipeline
""".split()


def draw(pipeline) -> torch.Tensor:
    parameters = inspect.signature(type(pipeline).__call__).parameters
    wanted = {"guidance_scale": 1.0, "max_sequence_length": 64, "height": 64, "width": 64}
    call = {name: value for name, value in wanted.items() if name in parameters}
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=["a red circle"], num_inference_steps=2, output_type="pt",
        generator=torch.Generator().manual_seed(0), **call,
    ).images  # fmt: skip


@pytest.mark.parametrize(
    "name", QUICK + [pytest.param(name, marks=pytest.mark.slow) for name in CLASSES]
)
def test_a_class_is_built_small_and_draws_the_same_after_loading(name, tmp_path):
    kind = getattr(diffusers, name)
    pipeline = small_pipeline(kind)
    assert sum(p.numel() for p in pipeline.transformer.parameters()) < 5e6
    image = draw(pipeline)
    assert image.isfinite().all() and image.std() > 0
    loaded = diffusers.DiffusionPipeline.from_pretrained(small_folder(kind, tmp_path / "model"))
    assert type(loaded) is kind
    # Where mapped weights lie in memory decides the order of sums.
    torch.testing.assert_close(draw(loaded), image, rtol=0, atol=1e-5)


def test_the_seed_decides_the_weights_and_the_generator_of_the_process_is_left_alone():
    kind, before = diffusers.ZImagePipeline, torch.random.get_rng_state()
    weights = [
        torch.cat([p.flatten() for p in small_pipeline(kind, seed).transformer.parameters()])
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_what_is_no_pipeline_is_refused_by_name():
    with pytest.raises(UserError, match="Linear"):
        small_pipeline(torch.nn.Linear)
