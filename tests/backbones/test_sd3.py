"""The schedule and latents of SD3, and the cache of texts."""

import copy

import pytest
import torch

from flowrl.backbones.sd3 import SD3


@pytest.fixture(scope="module")
def pipeline(load_tiny):
    return load_tiny()


def test_sigmas_are_the_schedulers_and_asking_leaves_it_alone(pipeline):
    before = pipeline.scheduler.sigmas.clone()
    for steps in (1, 4, 40):
        sigmas = SD3(pipeline).sigmas(steps)
        scheduler = copy.deepcopy(pipeline.scheduler)
        scheduler.set_timesteps(steps)
        assert torch.equal(sigmas, scheduler.sigmas)
        assert torch.equal(sigmas[:-1] * 1000, scheduler.timesteps)
        assert sigmas[0] == 1 and sigmas[-1] == 0
    assert torch.equal(pipeline.scheduler.sigmas, before)


def test_a_scheduler_that_shifts_by_the_number_of_tokens_is_told_it(pipeline):
    """s -> e^mu s / (1 + (e^mu - 1) s), mu on a line through (256, 0.5) and (4096, 1.16)."""
    given = {"use_dynamic_shifting": True, "shift": 1.0}
    made = type(pipeline.scheduler).from_config(pipeline.scheduler.config | given)
    backbone = SD3(copy.copy(pipeline))
    backbone.pipeline.scheduler = made
    made.register_to_config(max_shift=1.16)
    tokens = (64 // pipeline.vae_scale_factor // pipeline.transformer.config.patch_size) ** 2
    shift = torch.tensor(0.5 + (tokens - 256) * 0.66 / 3840).exp()
    even = made.__class__.from_config(made.config | {"use_dynamic_shifting": False})
    even.set_timesteps(6)
    sigmas = backbone.sigmas(6)
    torch.testing.assert_close(sigmas, shift * even.sigmas / (1 + (shift - 1) * even.sigmas))


def test_encoded_images_have_the_distribution_of_the_samplers_latents(pipeline, tiny_images):
    backbone = SD3(pipeline)
    x0 = backbone.encode_images(tiny_images)
    # Shift and scale make the latents those that the sampler generates: about standard normal.
    assert x0.mean().abs() < 0.5 and 0.5 < x0.std() < 2
    assert (backbone.decode(x0) - tiny_images).abs().flatten(1).mean(1).max() < 0.02
    torch.testing.assert_close(backbone.encode_images(backbone.decode(x0)), x0, rtol=0, atol=0.5)
    torch.testing.assert_close(backbone.encode_images(tiny_images[1:2]), x0[1:2], rtol=0, atol=1e-4)


def test_encoding_is_fp32_whatever_the_pipeline_is_and_leaves_it_so(
    load_tiny, pipeline, tiny_images
):
    half, images = load_tiny("bf16"), tiny_images[:2]
    before = {name: p.clone() for name, p in half.vae.named_parameters()}
    x0 = SD3(half).encode_images(images)
    assert x0.dtype == torch.float32
    assert all(torch.equal(p, before[name]) for name, p in half.vae.named_parameters())
    assert half.vae.dtype == torch.bfloat16
    exact = SD3(pipeline).encode_images(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(SD3(pipeline).encode_images(images), exact)
    # What is left is the rounding of the stored weights.
    assert (x0 - exact).norm() < 0.02 * exact.norm()


def test_encoding_shifts_and_scales_latents_and_decoding_undoes_it(pipeline, tiny_images):
    vae, backbone = pipeline.vae, SD3(pipeline)
    before = {name: vae.config[name] for name in ("scaling_factor", "shift_factor")}
    try:
        vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
        z = backbone.encode_images(tiny_images)
        images = backbone.decode(z)
        vae.register_to_config(scaling_factor=2.0, shift_factor=0.3)
        torch.testing.assert_close(backbone.encode_images(tiny_images), (z - 0.3) * 2)
        torch.testing.assert_close(backbone.decode((z - 0.3) * 2), images, rtol=0, atol=1e-4)
    finally:
        vae.register_to_config(**before)
