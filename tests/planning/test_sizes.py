"""The published networks, built without weights."""

import inspect

import pytest
import torch
from torch import nn

from flowrl.errors import UserError
from flowrl.planning.model_specs import (
    MODEL_SPECS,
    build_autoencoder,
    build_transformer,
    model_spec,
    randomise,
    shortened,
)

# With the table of positions.
BILLIONS = {"sd3.5-large": 8.1, "sd3.5-medium": 2.5, "flux.1-dev": 11.9, "sana-1.6b": 1.6}


def numbers(module: nn.Module) -> int:
    return sum(t.numel() for t in (*module.parameters(), *module.buffers()))


def test_transformers_have_the_published_parameters_on_the_meta_device():
    for name in MODEL_SPECS:
        assert round(numbers(build_transformer(name)) / 1e9, 1) == BILLIONS[name]
    for name, parameters in [
        ("sd3.5-large", 8_056_627_520),
        ("sd3.5-medium", 2_243_171_520),
        ("flux.1-dev", 11_901_408_320),
        ("sana-1.6b", 1_604_462_752),
    ]:
        assert sum(p.numel() for p in build_transformer(name).parameters()) == parameters
    import diffusers

    for spec in MODEL_SPECS.values():
        parts = [(spec.transformer, spec.config), (spec.autoencoder, spec.autoencoder_config)]
        for class_name, config in parts:
            known = inspect.signature(getattr(diffusers, class_name).__init__).parameters
            assert set(config) <= set(known)
    for name in MODEL_SPECS:
        network = build_transformer(name, dtype=torch.float16)
        assert {t.device.type for t in network.state_dict().values()} == {"meta"}
        assert {p.dtype for p in network.parameters()} == {torch.float16}
        assert not any(p.requires_grad for p in network.parameters())


def test_decoders_and_latents_have_the_published_shapes():
    for name, millions in [("flux.1-dev", 49.5), ("sana-1.6b", 159.2)]:
        assert round(numbers(build_autoencoder(name, encoder=False)) / 1e6, 1) == millions
    for name, shapes in [
        ("sd3.5-large", {512: (16, 64, 64), 1024: (16, 128, 128)}),
        ("flux.1-dev", {512: (16, 64, 64), 1024: (16, 128, 128)}),
        ("sana-1.6b", {512: (32, 16, 16), 1024: (32, 32, 32)}),
    ]:
        assert {pixels: MODEL_SPECS[name].latent_shape(pixels) for pixels in shapes} == shapes
    for name, pixels in [("flux.1-dev", 520), ("sana-1.6b", 0)]:
        with pytest.raises(
            UserError, match=f"images of {pixels} pixels a side: expected a multiple"
        ):
            MODEL_SPECS[name].latent_shape(pixels)


def test_networks_are_shortened_and_randomised_at_their_scale():
    assert shortened(MODEL_SPECS["flux.1-dev"].config, 2) == dict(
        MODEL_SPECS["flux.1-dev"].config
    ) | {"num_layers": 2, "num_single_layers": 2}
    medium = shortened(MODEL_SPECS["sd3.5-medium"].config, 2)
    assert medium["dual_attention_layers"] == [0, 1]
    assert medium["caption_projection_dim"] == 24 * 64
    with pytest.raises(UserError, match="there is no size 'sdxl', expected one of flux.1-dev"):
        model_spec("sdxl")
    with pytest.raises(UserError, match="layers is 1, expected 2 or more"):
        build_transformer("sana-1.6b", layers=1)
    conv, norm, linear = nn.Conv2d(64, 256, 3), nn.GroupNorm(8, 256), nn.Linear(256, 512)
    weights = []
    for seed in (0, 0, 1):
        randomise(nn.Sequential(conv, norm, linear), seed)
        weights.append(linear.weight.clone())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert conv.weight.std().item() == pytest.approx((64 * 9) ** -0.5, rel=0.02)
    assert linear.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)
    assert torch.equal(norm.weight, torch.ones(256)) and not bool(linear.bias.any())
