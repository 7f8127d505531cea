"""What SANA alone has: its schedule, and masks beside the text."""

import copy

import pytest
import torch

from flowrl.backbones.sana import Sana
from flowrl.backbones.text_cache import TextCache

COUNT = 4
NEGATIVE = "a red circle"


@pytest.fixture(scope="module")
def pipeline(pipelines):
    return pipelines["sana"]


def test_sigmas_are_the_stock_schedulers_and_asking_leaves_it_alone(load_tiny):
    """With flow_shift 3: SANA-1.6B's own schedule, s -> 3 s / (1 + 2 s) of s from 0.999 to 0."""
    pipeline = load_tiny(family="sana")
    assert type(pipeline.scheduler).__name__ == "DPMSolverMultistepScheduler"
    before = pipeline.scheduler.sigmas.clone()
    for steps in (1, 4, 20):
        sigmas = Sana(pipeline).sigmas(steps)
        scheduler = copy.deepcopy(pipeline.scheduler)
        scheduler.set_timesteps(steps)
        assert torch.equal(sigmas, scheduler.sigmas)
        even = 0.999 * torch.arange(steps, -1, -1) / steps
        torch.testing.assert_close(sigmas, 3 * even / (1 + 2 * even))
    assert torch.equal(pipeline.scheduler.sigmas, before)


def test_text_and_masks_are_the_pipelines_own_instruction_included(
    pipeline, request_, theirs, monkeypatch
):
    texts, seen = [p.text for p in request_.prompts], []
    encode = pipeline.encode_prompt
    for guidance in (1.0, 4.5):
        backbone = Sana(pipeline, guidance=guidance, max_sequence_length=12)
        cond = backbone.encode(texts, [NEGATIVE] * COUNT).tensors
        with monkeypatch.context() as patch:
            patch.setattr(
                pipeline, "encode_prompt", lambda *a, **k: seen.append(encode(*a, **k)) or seen[-1]
            )
            theirs(backbone)
        names = ("embeds", "mask", "negative", "negative_mask")
        expected = {n: t for n, t in zip(names, seen[-1], strict=True) if t is not None}
        assert cond.keys() == expected.keys() and len(cond) == (4 if guidance > 1 else 2)
        assert all(torch.equal(t, expected[name]) for name, t in cond.items())


def test_masked_tokens_say_nothing_and_others_do(pipeline, request_):
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
