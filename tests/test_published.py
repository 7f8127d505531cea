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
from flowrl.planning.model_specs import (
    SIZES,
    build_autoencoder,
    build_pipeline,
    build_text_encoders,
    size_of_checkpoint,
)

BACKBONES = {"sd3": SD3, "flux": Flux, "sana": Sana}
META, CPU = torch.device("meta"), torch.device("cpu")


def numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.fixture(scope="module")
def pipelines():
    """Each size's pipeline, built once, without memory."""
    return {name: build_pipeline(name) for name in SIZES}


def backbone_of(pipeline, name: str, pixels: int | None = None) -> Backbone:
    return BACKBONES[SIZES[name].family](pipeline, height=pixels, width=pixels)


# --- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_text_encoders_have_as_many_parameters_as_published(name):
    encoders = SIZES[name].text_encoders
    made = build_text_encoders(name)
    assert [numbers(m) for m in made] == [encoder.parameters for encoder in encoders]
    assert {t.device for m in made for t in m.parameters()} == {META}


@pytest.mark.parametrize(
    ("name", "billions"),
    # CLIP ViT-L, OpenCLIP ViT-bigG and T5 v1.1 XXL; without bigG; Gemma 2 2B (2408.00118) alone.
    [("sd3.5-medium", 0.12 + 0.69 + 4.76), ("flux.1-dev", 0.12 + 4.76), ("sana-1.6b", 2.61)],
)
def test_all_text_encoders_together(name, billions):
    assert SIZES[name].text_encoder_params / 1e9 == pytest.approx(billions, abs=0.02)


@pytest.mark.parametrize("name", SIZES)
def test_the_whole_autoencoder_has_as_many_parameters_as_published(name):
    assert numbers(build_autoencoder(name)) == SIZES[name].autoencoder_params


@pytest.mark.parametrize(
    ("name", "bytes_on_the_hub"),
    # The largest single file of each: half of an autoencoder of 335 MB, one of 1.25 GB in fp32.
    [("sd3.5-large", 0.168e9), ("sana-1.6b", 1.25e9 / 2)],
)
def test_an_autoencoder_in_16_bits_is_as_large_as_its_file(name, bytes_on_the_hub):
    assert SIZES[name].autoencoder_params * 2 == pytest.approx(bytes_on_the_hub, rel=0.01)


# --- adapters -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("name", "layers", "numbers"),
    [
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
    ],
)
def test_as_many_layers_are_adapted_as_the_blocks_have(pipelines, name, layers, numbers):
    assert adapted(pipelines[name], name) == (layers, numbers)


def test_the_second_attention_of_medium_is_adapted_only_when_asked_for(pipelines):
    second = [f"attn2.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0")]
    layers = 24 * 8 - 1 + 13 * 4  # in the first 13 blocks
    found = adapted(pipelines["sd3.5-medium"], "sd3.5-medium", *second)
    assert found == (layers, layers * 32 * 2 * 1536)
    large = adapted(pipelines["sd3.5-large"], "sd3.5-large", *second)
    assert large == adapted(pipelines["sd3.5-large"], "sd3.5-large")


# --- latents and schedules ----------------------------------------------------------------------


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
    size, pipeline = SIZES[name], build_pipeline(name, layers=2)
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


@pytest.mark.parametrize("pixels", [512, 1024])
@pytest.mark.parametrize("name", ["sd3.5-medium", "flux.1-dev", "sana-1.6b"])
def test_latents_and_sigmas_are_those_of_the_real_pipeline(pipelines, name, pixels):
    backbone = own(pipelines, name, pixels)
    shape, sigmas = run_real(name, pixels, 10)
    assert backbone.latent_shape() == shape
    assert torch.equal(backbone.sigmas(10), sigmas)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("sd3.5-large", {512: (16, 64, 64), 1024: (16, 128, 128)}),
        ("flux.1-dev", {512: (1024, 64), 1024: (4096, 64)}),
        ("sana-1.6b", {512: (32, 16, 16), 1024: (32, 32, 32)}),
    ],
)
def test_latents_are_shaped_as_published(pipelines, name, shapes):
    assert {p: own(pipelines, name, p).latent_shape() for p in shapes} == shapes


def rounded(sigmas: Tensor) -> list[float]:
    return [round(sigma, 4) for sigma in sigmas.tolist()]


@pytest.mark.parametrize("name", ["sd3.5-medium", "sd3.5-large"])
def test_sd35_shifts_twice_by_3(pipelines, name):
    found = rounded(own(pipelines, name, 512).sigmas(10))
    assert found == [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.278, 0.0089, 0]


def test_flux_shifts_by_the_picture_s_size(pipelines):
    found = rounded(own(pipelines, "flux.1-dev", 512).sigmas(6))
    assert found == [1, 0.9037, 0.7897, 0.6525, 0.4842, 0.273, 0]
    # Of 4,096 tokens: sigma = e^1.15 / (e^1.15 + 1 / s - 1).
    at_a_half = own(pipelines, "flux.1-dev", 1024).sigmas(2)[1]
    assert at_a_half.logit().item() == pytest.approx(1.15, abs=1e-5)


def test_sana_shifts_by_3_and_begins_a_little_below_1(pipelines):
    sigmas = own(pipelines, "sana-1.6b", 1024).sigmas(10)
    s = torch.linspace(1 - 1 / 1000, 0, 11)
    torch.testing.assert_close(sigmas, 3 * s / (1 + 2 * s), atol=1e-6, rtol=0)


# --- names --------------------------------------------------------------------------------------


def test_a_repository_on_the_hub_is_known_by_its_name():
    assert size_of_checkpoint("black-forest-labs/FLUX.1-dev") == "flux.1-dev"
    assert size_of_checkpoint("stabilityai/stable-diffusion-3.5-medium") == "sd3.5-medium"
    sana = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
    assert size_of_checkpoint(sana) == "sana-1.6b"
    assert size_of_checkpoint("somebody/else") is None


def test_no_two_sizes_claim_one_repository():
    names = [name for size in SIZES.values() for name in (size.checkpoint, *size.also)]
    assert len(names) == len(set(names))
