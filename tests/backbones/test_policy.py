"""One network, several adapters: each velocity is whose it says, and weights come back exactly."""

import pytest
import torch
from policies import disturb

from flowrl.backbones.lora_files import count_layers, fit_lora, save_lora
from flowrl.backbones.lora_formats import open_lora
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import EMA, OLD, POLICY, REFERENCE, TEACHER, Policy
from flowrl.backbones.text_cache import TextCache
from flowrl.errors import UserError
from flowrl.prompts.records import load_prompts

SIGMA = torch.tensor(0.7)


@pytest.fixture
def make(load_tiny):
    def policy(dtype="fp32", **options) -> Policy:
        backbone = PipelineBackbone(load_tiny(dtype), max_sequence_length=12)
        return Policy(backbone, **({"rank": 4, "alpha": 6, "seed": 0} | options))

    return policy


@pytest.fixture(scope="module")
def inputs(load_tiny):
    backbone = PipelineBackbone(load_tiny(), max_sequence_length=12)
    x = torch.randn(4, *backbone.latent_shape(), generator=torch.Generator().manual_seed(0))
    return x, SIGMA, TextCache(backbone)(load_prompts("tiny:all:train", limit=4))


@torch.no_grad()
def velocity(policy: Policy, inputs) -> torch.Tensor:
    return policy.velocity(*inputs)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in policy.network.state_dict().items()}


def test_a_fresh_policy_is_the_plain_network_and_a_disturbed_one_is_not(make, load_tiny, inputs):
    policy = make()
    plain = PipelineBackbone(load_tiny(), max_sequence_length=12)
    with torch.no_grad():
        expected = plain.velocity(*inputs)
    assert torch.equal(velocity(policy, inputs), expected)
    disturb(policy)
    assert not torch.allclose(velocity(policy, inputs), expected, atol=1e-3)
    assert torch.equal(policy.velocity_of(REFERENCE, *inputs), expected)
    with policy.disabled():
        assert torch.equal(velocity(policy, inputs), expected)


