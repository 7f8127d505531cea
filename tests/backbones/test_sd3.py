"""Without noise the sampler is diffusers' own, bit for bit; so are schedule and decoder."""

import copy

import pytest
import torch

from flowrl.backbones.sd3 import LORA_TARGETS, SD3
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.prompts.records import load_prompts
from flowrl.sampling.rollout import decode

COUNT, STEPS = 4, 3
NEGATIVE = "a red circle"


@pytest.fixture(scope="module")
def pipeline(load_tiny):
    return load_tiny()


@pytest.fixture(scope="module")
def ours(pipeline, noiseless):
    """Our backbone and its clean latents."""

    def sample(guidance, tokens=12, pipeline=pipeline):
        backbone = SD3(pipeline, guidance=guidance, max_sequence_length=tokens)
        return backbone, noiseless(backbone, STEPS, NEGATIVE)

    return sample


def theirs(pipeline, request_, backbone, guidance, output, tokens=12):
    latents = request_.noise((), 0, "init", backbone.latent_shape())
    return pipeline(
        [p.text for p in request_.prompts],
        negative_prompt=[NEGATIVE] * COUNT,
        guidance_scale=guidance,
        num_inference_steps=STEPS,
        max_sequence_length=tokens,
        latents=latents.to(backbone.dtype),
        output_type=output,
    ).images


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_latents_without_noise_are_diffusers_own(pipeline, request_, ours, guidance):
    backbone, x0 = ours(guidance)
    expected = theirs(pipeline, request_, backbone, guidance, "latent")
    assert torch.equal(x0, expected)
    assert not torch.equal(x0[0], x0[1])


def test_pictures_without_noise_are_diffusers_own(pipeline, request_, ours):
    backbone, x0 = ours(3.5)
    expected = theirs(pipeline, request_, backbone, 3.5, "pt")
    assert torch.equal(next(decode(backbone, x0, COUNT)), expected)


def test_the_default_text_length_agrees_too(pipeline, request_, ours):
    backbone, x0 = ours(1.0, tokens=256)
    assert torch.equal(x0, theirs(pipeline, request_, backbone, 1.0, "latent", tokens=256))


def test_in_bf16_latents_agree_to_its_rounding(load_tiny, request_, ours, relative):
    """diffusers multiplies dt and velocity in bf16, flowrl in fp32."""
    pipeline = load_tiny("bf16")
    backbone, x0 = ours(1.0, pipeline=pipeline)
    expected = theirs(pipeline, request_, backbone, 1.0, "latent")
    assert x0.dtype == torch.bfloat16
    assert relative(x0, expected) < 2**-6


def test_guidance_is_used_and_1_is_none(ours):
    results = [ours(guidance)[1] for guidance in (0.0, 1.0, 3.5)]
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[1], results[2], atol=1e-4)


@pytest.mark.parametrize("steps", [1, 4, 8, 40])
def test_sigmas_are_the_schedulers_and_asking_leaves_it_alone(pipeline, steps):
    before = pipeline.scheduler.sigmas.clone()
    sigmas = SD3(pipeline).sigmas(steps)
    scheduler = copy.deepcopy(pipeline.scheduler)
    scheduler.set_timesteps(steps)
    assert torch.equal(sigmas, scheduler.sigmas)
    assert torch.equal(sigmas[:-1] * 1000, scheduler.timesteps)
    assert torch.equal(pipeline.scheduler.sigmas, before)
    assert sigmas[0] == 1 and sigmas[-1] == 0


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


def test_a_sigma_for_each_row_equals_one_for_all(pipeline, request_):
    """Training mixes steps in one batch, where the rollout has one: the velocities are the same."""
    backbone = SD3(pipeline, max_sequence_length=12)
    cond = TextCache(backbone)(request_.prompts)
    x = request_.noise((), 0, "init", backbone.latent_shape())
    with torch.no_grad():
        one = backbone.velocity(x, torch.tensor(0.6), cond)
        each = backbone.velocity(x, torch.full((COUNT,), 0.6), cond)
    assert torch.equal(one, each)


def test_the_size_of_pictures_can_be_chosen(pipeline):
    backbone = SD3(pipeline, height=32, width=48)
    assert backbone.latent_shape() == (16, 4, 6)
    assert backbone.decode(torch.zeros(1, 16, 4, 6)).shape == (1, 3, 32, 48)


def test_every_default_target_names_layers_of_the_transformer(pipeline):
    names = [name for name, _ in pipeline.transformer.named_modules()]
    assert [t for t in LORA_TARGETS if not any(n.endswith(t) for n in names)] == []


def test_a_size_that_the_patches_do_not_divide_is_refused(pipeline):
    assert SD3(pipeline, width=96).latent_shape()[1:] == (8, 12)
    with pytest.raises(UserError, match="pipeline.height is 72, expected a multiple of 16"):
        SD3(pipeline, height=72)


def test_text_asked_for_long_ago_is_forgotten(pipeline):
    cache = TextCache(SD3(pipeline, max_sequence_length=12), capacity=2)
    records = load_prompts("tiny:colors:train", limit=3)
    first = cache(records)  # more at once than are kept
    assert len(first) == 3
    assert [text for text, _ in cache.known] == [r.text for r in records[1:]]
    cache([records[1], records[0]])
    assert [text for text, _ in cache.known] == [r.text for r in (records[1], records[0])]


def test_text_is_encoded_once_for_each_text_and_negative(pipeline, monkeypatch):
    backbone = SD3(pipeline, guidance=2.0, max_sequence_length=12)
    seen, encode = [], backbone.encode

    def count(prompts, negatives):
        seen.extend(zip(prompts, negatives, strict=True))
        return encode(prompts, negatives)

    monkeypatch.setattr(backbone, "encode", count)
    cache = TextCache(backbone, "dull", batch_size=2)
    records = load_prompts("tiny:colors:train", limit=3)
    first = cache([*records, records[0]])
    second = cache(records[::-1])
    assert seen == [(r.text, "dull") for r in records]
    assert len(first) == 4
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor[0], tensor[3])
        assert torch.equal(second.tensors[name], tensor[[2, 1, 0]])


def test_encoding_is_the_inverse_of_decoding_as_far_as_the_autoencoder_goes(pipeline, drawn):
    backbone, images = SD3(pipeline), drawn(COUNT)
    x0 = backbone.encode_images(images)
    assert x0.shape == (COUNT, *backbone.latent_shape()) and x0.dtype == torch.float32
    # Shift and scale make the latents those that the sampler draws: about standard normal.
    assert x0.mean().abs() < 0.5 and 0.5 < x0.std() < 2
    error = (backbone.decode(x0) - images).abs().flatten(1).mean(1)
    assert error.max() < 0.02, error
    other = (images - images.roll(1, 0)).abs().flatten(1).mean(1)
    assert error.max() < other.min() / 2
    torch.testing.assert_close(backbone.encode_images(backbone.decode(x0)), x0, rtol=0, atol=0.5)


def test_encoding_draws_nothing_and_rows_stand_alone(pipeline, drawn):
    backbone, images = SD3(pipeline), drawn(3)
    x0 = backbone.encode_images(images)
    assert torch.equal(backbone.encode_images(images), x0)
    torch.testing.assert_close(backbone.encode_images(images[1:2]), x0[1:2], rtol=0, atol=1e-4)
    assert backbone.picture_size() == images.shape[2:]


def test_encoding_is_fp32_whatever_the_pipeline_is_and_leaves_it_so(load_tiny, pipeline, drawn):
    half, images = load_tiny("bf16"), drawn(2)
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
