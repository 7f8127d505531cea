"""Which layers are quantised: the published sizes by number, every single rule at its edge."""

import pytest
import torch
from torch import nn

from flowrl.backbones import families
from flowrl.backbones.families import LayerRules, layer_rules_of
from flowrl.backbones.policy import Policy
from flowrl.errors import UserError
from flowrl.planning.model_specs import MODEL_SPECS, build_network
from flowrl.quantization.layer_rules import (
    choose_layers,
    matrices,
    matrix_shape,
    quantised_share,
)


def endings(choices) -> set[str]:
    return {".".join(c.name.split(".")[2:]) for c in choices if c.quantised}


@pytest.fixture(scope="module")
def real():
    names = ("sd3.5-large", "sd3.5-medium", "flux.1-dev", "sana-1.6b")
    specs = {name: MODEL_SPECS[name] for name in names}
    return {
        name: build_network(spec.transformer, spec.config, torch.bfloat16)
        for name, spec in specs.items()
    }


def test_so_many_layers_of_a_published_size_are_quantised(real):
    for name, layers, quantised, weights, share in [
        ("sd3.5-large", 537, 76, 1_798_045_696, 0.2233),
        ("sd3.5-medium", 393, 48, 452_984_832, 0.2021),
        ("flux.1-dev", 504, 495, 11_834_425_344, 0.9946),
        ("sana-1.6b", 227, 40, 752_640_000, 0.4694),
    ]:
        choices = choose_layers(real[name], layer_rules_of(real[name]))
        found = [c for c in choices if c.quantised]
        assert (len(choices), len(found)) == (layers, quantised)
        assert sum(c.size for c in found) == weights
        assert quantised_share(choices) == pytest.approx(share, abs=5e-5)


def test_of_sd3_only_the_feed_forward_of_the_image_is_quantised(real, load_tiny):
    tiny = load_tiny().transformer
    for network, least in ((real["sd3.5-large"], None), (real["sd3.5-medium"], None), (tiny, 128)):
        choices = choose_layers(network, families.SD3.layer_rules, min_dim=least)
        assert endings(choices) == {"ff.net.0.proj", "ff.net.2"}
    every = choose_layers(tiny, families.SD3.layer_rules, min_dim=0)
    assert {c.name for c in choices if c.quantised} < {c.name for c in every if c.quantised}
    with pytest.raises(UserError, match="could be is 512, and pipeline.min_dim is 2432"):
        choose_layers(tiny, families.SD3.layer_rules)


def test_a_network_without_published_rules_keeps_what_is_no_projection_of_its_blocks():
    block = nn.ModuleDict(
        {"attn_q": nn.Linear(2048, 2048), "norm_linear": nn.Linear(2048, 4096),
         "ff": nn.Linear(2048, 4096), "small": nn.Linear(64, 64)}
    )  # fmt: skip
    network = nn.ModuleDict({"embed_x": nn.Linear(2048, 2048), "last": nn.Linear(2048, 2048)})
    network["blocks"] = nn.ModuleList([block])
    choices = choose_layers(network, layer_rules_of(network))
    assert {c.name for c in choices if c.quantised} == {"blocks.0.attn_q", "blocks.0.ff"}


def test_the_longer_side_is_above_the_minimum_and_both_are_divisible():
    for shape, quantised in [
        ((64, 96), True),
        ((96, 64), True),
        ((64, 64), False),
        ((96, 48), False),
        ((72, 64), False),
        ((80, 32), True),
    ]:
        rows, columns = shape
        network = nn.ModuleDict({"x": nn.Linear(columns, rows), "other": nn.Linear(128, 128)})
        rules = LayerRules(keep=(), min_dim=64)
        found = {c.name: c for c in choose_layers(network, rules)}["x"]
        assert found.quantised == quantised


def test_adapters_change_neither_names_nor_choices(load_tiny):
    from flowrl.backbones.pipeline import PipelineBackbone

    backbone = PipelineBackbone(load_tiny(), max_sequence_length=12)
    before = choose_layers(backbone.transformer, families.SD3.layer_rules, min_dim=0)
    shapes = {name: matrix_shape(layer) for name, layer in matrices(backbone.transformer)}
    Policy(backbone, rank=4, alpha=6, seed=0, keep_old=True)
    after = choose_layers(backbone.transformer, families.SD3.layer_rules, min_dim=0)
    assert after == before
    assert {n: matrix_shape(layer) for n, layer in matrices(backbone.transformer)} == shapes
    assert len(before) == 33
    assert sum(c.quantised for c in before) == 20


def test_of_sana_only_the_1x1_convolutions_of_the_feed_forward_are_quantised(real):
    network = real["sana-1.6b"]
    choices = choose_layers(network, families.SANA.layer_rules)
    assert endings(choices) == {"ff.conv_inverted", "ff.conv_point"}
    depthwise = [c for c in choices if c.name.endswith("conv_depth")]
    assert len(depthwise) == 20
    assert not any(c.quantised for c in depthwise)
    # However little is asked of the sizes, a depthwise convolution is no product of matrices.
    anything = LayerRules(keep=(), min_dim=0, in_multiple=1, out_multiple=1, pointwise=True)
    left = {c.name for c in choose_layers(network, anything) if not c.quantised}
    assert left == {c.name for c in depthwise}