def test_weights_come_back_bit_for_bit_after_merging(make, inputs):
    policy = make()
    disturb(policy)
    before, expected = weights(policy), velocity(policy, inputs)
    with policy.merged():
        inside = velocity(policy, inputs)
        changed = [k for k, v in weights(policy).items() if not torch.equal(v, before[k])]
    assert len(changed) == count_layers(policy.network)
    after = weights(policy)
    assert all(torch.equal(after[k], before[k]) for k in before)
    torch.testing.assert_close(inside, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(velocity(policy, inputs), expected)
    policy = make()
    disturb(policy)
    before = weights(policy)
    with pytest.raises(RuntimeError), policy.merged():
        raise RuntimeError
    assert all(torch.equal(v, before[k]) for k, v in weights(policy).items())


def test_only_the_policys_adapter_requires_grad_whatever_was_in_use(make, inputs):
    policy = make(ema_decay=0.9, keep_old=True)
    own = {id(p) for p in policy.parameters()}

    def learning() -> set[int]:
        return {id(p) for p in policy.network.parameters() if p.requires_grad}

    assert learning() == own
    policy.velocity_of(OLD, *inputs)
    policy.velocity_of(REFERENCE, *inputs)
    with policy.using(EMA):
        assert learning() == own
    with policy.merged():
        assert learning() == own
    assert learning() == own
    policy.velocity(*inputs).square().sum().backward()
    # The last block throws its text stream away: what only feeds that has no gradient to get.
    reached = [p for p in policy.parameters() if p.grad is not None]
    assert len(reached) >= 0.9 * len(own)
    assert all(p.grad is None for p in policy.network.parameters() if id(p) not in own)


def test_reference_and_old_have_no_graph_and_give_the_policy_back(make, inputs):
    for name in [REFERENCE, OLD]:
        policy = make(keep_old=True)
        policy.update_old()
        disturb(policy)
        expected = velocity(policy, inputs)
        other = policy.velocity_of(name, *inputs)
        assert not other.requires_grad
        assert not torch.allclose(other, expected, atol=1e-3)
        assert torch.equal(velocity(policy, inputs), expected)
    policy = make(keep_old=True)
    disturb(policy)
    policy.update_old()
    expected = velocity(policy, inputs)
    disturb(policy, seed=1)
    assert torch.equal(policy.velocity_of(OLD, *inputs), expected)


def test_the_average_moves_by_its_decay_and_can_be_merged(make, inputs):
    decay = 0.3
    policy = make(ema_decay=decay)
    ema = [t.double() for t in policy.state_dict()["adapters"][EMA]]
    for n in range(1, 6):
        disturb(policy, seed=n)
        policy.update_ema_and_count()
        d = min(decay, (1 + n) / (10 + n))
        ema = [d * e + (1 - d) * p.double() for e, p in zip(ema, policy.parameters(), strict=True)]
    found = policy.state_dict()["adapters"][EMA]
    for expected, tensor in zip(ema, found, strict=True):
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
    assert (1 + 1) / (10 + 1) < decay < (1 + 5) / (10 + 5)  # both branches were taken
    policy = make(ema_decay=0.9)
    disturb(policy)
    with policy.merged(EMA):  # still the fresh adapter, which changes nothing
        inside = velocity(policy, inputs)
    torch.testing.assert_close(inside, policy.velocity_of(REFERENCE, *inputs), rtol=1e-5, atol=1e-5)


def test_the_same_seed_gives_the_same_adapter_with_and_without_copies(make):
    torch.manual_seed(1)
    first = make(seed=5).parameters()
    state = torch.get_rng_state()
    second = make(seed=5, ema_decay=0.9, keep_old=True)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers are used
    third = make(seed=6).parameters()
    assert all(torch.equal(a, b) for a, b in zip(first, second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    copies = second.state_dict()["adapters"]
    assert all(torch.equal(a, b) for a, b in zip(copies[EMA], copies[POLICY], strict=True))


def test_adapters_that_do_not_fit_are_refused(load_tiny, make, tmp_path):
    backbone = PipelineBackbone(load_tiny(), max_sequence_length=12)
    Policy(backbone, rank=2, alpha=2, seed=0)
    with pytest.raises(UserError, match="already carries an adapter 'default'"):
        Policy(backbone, rank=2, alpha=2, seed=0)
    for options, told in [
        ({"rank": 2}, "lora.rank"),
        ({"ema_decay": None}, "ema.decay"),
        ({"targets": ["attn.to_q"]}, "lora.targets"),
    ]:
        state = make(ema_decay=0.9).state_dict()
        policy = make(**({"ema_decay": 0.9, "seed": 3} | options))
        before = [p.clone() for p in policy.parameters()]
        with pytest.raises(UserError, match=told):
            policy.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    for options in [{"rank": 8}, {"targets": ["attn.to_q"]}]:
        first = make()
        save_lora(first.backbone.pipeline, tmp_path, adapter=POLICY)
        with pytest.raises(UserError, match="lora.rank and lora.targets"):
            make(**options).start_from(open_lora(tmp_path).state)
    with pytest.raises(UserError, match="attn.nothing"):
        make(targets=["attn.nothing"])


def test_stored_and_exported_adapters_come_back(make, inputs, tmp_path):
    policy = make(ema_decay=0.9)
    disturb(policy)
    policy.update_ema_and_count()
    other = make(ema_decay=0.9, seed=9)
    other.load_state_dict(policy.state_dict())
    assert torch.equal(velocity(other, inputs), velocity(policy, inputs))
    with other.using(EMA), policy.using(EMA):
        assert torch.equal(velocity(other, inputs), velocity(policy, inputs))
    assert other.updates == 1
    first = make()
    disturb(first)
    save_lora(first.backbone.pipeline, tmp_path, adapter=POLICY)
    lora = open_lora(tmp_path)
    assert lora.scale == 6 / 4
    second = make(seed=9, ema_decay=0.9, keep_old=True)
    second.start_from(lora.state)
    assert torch.equal(velocity(second, inputs), velocity(first, inputs))
    for name in (EMA, OLD):
        with second.using(name):
            assert torch.equal(velocity(second, inputs), velocity(first, inputs))


def test_a_teacher_is_a_lora_as_diffusers_loads_it_and_leaves_the_student_alone(
    make, load_tiny, inputs, tmp_path
):
    taught = make(rank=2, alpha=3, seed=5)
    disturb(taught)
    expected = velocity(taught, inputs)
    lora = open_lora(save_lora(taught.backbone.pipeline, tmp_path, adapter=POLICY))
    student = make(keep_old=True)
    student.add_teacher(0, fit_lora(lora, student.network, type(student.backbone.pipeline)))
    plain = student.velocity_of(REFERENCE, *inputs)
    assert torch.equal(velocity(student, inputs), plain)  # a new policy changes nothing
    torch.testing.assert_close(student.velocity_of(TEACHER.format(0), *inputs), expected)
    without = student.velocity_of(TEACHER.format(1), *inputs)
    assert torch.equal(without, plain)
    assert [p.requires_grad for p in student.parameters()] == [True] * len(student.parameters())
    assert set(student.state_dict()["adapters"]) == {POLICY, OLD}


def test_a_teacher_of_layers_that_the_student_does_not_adapt_is_refused(make, tmp_path):
    taught = make(targets=["attn.to_q", "proj_out"])
    disturb(taught)
    lora = open_lora(save_lora(taught.backbone.pipeline, tmp_path, adapter=POLICY))
    student = make(targets=["attn.to_q"])
    with pytest.raises(UserError, match=r"proj_out.*lora\.targets"):
        student.add_teacher(0, fit_lora(lora, student.network, type(student.backbone.pipeline)))
