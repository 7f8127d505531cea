"""What FLUX alone has: packed latents, a schedule by the number of tokens, no negatives."""

import copy
from typing import Any

import pytest
import torch

from flowrl.backbones.base import shift_for
from flowrl.backbones.flux import Flux, pack_latents, unpack_latents
from flowrl.errors import UserError

COUNT = 4


@pytest.fixture(scope="module")
def pipeline(pipelines):
    return pipelines["flux"]


def test_a_network_without_guidance_is_diffusers_own_too(pipeline, ours, theirs):
    """As FLUX.1-schnell is made: no guidance, no shift by the number of tokens."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    config = dict(pipeline.transformer.config) | {"guidance_embeds": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network: Any = FluxTransformer2DModel.from_config(config)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
    parts = pipeline.components | {"transformer": network.eval(), "scheduler": scheduler}
    schnell = type(pipeline)(**parts)
    schnell.set_progress_bar_config(disable=True)
    backbone, x0 = ours("flux", schnell, 3.5)
    assert torch.equal(x0, theirs(backbone))
    assert torch.equal(x0, ours("flux", schnell, 1.0)[1])
    torch.testing.assert_close(backbone.sigmas(4), torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]))


def test_sigmas_are_shifted_by_the_number_of_tokens(pipeline):
    """s -> e^mu s / (1 + (e^mu - 1) s), mu on a line through (256, 0.5) and (4096, 1.15)."""
    before = copy.deepcopy(pipeline.scheduler.__dict__)
    for side, steps in ((64, 1), (512, 4), (1024, 28)):
        sigmas = Flux(pipeline, height=side, width=side).sigmas(steps)
        shift = torch.tensor(0.5 + ((side / 16) ** 2 - 256) * 0.65 / 3840).exp()
        even = torch.arange(steps, -1, -1) / steps
        torch.testing.assert_close(sigmas, shift * even / (1 + (shift - 1) * even))
    assert torch.equal(pipeline.scheduler.sigmas, before["sigmas"])


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
    packed = pack_latents(z)
    assert torch.equal(packed, pipeline._pack_latents(z, 2, 16, 4, 10))
    assert torch.equal(pipeline._unpack_latents(packed, 32, 80, 8), z)
    assert torch.equal(unpack_latents(packed, 2, 5), z)
