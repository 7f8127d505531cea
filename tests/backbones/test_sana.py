"""Without noise the sampler is diffusers' own, bit for bit, with a flow-match Euler scheduler."""

import copy

import pytest
import torch

from flowrl.backbones.sana import LORA_TARGETS, Sana
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.sampling.rollout import decode

COUNT, STEPS = 4, 3
NEGATIVE = "a red circle"


@pytest.fixture(scope="module")
def euler(load_tiny):
    """The pipeline with the scheduler whose steps are flowrl's without noise."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    def load(dtype="fp32"):
        pipeline = load_tiny(dtype, "sana")
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        return pipeline

    return load


@pytest.fixture(scope="module")
def pipeline(euler):
    return euler()


@pytest.fixture(scope="module")
def ours(pipeline, noiseless):
    """Our backbone and its clean latents."""

    def sample(guidance=4.5, tokens=12, pipeline=pipeline, **size):
        backbone = Sana(pipeline, guidance=guidance, max_sequence_length=tokens, **size)
        return backbone, noiseless(backbone, STEPS, NEGATIVE)

    return sample


def theirs(request_, backbone, output="latent"):
    return backbone.pipeline(
        [p.text for p in request_.prompts],
        negative_prompt=[NEGATIVE] * COUNT,
        guidance_scale=backbone.guidance,
        num_inference_steps=STEPS,
        max_sequence_length=backbone.max_sequence_length,
        height=backbone.height,
        width=backbone.width,
        use_resolution_binning=False,
        latents=request_.noise((), 0, "init", backbone.latent_shape()),
        output_type=output,
    ).images


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_latents_without_noise_are_diffusers_own(request_, ours, guidance):
    backbone, x0 = ours(guidance)
    assert torch.equal(x0, theirs(request_, backbone))
    assert not torch.equal(x0[0], x0[1])


def test_pictures_without_noise_are_diffusers_own(request_, ours):
    backbone, x0 = ours()
    assert torch.equal(next(decode(backbone, x0, COUNT)), theirs(request_, backbone, "pt"))


def test_the_default_text_length_agrees_too(request_, ours):
    backbone, x0 = ours(tokens=300)
    assert torch.equal(x0, theirs(request_, backbone))


def test_oblong_pictures_are_diffusers_own_without_binning(request_, ours):
    backbone, x0 = ours(height=32, width=96)
    assert x0.shape == (COUNT, 32, 2, 6)
    assert torch.equal(x0, theirs(request_, backbone))


def test_in_bf16_latents_agree_to_its_rounding(euler, request_, ours, relative):
    """diffusers keeps SANA's latents in fp32 between steps, flowrl in the network's format."""
    backbone, x0 = ours(pipeline=euler("bf16"))
    assert x0.dtype == torch.bfloat16
    assert relative(x0, theirs(request_, backbone)) < 2**-5


def test_guidance_is_used_and_1_is_none(ours):
    results = [ours(guidance)[1] for guidance in (0.0, 1.0, 4.5)]
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[1], results[2], atol=1e-4)


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_sigmas_are_the_stock_schedulers_and_asking_leaves_it_alone(load_tiny, steps):
    """With flow_shift 3: SANA-1.6B's own schedule, s -> 3 s / (1 + 2 s) of s from 0.999 to 0."""
    pipeline = load_tiny(family="sana")
    assert type(pipeline.scheduler).__name__ == "DPMSolverMultistepScheduler"
    before = pipeline.scheduler.sigmas.clone()
    sigmas = Sana(pipeline).sigmas(steps)
    scheduler = copy.deepcopy(pipeline.scheduler)
    scheduler.set_timesteps(steps)
    assert torch.equal(sigmas, scheduler.sigmas)
    even = 0.999 * torch.arange(steps, -1, -1) / steps
    torch.testing.assert_close(sigmas, 3 * even / (1 + 2 * even))
    assert torch.equal(pipeline.scheduler.sigmas, before)


