"""The contract of `scripts/pipelines.py`: every class of diffusers behind the one backbone."""

from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image

from flowrl.backbones.call import call_arguments
from flowrl.backbones.pipeline import PipelineBackbone, check_scheduler, check_sigmas, images_of
from flowrl.backbones.small import small_pipeline
from flowrl.errors import UserError
from flowrl.utils.images import to_tensor
from scripts.pipelines import CHECKS, Case, pipeline_classes, read_table

PAGE = read_table((Path(__file__).parents[2] / "docs/pipelines.md").read_text())
# Without --slow: packed latents with batch norm; and texts of several lengths.
QUICK = {
    "Flux2KleinPipeline": ("gradients", "image latents", "first ratio", "trained pixels"),
    "ZImagePipeline": ("images", "rows"),
}


def cases():
    """Each check of each class that holds the whole contract by the page."""
    return [
        pytest.param(
            getattr(diffusers, name),
            check,
            id=f"{name}-{check}",
            marks=() if check in QUICK.get(name, ()) else pytest.mark.slow,
        )
        for name, result in PAGE.items()
        if result == "all"
        for check in CHECKS
    ]


def test_the_page_lists_every_class():
    assert PAGE.keys() == {kind.__name__ for kind in pipeline_classes()}


@pytest.mark.parametrize(("kind", "check"), cases())
def test_a_pipeline_class_holds_the_contract(kind, check):
    CHECKS[check](kind)


def test_schedulers_that_draw_noise_and_schedules_of_no_flow_are_refused():
    noisy = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with pytest.raises(UserError, match="stochastic_sampling"):
        check_scheduler(noisy)
    solver = diffusers.DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", algorithm_type="sde-dpmsolver++"
    )
    for other in (solver, diffusers.DDIMScheduler()):
        with pytest.raises(UserError, match="scheduler"):
            check_scheduler(other)
    for sigmas in (None, torch.tensor([80.0, 1.0, 0.0]), torch.tensor([1.0, 0.5, 0.1])):
        with pytest.raises(UserError, match="Mine"):
            check_sigmas(sigmas, False, "Mine")


def test_guidance_that_a_pipeline_ignores_is_refused_and_none_is_its_own_number():
    krea = small_pipeline(diffusers.Krea2Pipeline)
    assert call_arguments(krea, guidance=1.0)["guidance_scale"] == 0.0
    with pytest.raises(UserError, match=r"0\.5"):
        call_arguments(krea, guidance=0.5)
    with pytest.raises(UserError, match="guidance is 4"):
        call_arguments(small_pipeline(diffusers.Flux2KleinKVPipeline), guidance=4.0)
    distilled = small_pipeline(diffusers.Flux2KleinPipeline)
    distilled.register_to_config(is_distilled=True)
    assert not PipelineBackbone(distilled, guidance=4.0, height=64, width=64).guided


def test_another_number_of_steps_than_the_pipelines_own_is_refused():
    pipeline = small_pipeline(diffusers.QwenImage21Pipeline)
    pipeline.register_to_config(sample_sigmas=[1.0, 0.75, 0.5, 0.25])
    backbone = PipelineBackbone(pipeline, height=64, width=64)
    assert len(backbone.sigmas(4)) == 5
    with pytest.raises(UserError, match="num_inference_steps"):
        backbone.sigmas(10)


def test_transparent_images_are_seen_over_white():
    pixels = torch.rand(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    levels = (pixels[0].permute(1, 2, 0) * 255).round().byte().numpy()
    white = Image.new("RGBA", (8, 8), "white")
    white.alpha_composite(Image.fromarray(levels, "RGBA"))
    seen = images_of((pixels,))
    torch.testing.assert_close(seen, to_tensor([white]), rtol=0, atol=1.5 / 255)


def test_a_velocity_that_depends_on_earlier_steps_is_refused(load_tiny):
    backbone = PipelineBackbone(load_tiny(), max_sequence_length=12)
    assert "all 3 steps" in backbone.check(3)
    calls = []

    def drifting(module, args, output):
        calls.append(None)
        return (output[0] * (1 + 0.1 * len(calls)),)

    backbone.transformer.register_forward_hook(drifting)
    with pytest.raises(UserError, match="depends on the step"):
        backbone.check(3)


def test_noise_levels_are_read_without_a_forward():
    backbone = Case(diffusers.ErnieImagePipeline, torch.float32, 1.0).backbone
    forwards = []
    backbone.transformer.register_forward_hook(lambda *_: forwards.append(None))
    times = backbone.times(torch.tensor([0.25, 0.75]))
    assert (times.diff() > 0).all() and not forwards


def test_the_pipelines_own_call_is_as_before(load_tiny):
    pipeline = load_tiny()

    def latents():
        generator = torch.Generator().manual_seed(0)
        return pipeline(
            "a red circle", num_inference_steps=2, generator=generator, output_type="latent",
            max_sequence_length=12,
        ).images  # fmt: skip

    before, sigmas = latents(), pipeline.scheduler.sigmas.clone()
    backbone = PipelineBackbone(pipeline, max_sequence_length=12)
    cond = backbone.encode(["a red circle"], [""])
    with torch.no_grad():
        x = torch.zeros(1, *backbone.latent_shape())
        backbone.decode(backbone.velocity(x, torch.tensor(0.5), cond))
    assert torch.equal(pipeline.scheduler.sigmas, sigmas)
    assert torch.equal(latents(), before)


def test_the_seed_decides_the_weights_and_the_generator_of_the_process_is_left_alone():
    kind, before = diffusers.ZImagePipeline, torch.random.get_rng_state()
    weights = [
        torch.cat([p.flatten() for p in small_pipeline(kind, seed).transformer.parameters()])
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
