"""Without noise the sampler is diffusers' own, bit for bit; so are packing, schedule, decoder."""

import copy
from typing import Any

import pytest
import torch

from flowrl.backbones.base import shift_for
from flowrl.backbones.flux import LORA_TARGETS, Flux, pack, unpack
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.sampling.rollout import decode

COUNT, STEPS = 4, 3


@pytest.fixture(scope="module")
def alive(load_tiny):
    """A pipeline without layers of zeros, which would hide what they are given."""

    def load(dtype="fp32"):
        pipeline = load_tiny(dtype, "flux")
        generator = torch.Generator().manual_seed(0)
        for parameter in pipeline.transformer.parameters():
            if not parameter.any():
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return pipeline

    return load


@pytest.fixture(scope="module")
def pipeline(alive):
    return alive()


@pytest.fixture(scope="module")
def ours(pipeline, noiseless):
    """Our backbone and its clean latents."""

    def sample(guidance=3.5, tokens=12, pipeline=pipeline, **size):
        backbone = Flux(pipeline, guidance=guidance, max_sequence_length=tokens, **size)
        return backbone, noiseless(backbone, STEPS)

    return sample


def theirs(request_, backbone, output="latent"):
    latents = request_.noise((), 0, "init", backbone.latent_shape())
    return backbone.pipeline(
        [p.text for p in request_.prompts],
        guidance_scale=backbone.guidance,
        num_inference_steps=STEPS,
        max_sequence_length=backbone.max_sequence_length,
        height=backbone.height,
        width=backbone.width,
        latents=latents.to(backbone.dtype),
        output_type=output,
    ).images


@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.5])
def test_latents_without_noise_are_diffusers_own(request_, ours, guidance):
    backbone, x0 = ours(guidance)
    assert torch.equal(x0, theirs(request_, backbone))
    assert not torch.equal(x0[0], x0[1])


def test_pictures_without_noise_are_diffusers_own(request_, ours):
    backbone, x0 = ours()
    assert torch.equal(next(decode(backbone, x0, COUNT)), theirs(request_, backbone, "pt"))


def test_the_default_text_length_agrees_too(request_, ours):
    backbone, x0 = ours(tokens=512)
    assert torch.equal(x0, theirs(request_, backbone))


def test_rows_and_columns_of_oblong_pictures_are_diffusers_own(request_, ours):
    backbone, x0 = ours(height=32, width=80)
    assert x0.shape == (COUNT, 10, 64)
    assert torch.equal(x0, theirs(request_, backbone))
    assert torch.equal(next(decode(backbone, x0, COUNT)), theirs(request_, backbone, "pt"))


def test_in_bf16_latents_agree_to_its_rounding(alive, request_, ours, relative):
    """diffusers multiplies dt and velocity in bf16, flowrl in fp32."""
    backbone, x0 = ours(pipeline=alive("bf16"))
    assert x0.dtype == torch.bfloat16
    assert relative(x0, theirs(request_, backbone)) < 2**-6


def test_guidance_is_an_input_of_the_network(ours):
    low, high = ours(1.0)[1], ours(3.5)[1]
    assert not torch.allclose(low, high, atol=1e-4)


def test_guidance_may_be_an_integer(ours):
    assert torch.equal(ours(3)[1], ours(3.0)[1])