def test_a_sigma_for_each_row_equals_one_for_all(pipeline, request_):
    backbone = Sana(pipeline, max_sequence_length=12)
    cond = TextCache(backbone, NEGATIVE)(request_.prompts)
    x = request_.noise((), 0, "init", backbone.latent_shape())
    with torch.no_grad():
        one = backbone.velocity(x, torch.tensor(0.6), cond)
        each = backbone.velocity(x, torch.full((COUNT,), 0.6), cond)
    assert torch.equal(one, each) and one.shape == x.shape


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_text_and_masks_are_the_pipelines_own_instruction_included(pipeline, request_, guidance):
    texts = [p.text for p in request_.prompts]
    backbone = Sana(pipeline, guidance=guidance, max_sequence_length=12)
    cond = backbone.encode(texts, [NEGATIVE] * COUNT).tensors
    seen = []
    encode = pipeline.encode_prompt
    pipeline.encode_prompt = lambda *args, **kwargs: seen.append(encode(*args, **kwargs)) or seen[0]
    try:
        backbone_with = Sana(pipeline, guidance=guidance, max_sequence_length=12)
        theirs(request_, backbone_with)
    finally:
        del pipeline.encode_prompt
    names = ("embeds", "mask", "negative", "negative_mask")
    expected = {n: t for n, t in zip(names, seen[0], strict=True) if t is not None}
    assert cond.keys() == expected.keys() and len(cond) == (4 if guidance > 1 else 2)
    assert all(torch.equal(t, expected[name]) for name, t in cond.items())


def test_masked_tokens_say_nothing_and_others_do(pipeline, request_):
    """Prompts are padded to one length; what stands there must not matter."""
    backbone = Sana(pipeline, guidance=1.0, max_sequence_length=24)
    cond = TextCache(backbone)(request_.prompts)
    mask = cond.tensors["mask"].bool()
    assert mask.any() and not mask.all()
    x = request_.noise((), 0, "init", backbone.latent_shape())

    def velocity(changed):
        embeds = cond.tensors["embeds"].masked_fill(changed[..., None], 1.0)
        with torch.no_grad():
            other = type(cond)(tensors=dict(cond.tensors) | {"embeds": embeds})
            return backbone.velocity(x, torch.tensor(0.6), other)

    plain = velocity(torch.zeros_like(mask))
    torch.testing.assert_close(velocity(~mask), plain, rtol=0, atol=1e-5)
    assert not torch.allclose(velocity(mask), plain, atol=1e-4)


def test_the_cache_gathers_masks_with_the_text(pipeline, request_):
    backbone = Sana(pipeline, max_sequence_length=12)
    cache = TextCache(backbone, NEGATIVE)
    whole, turned = cache(request_.prompts), cache(request_.prompts[::-1])
    for name, tensor in whole.tensors.items():
        assert torch.equal(turned.tensors[name], tensor.flip(0)), name


def test_every_default_target_names_layers_of_the_transformer(pipeline):
    names = [name for name, _ in pipeline.transformer.named_modules()]
    assert [t for t in LORA_TARGETS if not any(n.endswith(f".{t}") for n in names)] == []


def test_a_size_that_the_autoencoder_does_not_divide_is_refused(pipeline):
    assert Sana(pipeline).picture_size() == (64, 64)
    assert Sana(pipeline).latent_shape() == (32, 4, 4)
    with pytest.raises(UserError, match="pipeline.height is 72, expected a multiple of 16"):
        Sana(pipeline, height=72)


def test_encoding_is_the_inverse_of_decoding_as_far_as_the_autoencoder_goes(pipeline, drawn):
    backbone, images = Sana(pipeline), drawn(COUNT)
    x0 = backbone.encode_images(images)
    assert x0.shape == (COUNT, *backbone.latent_shape()) and x0.dtype == torch.float32
    assert torch.equal(backbone.encode_images(images), x0)
    error = (backbone.decode(x0) - images).abs().flatten(1).mean(1)
    other = (images - images.roll(1, 0)).abs().flatten(1).mean(1)
    assert error.max() < other.min() / 2, error


def test_pictures_have_gradients_and_the_autoencoder_takes_none(pipeline):
    backbone = Sana(pipeline)
    x0 = torch.zeros(2, *backbone.latent_shape(), requires_grad=True)
    (backbone.decode(x0)[0].sum()).backward()
    assert x0.grad is not None and x0.grad[0].abs().sum() > 0 and not x0.grad[1].any()
    assert all(p.grad is None for p in pipeline.vae.parameters())
