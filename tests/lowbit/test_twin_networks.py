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

from flowrl.backbones.policy import POLICY, Policy
from flowrl.backbones.sd3 import SD3
from flowrl.errors import UserError
from flowrl.quantization.backends import FP8Rowwise, NVFP4Emulated, Plain
from flowrl.quantization.layer_rules import RULES, LayerRules, choose_layers
from flowrl.quantization.linear import RolloutLinear, SamePrecisionLinear, quantise_base
from flowrl.quantization.rollout_model import RolloutModel

EMULATED = NVFP4Emulated()
EXACT = Plain(torch.float32)
SMALL = {"sana": SmallSana, "flux": SmallFlux}
WAYS = ["merge", "side"]


@pytest.fixture(params=["sana", "flux"])
def small(request):
    backbone = SMALL[request.param]()
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    disturb(policy)
    rules = RULES[request.param]
    return policy, choose_layers(policy.network, rules, "nvfp4", min_dim=0), backbone.inputs()


# --- SANA and FLUX ----------------------------------------------------------------------------


def test_exact_twins_of_other_networks_are_their_merged_policies(small):
    policy, _, inputs = small
    with policy.merged(), torch.no_grad():
        expected = policy.velocity(*inputs)
    assert torch.equal(velocity(RolloutModel(policy, (), EXACT), *inputs), expected)


def test_merged_and_side_paths_agree_to_rounding_in_other_networks(small):
    policy, choices, inputs = small
    as_chosen = [velocity(RolloutModel(policy, choices, EXACT, lora=way), *inputs) for way in WAYS]
    torch.testing.assert_close(*as_chosen, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        expected = policy.velocity(*inputs)
    torch.testing.assert_close(as_chosen[0], expected, rtol=1e-4, atol=1e-5)
    assert relative(policy.reference(*inputs), expected) > 0.01


@pytest.mark.parametrize("lora", WAYS)
def test_twins_of_other_networks_are_quantised_and_follow_in_place(small, lora):
    policy, choices, inputs = small
    twin = RolloutModel(policy, choices, EMULATED, lora=lora)
    before = {name: t.data_ptr() for name, t in tensors(twin.network).items()}
    disturb(policy, seed=1)
    twin.sync(POLICY)
    with torch.no_grad():
        error = relative(velocity(twin, *inputs), policy.velocity(*inputs))
    assert 0.01 < error < 0.5
    fresh = RolloutModel(policy, choices, EMULATED, lora=lora)
    assert torch.equal(velocity(twin, *inputs), velocity(fresh, *inputs))
    assert {name: t.data_ptr() for name, t in tensors(twin.network).items()} == before


def test_of_sana_the_depthwise_convolution_stays_the_policys_own():
    backbone = SmallSana()
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    choices = choose_layers(policy.network, RULES["sana"], "nvfp4", min_dim=0)
    twin = RolloutModel(policy, choices, EMULATED)
    block, own = (n.transformer_blocks[0].ff for n in (policy.network, twin.network))
    assert own.conv_depth.weight is block.conv_depth.weight
    for layer in (own.conv_inverted, own.conv_point):
        assert isinstance(layer, RolloutLinear) and layer.pointwise
        assert layer.backend == EMULATED


# --- a bf16 network ---------------------------------------------------------------------------


def test_a_bf16_copy_loses_part_of_a_small_update_that_a_side_path_keeps(load_tiny):
    policy = Policy(SD3(load_tiny("bf16"), max_sequence_length=12), rank=RANK, alpha=ALPHA, seed=0)
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


# --- trained in low precision -----------------------------------------------------------------


@pytest.fixture
def trained(load_tiny):
    """A policy on a base packed in NVFP4, attention and feed-forward."""
    backbone = SD3(load_tiny(), max_sequence_length=12)
    choices = choose_layers(backbone.transformer, RULES["sd3"], "nvfp4", min_dim=0)
    quantise_base(backbone.transformer, choices, EMULATED)
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    disturb(policy)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, *backbone.latent_shape(), generator=generator)
    cond = backbone.encode(["a red circle", "a blue square"], ["", ""])
    return policy, choices, (x, torch.tensor(0.7), cond)


def test_beside_weights_packed_for_training_the_twin_is_the_policy(trained):
    policy, choices, inputs = trained
    with torch.no_grad():
        expected = policy.velocity(*inputs)
    for chosen in ((), choices):
        twin = RolloutModel(policy, chosen, EMULATED, lora="side")
        assert torch.equal(velocity(twin, *inputs), expected)


def test_layers_packed_for_training_are_not_packed_again(trained):
    policy, choices, _ = trained
    adapters = [layer.get_base_layer() for layer in adapted(policy).values()]
    factors = sum(4 * RANK * (b.in_features + b.out_features) + 4 for b in adapters)
    for chosen in ((), choices):
        assert RolloutModel(policy, chosen, EMULATED, lora="side").nbytes() == factors
    assert RolloutModel(policy, choices, FP8Rowwise(), lora="side").nbytes() > 2 * factors


def test_candidates_may_have_another_precision_than_training(trained):
    policy, choices, inputs = trained
    with torch.no_grad():
        expected = policy.velocity(*inputs)
    rules = LayerRules(keep=(), min_dim=0)
    everything = choose_layers(policy.network, rules, "fp8")
    assert {c.name for c in choices if c.format} < {c.name for c in everything if c.format}
    twin = RolloutModel(policy, everything, FP8Rowwise())
    assert not any(isinstance(m, SamePrecisionLinear) for m in twin.network.modules())
    # Packed from the exact weights: nearer to the policy with these than to the policy itself.
    from flowrl.quantization.linear import exact

    with exact(policy.network), torch.no_grad():
        nearer = policy.velocity(*inputs)
    assert relative(velocity(twin, *inputs), nearer) < 0.1 < relative(expected, nearer)


def test_nothing_is_merged_into_weights_packed_for_training(trained):
    policy, _, _ = trained
    with pytest.raises(UserError, match="trained in low precision"):
        RolloutModel(policy, (), EXACT)
