"""Twins of SANA, FLUX and of a network that is itself trained in low precision."""

import pytest
import torch
from policies import (
    ALPHA,
    RANK,
    SmallFlux,
    SmallSana,
    adapted,
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
SMALL = {"sana": SmallSana, "flux": SmallFlux}
WAYS = ["merge", "side"]


def small(name):
    backbone = SMALL[name]()
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    disturb(policy)
    choices = choose_layers(policy.network, layer_rules_of(policy.network), "nvfp4", min_dim=0)
    return policy, choices, backbone.inputs()


def test_exact_twins_of_other_networks_are_their_policies_merged_or_with_side_paths():
    for policy, choices, inputs in map(small, SMALL):
        with torch.no_grad():
            expected = policy.velocity(*inputs)
            with policy.merged():
                merged = policy.velocity(*inputs)
        assert torch.equal(velocity(RolloutModel(policy, (), EXACT), *inputs), merged)
        for way in WAYS:
            found = velocity(RolloutModel(policy, choices, EXACT, lora=way), *inputs)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert relative(policy.reference(*inputs), expected) > 0.01


def test_twins_of_other_networks_are_quantised_and_follow_in_place():
    for name, lora in (("sana", "merge"), ("flux", "merge"), ("flux", "side"), ("sana", "side")):
        policy, choices, inputs = small(name)
        model = RolloutModel(policy, choices, EMULATED, lora=lora)
        before = {name: t.data_ptr() for name, t in tensors(model.network).items()}
        disturb(policy, seed=1)
        model.sync(POLICY)
        with torch.no_grad():
            error = relative(velocity(model, *inputs), policy.velocity(*inputs))
        assert 0.01 < error < 0.5, (name, lora)
        fresh = RolloutModel(policy, choices, EMULATED, lora=lora)
        assert torch.equal(velocity(model, *inputs), velocity(fresh, *inputs))
        assert {name: t.data_ptr() for name, t in tensors(model.network).items()} == before


def test_a_bf16_copy_loses_part_of_a_small_update_that_a_side_path_keeps(load_tiny):
    policy = Policy(
        PipelineBackbone(load_tiny("bf16"), max_sequence_length=12), rank=RANK, alpha=ALPHA, seed=0
    )
    disturb(policy, scale=1e-3)
    merge, side = (RolloutModel(policy, (), Plain(torch.bfloat16), lora=way) for way in WAYS)
    for name, layer in adapted(policy).items():
        weight = layer.get_base_layer().weight
        a, b = (getattr(layer, f"lora_{x}")[POLICY].weight for x in "AB")
        delta = ALPHA / RANK * b @ a
        merged = merge.network.get_submodule(name).weight
        assert weight.dtype == merged.dtype == torch.bfloat16
        assert torch.equal(merged, (weight.float() + delta).bfloat16())
        assert relative(merged.float() - weight.float(), delta) > 0.1
        beside = side.network.get_submodule(name)
        assert beside.side_a.dtype == beside.side_b.dtype == torch.float32
        assert torch.equal(beside.strength * beside.side_b @ beside.side_a, delta)
        assert beside.packed_weight.data_ptr() == weight.data_ptr()


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


def test_beside_weights_packed_for_training_the_twin_is_the_policy_and_packs_nothing(trained):
    policy, choices, inputs = trained
    with torch.no_grad():
        expected = policy.velocity(*inputs)
    adapters = [layer.get_base_layer() for layer in adapted(policy).values()]
    factors = sum(4 * RANK * (b.in_features + b.out_features) + 4 for b in adapters)
    for chosen in ((), choices):
        model = RolloutModel(policy, chosen, EMULATED, lora="side")
        assert torch.equal(velocity(model, *inputs), expected) and model.nbytes() == factors
    assert RolloutModel(policy, choices, FP8Rowwise(), lora="side").nbytes() > 2 * factors
    with pytest.raises(UserError, match="trained in low precision"):
        RolloutModel(policy, (), EXACT)


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
