"""Pretraining can be stopped anywhere, and trains exactly what diffusers will run."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flowrl import pipeline_path
from flowrl.backbones.flux import Flux, pack_latents
from flowrl.backbones.sana import Sana
from flowrl.backbones.sd3 import SD3
from flowrl.config import load_config
from scripts.pretrain_tiny import flux, sana, score, sd3

ENCODED = {sd3.autoencoder: (16, 8, 8), sana.autoencoder: (16, 4, 4)}  # shape of a latent


@dataclass(frozen=True)
class Family:
    model: type
    vae: Callable
    backbone: type


FAMILIES = {
    "sd3": Family(sd3.TinySD3, sd3.autoencoder, SD3),
    "flux": Family(flux.TinyFlux, sd3.autoencoder, Flux),
    "sana": Family(sana.TinySana, sana.autoencoder, Sana),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family, tmp_path_factory):
    torch.manual_seed(0)
    model = family.model(tmp_path_factory.mktemp("model"))
    for parameter in model.transformer.parameters():
        if not parameter.any():  # or nothing that a prompt changes would reach the velocity
            torch.nn.init.normal_(parameter, std=0.05)
    model.transformer.eval()
    model.encoders.eval()
    return model


@torch.no_grad()
def test_pretraining_sees_the_velocity_that_the_pipeline_computes(model, family):
    """The same text conditioning, time and network as diffusers' own pipeline."""
    texts = ['the word "BIRD"', "a red circle left of a blue square"]
    pipeline, packs = model.pipeline(model.transformer, family.vae()), family.backbone is Flux
    z = torch.randn(2, *ENCODED[family.vae], generator=torch.Generator().manual_seed(0))
    given, sigma = pack_latents(z) if packs else z, torch.tensor([0.2, 1.0])
    for length in (model.short, model.long):
        size = {"max_sequence_length": length, "height": 64, "width": 64}
        backbone = family.backbone(pipeline, guidance=1.0, **size)
        ours = model.velocity(
            model.transformer, z, sigma, model.condition(model.tokenize(texts), length)
        )
        theirs = backbone.velocity(given, sigma, backbone.encode(texts, [""] * 2))
        torch.testing.assert_close(
            pack_latents(ours) if packs else ours, theirs, rtol=1e-4, atol=1e-5
        )
        other = backbone.velocity(given, sigma, backbone.encode(texts[::-1], [""] * 2))
        assert not torch.allclose(other, theirs, atol=1e-3)
    if packs:  # FLUX.1 has no negative prompt
        return
    # The empty prompt is what pretraining called no caption.
    size = {"max_sequence_length": model.short, "height": 64, "width": 64}
    backbone = family.backbone(pipeline, guidance=2.0, **size)
    both = model.condition(model.tokenize(["a red circle", ""]), model.short)
    cond, none = (
        model.velocity(model.transformer, z[:1], sigma[:1], {k: t[[i]] for k, t in both.items()})
        for i in (0, 1)
    )
    theirs = backbone.velocity(z[:1], sigma[:1], backbone.encode(["a red circle"], [""]))
    torch.testing.assert_close(none + 2 * (cond - none), theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(cond, none, atol=1e-3)


def test_cards_score_with_the_settings_of_the_presets_but_for_flux_which_is_given_guidance():
    flux = load_config("quickstart-flux")
    for setting, steps in (("preset", 8), ("28 steps", 28)):
        call = score.call_of("FluxPipeline", setting)
        assert (call["num_inference_steps"], call["guidance_scale"]) == (steps, 2)
        assert call["max_sequence_length"] == flux.pipeline.max_sequence_length
    assert flux.rollout.guidance_scale == flux.evaluation.guidance_scale == 1
    for name in ("quickstart", "quickstart-sana"):
        config = load_config(name)
        index = json.loads(
            (Path(pipeline_path(config.pipeline.path)) / "model_index.json").read_text()
        )
        for setting, steps in zip(
            ("preset", "28 steps"), config.evaluation.num_inference_steps, strict=True
        ):
            call = score.call_of(index["_class_name"], setting)
            assert call["num_inference_steps"] == steps, name
            assert call["guidance_scale"] == config.evaluation.guidance_scale, name
            assert call["max_sequence_length"] == config.pipeline.max_sequence_length, name
        assert config.rollout.guidance_scale == config.evaluation.guidance_scale, name
