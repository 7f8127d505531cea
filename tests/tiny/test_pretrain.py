"""Pretraining can be stopped anywhere, and trains exactly what diffusers will run."""

import pytest
import torch

from flowrl.backbones.pipeline import PipelineBackbone
from scripts.pretrain_tiny import flux, sana, sd3

FAMILIES = {  # model, autoencoder, shape of a latent
    "sd3": (sd3.TinySD3, sd3.autoencoder, (16, 8, 8)),
    "flux": (flux.TinyFlux, sd3.autoencoder, (16, 8, 8)),
    "sana": (sana.TinySana, sana.autoencoder, (16, 4, 4)),
}


def pack_latents(z):
    """Pack latents (B, C, h, w) -> (B, h / 2 * w / 2, 4 C): a token holds 2 x 2 latents."""
    return torch.nn.functional.pixel_unshuffle(z, 2).flatten(2).transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_pretraining_sees_the_velocity_that_the_pipeline_computes(name, tmp_path):
    """The same text conditioning, time and network as diffusers' own pipeline."""
    torch.manual_seed(0)
    kind, autoencoder, shape = FAMILIES[name]
    model, packs = kind(tmp_path), name == "flux"
    for parameter in model.transformer.parameters():
        if not parameter.any():  # or nothing that a prompt changes would reach the velocity
            torch.nn.init.normal_(parameter, std=0.05)
    model.transformer.eval()
    model.encoders.eval()
    texts = ['the word "BIRD"', "a red circle left of a blue square"]
    pipeline = model.pipeline(model.transformer, autoencoder())
    z = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    given, sigma = pack_latents(z) if packs else z, torch.tensor([0.2, 1.0])
    # SANA's scheduler rounds times to whole numbers.
    times: list[torch.Tensor] = []
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: times.append(kwargs["timestep"].float()), with_kwargs=True
    )
    for length in (model.short, model.long):
        size = {"max_sequence_length": length, "height": 64, "width": 64}
        backbone = PipelineBackbone(pipeline, guidance=1.0, **size)
        times.clear()
        theirs = backbone.velocity(given, sigma, backbone.encode(texts, [""] * 2))
        seen = sigma if times[-1].max() <= 1 else times[-1] / 1000
        ours = model.velocity(
            model.transformer, z, seen, model.condition(model.tokenize(texts), length)
        )
        torch.testing.assert_close(
            pack_latents(ours) if packs else ours, theirs, rtol=1e-4, atol=1e-5
        )
        other = backbone.velocity(given, sigma, backbone.encode(texts[::-1], [""] * 2))
        assert not torch.allclose(other, theirs, atol=1e-3)
    if packs:  # FLUX.1 has no negative prompt
        return
    # The empty prompt is what pretraining called no caption.
    size = {"max_sequence_length": model.short, "height": 64, "width": 64}
    backbone = PipelineBackbone(pipeline, guidance=2.0, **size)
    both = model.condition(model.tokenize(["a red circle", ""]), model.short)
    theirs = backbone.velocity(z[:1], sigma[:1], backbone.encode(["a red circle"], [""]))
    seen = times[-1][:1] / 1000
    cond, none = (
        model.velocity(model.transformer, z[:1], seen, {k: t[[i]] for k, t in both.items()})
        for i in (0, 1)
    )
    torch.testing.assert_close(none + 2 * (cond - none), theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(cond, none, atol=1e-3)
