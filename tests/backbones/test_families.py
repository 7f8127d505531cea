"""Without noise every family's sampler is diffusers' own, bit for bit; so is its decoder."""

import pytest
import torch

from flowrl.backbones.base import guided
from flowrl.backbones.flux import Flux
from flowrl.backbones.sana import Sana
from flowrl.backbones.sd3 import SD3
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.sampling.rollout import decode

COUNT = 4
FAMILIES = {"sd3": SD3, "flux": Flux, "sana": Sana}
each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
def test_latents_and_images_without_noise_are_diffusers_own(pipelines, ours, theirs, family):
    for guidance in (1.0, 3.5):
        backbone, x0 = ours(family, pipelines[family], guidance)
        assert torch.equal(x0, theirs(backbone))
        assert not torch.equal(x0[0], x0[1])
    assert torch.equal(next(decode(backbone, x0, COUNT)), theirs(backbone, "pt"))


@each_family
def test_rows_and_columns_of_oblong_images_are_diffusers_own(pipelines, ours, theirs, family):
    backbone, x0 = ours(family, pipelines[family], 1.0, height=32, width=96)
    shape = {"sd3": (16, 4, 12), "flux": (12, 64), "sana": (16, 2, 6)}[family]
    assert x0.shape == (COUNT, *shape) and backbone.latent_shape() == shape
    assert torch.equal(x0, theirs(backbone))
    assert torch.equal(next(decode(backbone, x0, COUNT)), theirs(backbone, "pt"))


@each_family
def test_in_bf16_latents_agree_to_its_rounding(load_alive, ours, theirs, family):
    """diffusers multiplies dt and velocity in bf16 or, SANA's, in fp32; flowrl in fp32."""
    backbone, x0 = ours(family, load_alive(family, "bf16"), 3.5 if family == "flux" else 1.0)
    assert x0.dtype == torch.bfloat16
    expected = theirs(backbone).float()
    assert (x0.float() - expected).norm() < 2.0 ** -(5 + (family != "sana")) * expected.norm()


@each_family
def test_guidance_is_used_and_up_to_1_there_is_none_where_it_is_not_the_networks_input(
    pipelines, ours, family
):
    none, one, three, whole = (
        ours(family, pipelines[family], guidance)[1] for guidance in (0.0, 1.0, 3.0, 3)
    )
    assert torch.equal(none, one) == (family != "flux")
    assert torch.equal(three, whole) and not torch.allclose(one, three, atol=1e-4)


@each_family
def test_a_sigma_for_each_row_equals_one_for_all(pipelines, request_, family):
    """Training mixes steps in one batch, where the rollout has one."""
    backbone = FAMILIES[family](pipelines[family], max_sequence_length=12)
    cond = TextCache(backbone)(request_.prompts)
    x = request_.noise((), 0, "init", backbone.latent_shape())
    with torch.no_grad():
        one = backbone.velocity(x, torch.tensor(0.6), cond)
        each = backbone.velocity(x, torch.full((COUNT,), 0.6), cond)
    assert torch.equal(one, each) and one.shape == x.shape


@each_family
def test_a_size_that_cannot_be_patched_is_refused_with_the_option(pipelines, family):
    make, pipeline = FAMILIES[family], pipelines[family]
    assert make(pipeline).image_size() == (64, 64)
    for side in ("height", "width"):
        with pytest.raises(UserError, match=f"pipeline.{side} is 72, .* 16"):
            make(pipeline, **{side: 72})


@each_family
def test_encoding_is_the_inverse_of_decoding_as_far_as_the_autoencoder_goes(
    pipelines, tiny_images, family
):
    backbone = FAMILIES[family](pipelines[family])
    x0 = backbone.encode_images(tiny_images)
    assert x0.shape == (COUNT, *backbone.latent_shape()) and x0.dtype == torch.float32
    assert torch.equal(backbone.encode_images(tiny_images), x0)
    error = (backbone.decode(x0) - tiny_images).abs().flatten(1).mean(1)
    other = (tiny_images - tiny_images.roll(1, 0)).abs().flatten(1).mean(1)
    assert error.max() < other.min() / 2, error


@each_family
def test_images_have_gradients_and_the_autoencoder_takes_none(pipelines, family):
    backbone = FAMILIES[family](pipelines[family])
    x0 = torch.zeros(2, *backbone.latent_shape(), requires_grad=True)
    (backbone.decode(x0)[0].sum()).backward()
    assert x0.grad is not None and x0.grad[0].abs().sum() > 0 and not x0.grad[1].any()
    assert all(p.grad is None for p in pipelines[family].vae.parameters())


def test_guidance_moves_away_from_the_unconditional_velocity():
    x, cond = torch.zeros(2, 3), (torch.full((2, 1), 5.0), torch.full((2, 1), 1.0))
    found = guided(lambda x, text: x + text, 3.0, x, cond)
    assert torch.equal(found, torch.full((2, 3), 1 + 3.0 * (5 - 1)))