@pytest.fixture(scope="module")
def schnell(pipeline):
    """As FLUX.1-schnell is made: no guidance, no shift by the number of tokens."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    config = dict(pipeline.transformer.config) | {"guidance_embeds": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network: Any = FluxTransformer2DModel.from_config(config)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
    parts = pipeline.components | {"transformer": network.eval(), "scheduler": scheduler}
    other = type(pipeline)(**parts)
    other.set_progress_bar_config(disable=True)
    return other


def test_a_network_without_guidance_is_diffusers_own_too(request_, schnell, ours):
    backbone, x0 = ours(3.5, pipeline=schnell)
    assert torch.equal(x0, theirs(request_, backbone))
    assert torch.equal(x0, ours(1.0, pipeline=schnell)[1])
    torch.testing.assert_close(backbone.sigmas(4), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))


@pytest.mark.parametrize("steps", [1, 4, 28])
@pytest.mark.parametrize("side", [64, 512, 1024])
def test_sigmas_are_shifted_by_the_number_of_tokens(pipeline, side, steps):
    """s -> e^mu s / (1 + (e^mu - 1) s), mu on a line through (256, 0.5) and (4096, 1.15)."""
    before = copy.deepcopy(pipeline.scheduler.__dict__)
    sigmas = Flux(pipeline, height=side, width=side).sigmas(steps)
    shift = torch.tensor(0.5 + ((side / 16) ** 2 - 256) * 0.65 / 3840).exp()
    even = torch.arange(steps, -1, -1) / steps
    torch.testing.assert_close(sigmas, shift * even / (1 + (shift - 1) * even))
    assert torch.equal(pipeline.scheduler.sigmas, before["sigmas"])


def test_more_tokens_than_the_pipeline_takes_are_refused(pipeline):
    assert Flux(pipeline, max_sequence_length=512).max_sequence_length == 512
    with pytest.raises(UserError, match="max_sequence_length is 513, .* set it to 512 or less"):
        Flux(pipeline, max_sequence_length=513)


def test_keys_that_a_scheduler_lacks_are_as_in_the_pipeline_and_its_own_sigmas_are_kept(pipeline):
    backbone = Flux(copy.copy(pipeline))
    before = backbone.sigmas(4)
    scheduler = copy.deepcopy(pipeline.scheduler)
    backbone.pipeline.scheduler = scheduler
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    kept = {k: v for k, v in scheduler.config.items() if k not in keys}
    scheduler._internal_dict = type(scheduler.config)(kept)
    assert torch.equal(backbone.sigmas(4), before)
    scheduler._internal_dict = type(scheduler.config)(kept | {"use_flow_sigmas": True})
    own = copy.deepcopy(scheduler)
    own.set_timesteps(4, mu=shift_for(backbone.latent_shape()[0], kept, max_shift=1.15))
    assert torch.equal(backbone.sigmas(4), own.sigmas)
    assert not torch.equal(own.sigmas, before)


def test_a_sigma_for_each_row_equals_one_for_all(pipeline, request_):
    backbone = Flux(pipeline, max_sequence_length=12)
    cond = TextCache(backbone)(request_.prompts)
    x = request_.noise((), 0, "init", backbone.latent_shape())
    with torch.no_grad():
        one = backbone.velocity(x, torch.tensor(0.6), cond)
        each = backbone.velocity(x, torch.full((COUNT,), 0.6), cond)
    assert torch.equal(one, each) and one.shape == x.shape


def test_text_is_encoded_as_the_pipeline_does_and_negatives_are_refused(pipeline, request_):
    texts = [p.text for p in request_.prompts]
    backbone = Flux(pipeline, max_sequence_length=12)
    cond = backbone.encode(texts, [""] * COUNT).tensors
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(texts, max_sequence_length=12)
    assert torch.equal(cond["embeds"], embeds) and torch.equal(cond["pooled"], pooled)
    assert embeds.shape[:2] == (COUNT, 12)
    with pytest.raises(UserError, match="negative prompt is 'dull', but FLUX.1 takes none"):
        backbone.encode(texts, ["", "dull", "", ""])


def test_packing_is_diffusers_own_and_unpacking_undoes_it(pipeline):
    z = torch.randn(2, 16, 4, 10, generator=torch.Generator().manual_seed(0))
    packed = pack(z)
    assert torch.equal(packed, pipeline._pack_latents(z, 2, 16, 4, 10))
    assert torch.equal(pipeline._unpack_latents(packed, 32, 80, 8), z)
    assert torch.equal(unpack(packed, 2, 5), z)


def test_every_default_target_names_layers_of_both_kinds_of_blocks(pipeline):
    names = [name for name, _ in pipeline.transformer.named_modules()]
    assert [t for t in LORA_TARGETS if not any(n.endswith(f".{t}") for n in names)] == []
    single = [n for n in names if n.startswith("single") and n.endswith(LORA_TARGETS)]
    assert {n.split(".", 2)[2] for n in single} == {"attn.to_q", "attn.to_k", "attn.to_v"}


def test_a_size_that_cannot_be_packed_is_refused(pipeline):
    assert Flux(pipeline).picture_size() == (64, 64)
    assert Flux(pipeline).latent_shape() == (16, 64)
    assert Flux(pipeline, width=96).latent_shape() == (24, 64)
    with pytest.raises(UserError, match="pipeline.width is 72, expected a multiple of 16"):
        Flux(pipeline, width=72)


def test_encoding_is_the_inverse_of_decoding_as_far_as_the_autoencoder_goes(pipeline, drawn):
    backbone, images = Flux(pipeline), drawn(COUNT)
    x0 = backbone.encode_images(images)
    assert x0.shape == (COUNT, *backbone.latent_shape()) and x0.dtype == torch.float32
    assert torch.equal(backbone.encode_images(images), x0)
    error = (backbone.decode(x0) - images).abs().flatten(1).mean(1)
    other = (images - images.roll(1, 0)).abs().flatten(1).mean(1)
    assert error.max() < other.min() / 2, error


def test_pictures_have_gradients_and_the_autoencoder_takes_none(pipeline):
    backbone = Flux(pipeline)
    x0 = torch.zeros(2, *backbone.latent_shape(), requires_grad=True)
    (backbone.decode(x0)[0].sum()).backward()
    assert x0.grad is not None and x0.grad[0].abs().sum() > 0 and not x0.grad[1].any()
    assert all(p.grad is None for p in pipeline.vae.parameters())
