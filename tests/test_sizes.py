"""The published networks, built without weights."""

import pytest
import torch
from torch import nn

from flowrl.errors import UserError
from flowrl.planning.model_specs import (
    SIZES,
    build_decoder,
    build_transformer,
    randomise,
    shortened,
    size_of,
)


def numbers(module: nn.Module) -> int:
    return sum(t.numel() for t in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("name", SIZES)
def test_a_transformer_has_as_many_parameters_as_published(name):
    assert round(numbers(build_transformer(name)) / 1e9, 1) == SIZES[name].billions


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("sd3.5-large", 8_056_627_520),
        ("sd3.5-medium", 2_243_171_520),
        ("flux.1-dev", 11_901_408_320),
        ("sana-1.6b", 1_604_462_752),
    ],
)
def test_the_count_is_exact_to_the_last_weight(name, parameters):
    assert sum(p.numel() for p in build_transformer(name).parameters()) == parameters


@pytest.mark.parametrize("name", SIZES)
def test_building_on_the_meta_device_takes_no_memory_and_keeps_the_dtype(name):
    network = build_transformer(name, dtype=torch.float16)
    assert {t.device.type for t in network.state_dict().values()} == {"meta"}
    assert {p.dtype for p in network.parameters()} == {torch.float16}
    assert not any(p.requires_grad for p in network.parameters())


@pytest.mark.parametrize(("name", "millions"), [("flux.1-dev", 49.5), ("sana-1.6b", 159.2)])
def test_a_decoder_comes_without_its_encoder(name, millions):
    assert round(numbers(build_decoder(name)) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("sd3.5-large", {512: (16, 64, 64), 1024: (16, 128, 128)}),
        ("flux.1-dev", {512: (16, 64, 64), 1024: (16, 128, 128)}),
        ("sana-1.6b", {512: (32, 16, 16), 1024: (32, 32, 32)}),
    ],
)
def test_latents_are_as_large_as_the_autoencoder_makes_them(name, shapes):
    assert {pixels: SIZES[name].latent_shape(pixels) for pixels in shapes} == shapes


@pytest.mark.parametrize(("name", "pixels"), [("flux.1-dev", 520), ("sana-1.6b", 0)])
def test_pictures_that_cannot_be_patched_are_refused(name, pixels):
    with pytest.raises(UserError, match=f"pictures of {pixels} pixels a side: expected a multiple"):
        SIZES[name].latent_shape(pixels)


def test_a_shortened_network_is_as_wide_as_ever():
    assert shortened(SIZES["flux.1-dev"].config, 2) == dict(SIZES["flux.1-dev"].config) | {
        "num_layers": 2,
        "num_single_layers": 2,
    }
    medium = shortened(SIZES["sd3.5-medium"].config, 2)
    assert medium["dual_attention_layers"] == (0, 1)
    assert medium["caption_projection_dim"] == 24 * 64


def test_an_unknown_name_and_too_few_layers_are_refused():
    with pytest.raises(UserError, match="there is no size 'sdxl', expected one of sd3.5-large"):
        size_of("sdxl")
    with pytest.raises(UserError, match="layers is 1, expected 2 or more"):
        build_transformer("sana-1.6b", layers=1)


def test_random_weights_are_the_seed_s_and_keep_the_scale_of_what_goes_through():
    conv, norm, linear = nn.Conv2d(64, 256, 3), nn.GroupNorm(8, 256), nn.Linear(256, 512)
    weights = []
    for seed in (0, 0, 1):
        randomise(nn.Sequential(conv, norm, linear), seed)
        weights.append(linear.weight.clone())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert conv.weight.std().item() == pytest.approx((64 * 9) ** -0.5, rel=0.02)
    assert linear.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert torch.equal(norm.weight, torch.ones(256)) and not bool(linear.bias.any())
