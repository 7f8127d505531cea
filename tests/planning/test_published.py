"""What is published of the pipelines, against networks on the meta device and real pipelines."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from flowrl.backbones.base import Backbone
from flowrl.backbones.flux import Flux
from flowrl.backbones.policy import Policy
from flowrl.backbones.sana import Sana
from flowrl.backbones.sd3 import SD3
from flowrl.planning.model_specs import MODEL_SPECS, build_autoencoder, build_pipeline, spec_name

BACKBONES = {"sd3": SD3, "flux": Flux, "sana": Sana}
META, CPU = torch.device("meta"), torch.device("cpu")


def numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.fixture(scope="module")
def pipelines():
    return {name: build_pipeline(name) for name in MODEL_SPECS}


def backbone_of(pipeline, name: str, pixels: int | None = None) -> Backbone:
    return BACKBONES[MODEL_SPECS[name].family](pipeline, height=pixels, width=pixels)


def test_encoders_and_autoencoders_have_as_many_parameters_as_published():
    for name in MODEL_SPECS:
        encoders = MODEL_SPECS[name].text_encoders
        made = [encoder.build(torch.bfloat16) for encoder in encoders]
        assert [numbers(m) for m in made] == [encoder.parameters for encoder in encoders]
        assert {t.device for m in made for t in m.parameters()} == {META}
    for name in MODEL_SPECS:
        assert numbers(build_autoencoder(name)) == MODEL_SPECS[name].autoencoder_params


def adapted(pipeline, name: str, *more: str) -> tuple[int, int]:
    """Layers with an adapter, and its numbers at rank 32. The pipeline is given back without."""
    backbone = backbone_of(pipeline, name)
    with META:
        targets = (*backbone.lora_targets, *more)
        policy = Policy(backbone, rank=32, alpha=64, seed=0, targets=targets)
    found = policy.parameters()
    assert {p.device for p in found} == {META}
    pipeline.transformer.delete_adapters("default")
    return len(found) // 2, sum(p.numel() for p in found)


@pytest.mark.slow
def test_as_many_layers_are_adapted_as_the_blocks_have(pipelines):
    for name, layers, numbers in [
        # Eight projections a block; the last has no use for the text's output.
        ("sd3.5-large", 38 * 8 - 1, (38 * 8 - 1) * 32 * 2 * 2432),
        ("sd3.5-medium", 24 * 8 - 1, (24 * 8 - 1) * 32 * 2 * 1536),
        # Double blocks: eight projections and two feed-forwards of four times the width. Single
        # ones: the attention's three inputs.
        (
            "flux.1-dev",
            19 * (8 + 4) + 38 * 3,
            32 * 3072 * (19 * (8 * 2 + 4 * (1 + 4)) + 38 * 3 * 2),
        ),
        ("sana-1.6b", 20 * 8, 20 * 8 * 32 * 2 * 2240),
    ]:
        assert adapted(pipelines[name], name) == (layers, numbers)
    # The second attention of medium is adapted only when asked for.
    second = [f"attn2.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0")]
    layers = 24 * 8 - 1 + 13 * 4  # in the first 13 blocks
    found = adapted(pipelines["sd3.5-medium"], "sd3.5-medium", *second)
    assert found == (layers, layers * 32 * 2 * 1536)
    large = adapted(pipelines["sd3.5-large"], "sd3.5-large", *second)
    assert large == adapted(pipelines["sd3.5-large"], "sd3.5-large")


class Still(nn.Module):
    """A transformer that predicts no motion, with the configuration of a real one."""

    dtype, device = torch.float32, CPU

    def __init__(self, transformer):
        super().__init__()
        self.config = transformer.config

    def cache_context(self, name: str):
        return nullcontext()

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor]:
        return (torch.zeros_like(hidden_states),)


def run_real(name: str, pixels: int, steps: int) -> tuple[torch.Size, Tensor]:
    """The real pipeline's own call -> the shape of its latents, and the sigmas it stepped by."""
    size, pipeline = MODEL_SPECS[name], build_pipeline(name, layers=2)
    pipeline.transformer, pipeline.vae = Still(pipeline.transformer), None
    pipeline.set_progress_bar_config(disable=True)
    given = {"prompt_embeds": torch.zeros(1, 4, size.text_width)}
    if size.pooled_width is not None:
        given |= {"pooled_prompt_embeds": torch.zeros(1, size.pooled_width)}
    if size.family == "sana":
        given |= {"prompt_attention_mask": torch.ones(1, 4), "use_resolution_binning": False}
        given |= {"negative_prompt": None}
    out = pipeline(
        height=pixels, width=pixels, num_inference_steps=steps, guidance_scale=1.0,
        output_type="latent", return_dict=False, **given,
    )  # fmt: skip
    return out[0].shape[1:], pipeline.scheduler.sigmas


def own(pipelines, name: str, pixels: int) -> Backbone:
    backbone = backbone_of(pipelines[name], name, pixels)
    backbone.device = CPU
    return backbone


def test_latents_are_those_of_the_real_pipeline(pipelines):
    for pixels in [512, 1024]:
        for name in ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]:
            backbone = own(pipelines, name, pixels)
            shape, sigmas = run_real(name, pixels, 10)
            assert backbone.latent_shape() == shape
            assert torch.equal(backbone.sigmas(10), sigmas)


def rounded(sigmas: Tensor) -> list[float]:
    return [round(sigma, 4) for sigma in sigmas.tolist()]


def test_schedules_are_shifted_as_published(pipelines):
    for name in ["sd3.5-medium", "sd3.5-large"]:
        found = rounded(own(pipelines, name, 512).sigmas(10))
        assert found == [
            1,
            0.9601,
            0.9133,
            0.8577,
            0.7904,
            0.7073,
            0.6022,
            0.4649,
            0.278,
            0.0089,
            0,
        ]
    found = rounded(own(pipelines, "flux.1-dev", 512).sigmas(6))
    assert found == [1, 0.9037, 0.7897, 0.6525, 0.4842, 0.273, 0]
    # Of 4,096 tokens: sigma = e^1.15 / (e^1.15 + 1 / s - 1).
    at_a_half = own(pipelines, "flux.1-dev", 1024).sigmas(2)[1]
    assert at_a_half.logit().item() == pytest.approx(1.15, abs=1e-5)
    # Sana shifts by 3 and begins a little below 1.
    sigmas = own(pipelines, "sana-1.6b", 1024).sigmas(10)
    s = torch.linspace(1 - 1 / 1000, 0, 11)
    torch.testing.assert_close(sigmas, 3 * s / (1 + 2 * s), atol=1e-6, rtol=0)


def test_repositories_are_known_by_one_name():
    assert spec_name("black-forest-labs/FLUX.1-dev") == "flux.1-dev"
    assert spec_name("stabilityai/stable-diffusion-3.5-medium") == "sd3.5-medium"
    sana = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
    assert spec_name(sana) == "sana-1.6b"
    assert spec_name("somebody/else") is None
    names = [name for size in MODEL_SPECS.values() for name in (size.checkpoint, *size.also)]
    assert len(names) == len(set(names))
