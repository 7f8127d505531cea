"""A model has the policy's frozen tensors, its own products, and the adapter it was told."""

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
from flowrl.backbones.policy import EMA, OLD, POLICY, Policy
from flowrl.errors import UserError
from flowrl.quantization.backends import FP8Rowwise, NVFP4Emulated
from flowrl.quantization.layer_rules import choose_layers
from flowrl.quantization.linear import (
    SamePrecisionLinear,
    exact_weights,
    quantise_base,
)
from flowrl.quantization.rollout_model import RolloutModel
from flowrl.trajectory import Conditioning

EMULATED = NVFP4Emulated()


@pytest.fixture
def make(load_tiny):
    def policy(dtype="fp32", **options) -> Policy:
        backbone = PipelineBackbone(load_tiny(dtype), max_sequence_length=12)
        return Policy(backbone, **({"rank": RANK, "alpha": ALPHA, "seed": 0} | options))

    return policy


def two_texts(backbone: PipelineBackbone):
    """Latents and texts that velocities are compared on."""
    x = torch.randn(2, *backbone.latent_shape(), generator=torch.Generator().manual_seed(0))
    return x, torch.tensor(0.7), backbone.encode(["a red circle", "a blue square"], ["", ""])


@pytest.fixture(scope="module")
def inputs(load_tiny):
    x, sigma, texts = two_texts(PipelineBackbone(load_tiny(), max_sequence_length=12))

    def of(policy: Policy):
        dtype = policy.backbone.dtype
        cond = Conditioning(tensors={k: t.to(dtype) for k, t in texts.tensors.items()})
        return x.to(dtype), sigma, cond

    return of


def choices_of(policy: Policy, min_dim: int = 0):
    return choose_layers(policy.network, families.SD3.layer_rules, min_dim=min_dim)


def test_an_exact_twin_is_the_merged_policy_bit_for_bit_for_every_adapter(make, inputs):
    for dtype in ["fp32", "bf16"]:
        policy = make(dtype, keep_old=True, ema_decay=0.5)
        disturb(policy)
        policy.update_old()
        disturb(policy, seed=1)
        policy.update_ema_and_count()
        args = inputs(policy)
        model = RolloutModel(policy)
        found = []
        for name in (POLICY, OLD, EMA, POLICY):
            with policy.merged(name), torch.no_grad():
                expected = policy.velocity(*args)
            model.sync(name)
            found.append(velocity(model, *args))
            assert torch.equal(found[-1], expected)
            assert found[-1].dtype == policy.backbone.dtype
        assert not any(torch.equal(found[0], other) for other in found[1:3])
        assert torch.equal(found[0], found[3])


def test_what_is_packed_is_the_fp32_merge_not_one_rounded_to_the_networks_dtype(make):
    for backend in [EMULATED, FP8Rowwise()]:
        policy = make("bf16", keep_old=True)
        disturb(policy, scale=0.01)
        model = RolloutModel(policy, choices_of(policy), backend)
        model.sync(POLICY)
        packed = {c.name: c.quantised for c in model.choices}
        lost = 0
        adapted = [(n, m) for n, m in policy.network.named_modules() if hasattr(m, "lora_A")]
        for name, layer in adapted:
            a, b = (getattr(layer, f"lora_{x}")[POLICY].weight for x in "AB")
            merged = layer.get_base_layer().weight.float() + ALPHA / RANK * (b @ a)
            assert packed[name]
            found = model.network.get_submodule(name)
            for part, expected in backend.pack(merged).items():
                assert torch.equal(found.get_buffer(f"packed_{part}").float(), expected.float())
            rounded = backend.pack(merged.bfloat16().float())
            lost += sum(
                (found.get_buffer(f"packed_{part}").float() != value.float()).sum().item()
                for part, value in rounded.items()
            )
        assert lost > 0


def test_following_the_policy_moves_nothing(make, inputs):
    for backend in (EMULATED, None):
        policy = make()
        model = RolloutModel(policy, choices_of(policy) if backend else (), backend)
        before = {name: t.data_ptr() for name, t in tensors(model.network).items()}
        seen = [velocity(model, *inputs(policy))]
        for n in (1, 2):
            disturb(policy, seed=n)
            model.sync(POLICY)
            seen.append(velocity(model, *inputs(policy)))
            assert not any(torch.equal(seen[-1], other) for other in seen[:-1])
            fresh = RolloutModel(policy, model.choices, backend)
            assert torch.equal(seen[-1], velocity(fresh, *inputs(policy)))
        assert {name: t.data_ptr() for name, t in tensors(model.network).items()} == before


def test_the_policy_does_not_notice_its_twin(make, inputs):
    policy = make(keep_old=True)
    disturb(policy)
    before = {k: v.clone() for k, v in policy.network.state_dict().items()}
    learning = {n for n, p in policy.network.named_parameters() if p.requires_grad}
    with torch.no_grad():
        expected = policy.velocity(*inputs(policy))
    model = RolloutModel(policy, choices_of(policy), EMULATED)
    model.sync(OLD)
    velocity(model, *inputs(policy))
    after = policy.network.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert {n for n, p in policy.network.named_parameters() if p.requires_grad} == learning
    assert policy.backbone.transformer is policy.network is not model.network
    with torch.no_grad():
        assert torch.equal(policy.velocity(*inputs(policy)), expected)


def test_the_twin_does_not_care_which_adapter_the_policy_uses(make, inputs):
    policy = make(keep_old=True)
    disturb(policy)
    args = inputs(policy)
    model = RolloutModel(policy, choices_of(policy, min_dim=128), EMULATED)
    expected = velocity(model, *args)
    for block in (policy.disabled, lambda: policy.using(OLD), policy.merged):
        with block():
            assert torch.equal(velocity(model, *args), expected)
            model.sync(POLICY)
            assert torch.equal(velocity(model, *args), expected)
        assert torch.equal(velocity(model, *args), expected)


def test_a_twin_with_convolutions_is_exact_or_quantised_and_follows_in_place(load_tiny):
    backbone = PipelineBackbone(load_tiny(family="sana"), max_sequence_length=12)
    policy, inputs = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0), two_texts(backbone)
    disturb(policy)
    choices = choose_layers(policy.network, layer_rules_of(policy.network), min_dim=0)
    with torch.no_grad():
        expected = policy.velocity(*inputs)
    exact = velocity(RolloutModel(policy), *inputs)
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
    choices = choose_layers(backbone.transformer, families.SD3.layer_rules, min_dim=0)
    quantise_base(backbone.transformer, choices, EMULATED)
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0)
    disturb(policy)
    return policy, choices, two_texts(backbone)


def test_nothing_is_merged_into_weights_packed_for_training(trained):
    with pytest.raises(UserError, match="trained in low precision"):
        RolloutModel(trained[0])


def test_candidates_may_have_another_precision_than_training(trained):
    policy, choices, inputs = trained
    with torch.no_grad():
        expected = policy.velocity(*inputs)
    rules = LayerRules(keep=(), min_dim=0)
    everything = choose_layers(policy.network, rules)
    assert {c.name for c in choices if c.quantised} < {c.name for c in everything if c.quantised}
    model = RolloutModel(policy, everything, FP8Rowwise())
    assert not any(isinstance(m, SamePrecisionLinear) for m in model.network.modules())
    # Packed from the exact weights: nearer to the policy with these than to the policy itself.
    with exact_weights(policy.network), torch.no_grad():
        nearer = policy.velocity(*inputs)
    assert relative(velocity(model, *inputs), nearer) < 0.1 < relative(expected, nearer)
