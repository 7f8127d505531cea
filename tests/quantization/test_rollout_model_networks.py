"""Twins of SANA, FLUX and of a network that is itself trained in low precision."""

import pytest
import torch
from policies import (
    ALPHA,
    RANK,
    disturb,
    relative,
    tensors,
    velocity,
)

from flowrl.backbones import families
from flowrl.backbones.families import LayerRules, layer_rules_of
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import POLICY, Policy
from flowrl.errors import UserError
from flowrl.quantization.backends import FP8Rowwise, NVFP4Emulated, Plain
from flowrl.quantization.layer_rules import choose_layers
from flowrl.quantization.linear import (
    SamePrecisionLinear,
    exact_weights,
    quantise_base,
)
from flowrl.quantization.rollout_model import RolloutModel

EMULATED = NVFP4Emulated()
EXACT = Plain(torch.float32)


@pytest.fixture
def small(load_tiny):
    def make(family):
        """A policy on the tiny pipeline of a family, its layers, and what it is compared on."""
        backbone = PipelineBackbone(load_tiny(family=family), max_sequence_length=12)
        policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
        disturb(policy)
        choices = choose_layers(policy.network, layer_rules_of(policy.network), "nvfp4", min_dim=0)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, *backbone.latent_shape(), generator=generator)
        cond = backbone.encode(["a red circle", "a blue square"], ["", ""])
        return policy, choices, (x, torch.tensor(0.7), cond)

    return make


def test_a_twin_with_convolutions_is_exact_or_quantised_and_follows_in_place(small):
    policy, choices, inputs = small("sana")
    with torch.no_grad():
        expected = policy.velocity(*inputs)
    exact = velocity(RolloutModel(policy, choices, EXACT), *inputs)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-5)
    model = RolloutModel(policy, choices, EMULATED)
    before = {name: t.data_ptr() for name, t in tensors(model.network).items()}
    disturb(policy, seed=1)
    model.sync(POLICY)
    with torch.no_grad():
        error = relative(velocity(model, *inputs), policy.velocity(*inputs))
    assert 0.01 < error < 0.5
    assert {name: t.data_ptr() for name, t in tensors(model.network).items()} == before


@pytest.fixture
def trained(load_tiny):
    """A policy on a base packed in NVFP4, attention and feed-forward."""
    backbone = PipelineBackbone(load_tiny(), max_sequence_length=12)
    choices = choose_layers(backbone.transformer, families.SD3.layer_rules, "nvfp4", min_dim=0)
    quantise_base(backbone.transformer, choices, EMULATED)
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    disturb(policy)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *backbone.latent_shape(), generator=generator)
    cond = backbone.encode(["a red circle", "a blue square"], ["", ""])
    return policy, choices, (x, torch.tensor(0.7), cond)


def test_nothing_is_merged_into_weights_packed_for_training(trained):
    with pytest.raises(UserError, match="trained in low precision"):
        RolloutModel(trained[0], (), EXACT)


def test_candidates_may_have_another_precision_than_training(trained):
    policy, choices, inputs = trained
    with torch.no_grad():
        expected = policy.velocity(*inputs)
    rules = LayerRules(keep=(), min_dim=0)
    everything = choose_layers(policy.network, rules, "fp8")
    assert {c.name for c in choices if c.format} < {c.name for c in everything if c.format}
    model = RolloutModel(policy, everything, FP8Rowwise())
    assert not any(isinstance(m, SamePrecisionLinear) for m in model.network.modules())
    # Packed from the exact weights: nearer to the policy with these than to the policy itself.
    with exact_weights(policy.network), torch.no_grad():
        nearer = policy.velocity(*inputs)
    assert relative(velocity(model, *inputs), nearer) < 0.1 < relative(expected, nearer)
