"""Fused layers compute what PEFT, diffusers and torch do, and leave to them what they cannot."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from flowrl.backbones import cpu_layers
from flowrl.backbones.cpu_layers import (
    JointAttention,
    fuse_layers,
    has_faster_matmul,
    narrow_is_cheaper,
    ordinary_layers,
)
from flowrl.backbones.policy import POLICY, Policy
from flowrl.backbones.sd3 import SD3
from flowrl.backbones.text_cache import TextCache
from flowrl.prompts.records import load_prompts


@pytest.fixture(params=[False, True], ids=["torch", "onednn"])
def onednn(request, monkeypatch):
    """Both matmuls, whatever this CPU would choose."""
    if request.param and not has_faster_matmul():
        pytest.skip("oneDNN is not the faster one here")
    monkeypatch.setattr(cpu_layers, "has_faster_matmul", lambda: request.param)


class Options:
    """torch's option; whoever sets it is interrupted right after, if asked for."""

    def __init__(self, interrupted: bool = False):
        self.found, self.interrupted = "none", interrupted

    @property
    def fp32_precision(self) -> str:
        return self.found

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        self.found, again = value, self.interrupted
        self.interrupted = False
        if again:
            raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", [False, True], ids=["inside", "while it is set"])
def test_an_error_leaves_the_option_of_matmuls_as_it_was(monkeypatch, interrupted):
    options = Options(interrupted)
    monkeypatch.setattr(cpu_layers, "_matmul_options", lambda: options)
    with pytest.raises(KeyboardInterrupt), cpu_layers._onednn():
        assert options.found == "bf16"
        raise KeyboardInterrupt
    assert options.found == "none"


def test_threads_that_leave_in_another_order_leave_the_option_as_it_was(monkeypatch):
    options = Options()
    monkeypatch.setattr(cpu_layers, "_matmul_options", lambda: options)
    first, second = cpu_layers._onednn(), cpu_layers._onednn()
    with ThreadPoolExecutor(1) as other:
        first.__enter__()
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        assert options.found == "bf16"  # the other thread is still at it
        other.submit(second.__exit__, None, None, None).result()
    assert options.found == "none"
    options.found = "ieee"  # by the user, in between
    with cpu_layers._onednn():
        assert options.found == "bf16"
    assert options.found == "ieee"


@pytest.mark.parametrize(
    ("owner", "name"), [(Tensor, "__matmul__"), (torch, "bmm"), (torch, "addmm"), (F, "linear")]
)
def test_any_product_that_is_rounded_to_bf16_counts_as_inexact(monkeypatch, owner, name):
    monkeypatch.setattr(cpu_layers, "_matmul_options", Options)
    assert cpu_layers._is_exact()
    exact = getattr(owner, name)

    def rounded(*args, **kwargs):
        if args[0].dtype == torch.float32:
            args = tuple(arg.bfloat16().float() for arg in args)
        return exact(*args, **kwargs)

    monkeypatch.setattr(owner, name, rounded)
    assert not cpu_layers._is_exact()


def layer(rank: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """One of PEFT's layers of 24 x 16, with a change."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 24)).requires_grad_(False)
    add(network, POLICY, rank)
    return network.to(dtype)


def add(network: nn.Module, name: str, rank: int = 4) -> None:
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"], init_lora_weights=False)
    inject_adapter_in_model(config, network, adapter_name=name)


def passes(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output for x (..., 16), and the gradients of x and of the trained weights."""
    x = x.clone().requires_grad_(True)
    y = network(x)
    trained = [p for p in network.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *trained])]


def policy(load_tiny: Any, rank: int, fused: bool, dtype: torch.dtype = torch.float32) -> Policy:
    backbone = SD3(load_tiny(), max_sequence_length=12)
    nn.Module.to(backbone.transformer, dtype)
    backbone.dtype = dtype
    made = Policy(backbone, rank=rank, alpha=2 * rank, seed=0, fused=fused)
    generator = torch.Generator().manual_seed(0)
    for p in made.parameters():
        p.data = (p.data + 0.1 * torch.randn(p.shape, generator=generator)).to(dtype)
    return made


@pytest.fixture(scope="module")
def inputs(load_tiny):
    backbone = SD3(load_tiny(), max_sequence_length=12)
    x = torch.randn(3, *backbone.latent_shape(), generator=torch.Generator().manual_seed(0))
    return x, torch.tensor(0.7), TextCache(backbone)(load_prompts("tiny:all:train", limit=3))


def gradients(made: Policy, inputs: Any) -> list[Tensor]:
    x, sigma, cond = inputs
    v = made.velocity(x, sigma, cond)
    return [v.detach(), *torch.autograd.grad(v.square().mean(), made.parameters())]


@pytest.fixture
def everything_fused(monkeypatch):
    """Attention too, on any CPU; a matmul of fp64 is torch's either way."""
    monkeypatch.setattr(cpu_layers, "has_faster_matmul", lambda: True)
    monkeypatch.setattr(cpu_layers, "fastest", contextlib.nullcontext)


@pytest.mark.parametrize("rank", [2, 32])
@pytest.mark.usefixtures("everything_fused")
def test_in_float64_a_network_and_its_gradients_are_those_of_peft(load_tiny, inputs, rank):
    x, sigma, cond = inputs
    cond = copy.copy(cond)
    object.__setattr__(cond, "tensors", {k: t.double() for k, t in cond.tensors.items()})
    found, expected = (
        gradients(policy(load_tiny, rank, fused, torch.float64), (x.double(), sigma.double(), cond))
        for fused in (True, False)
    )
    for ours, its in zip(found, expected, strict=True):
        assert (ours - its).norm() <= 1e-12 * its.norm()


@pytest.mark.parametrize("rank", [2, 12])
def test_the_gradients_are_those_of_the_output(rank):
    network = layer(rank, torch.float64)
    assert narrow_is_cheaper(network[0].get_base_layer().weight, rank) == (rank == 2)
    fuse_layers(network)
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    a, b = network[0].lora_A[POLICY].weight, network[0].lora_B[POLICY].weight
    assert torch.autograd.gradcheck(lambda x, a, b: network(x), (x, a, b))


@pytest.mark.parametrize("rank", [2, 12])
def test_in_fp32_either_matmul_differs_from_peft_by_rounding(onednn, rank):
    network, x = layer(rank), torch.randn(5, 7, 16)
    expected = passes(network, x)
    fuse_layers(network)
    for ours, its in zip(passes(network, x), expected, strict=True):
        assert torch.allclose(ours, its, rtol=1e-4, atol=1e-5)


def test_frozen_layers_pass_gradients_on(onednn):
    network, x = nn.Sequential(nn.Linear(16, 24)).requires_grad_(False), torch.randn(5, 16)
    expected = passes(network, x)
    fuse_layers(network)
    for ours, its in zip(passes(network, x), expected, strict=True):
        assert torch.allclose(ours, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_layer_without_lora_whose_part_is_trained_is_torchs(monkeypatch, part):
    monkeypatch.setattr(cpu_layers, "has_faster_matmul", lambda: True)
    network, x = nn.Sequential(nn.Linear(16, 24)).requires_grad_(False), torch.randn(5, 16)
    getattr(network[0], part).requires_grad_(True)
    expected = passes(network, x)
    fuse_layers(network)
    found = passes(network, x)
    assert len(found) == 3
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def dropping(network: Any) -> None:
    network[0].lora_dropout[POLICY] = nn.Dropout(0.5)


def two_adapters(network: Any) -> None:
    add(network, "other")
    network[0].set_adapter([POLICY, "other"])


def weights_of_their_own(network: Any) -> None:
    network[0].get_base_layer().weight.requires_grad_(True)


def a_bias_of_their_own(network: Any) -> None:
    network[0].get_base_layer().bias.requires_grad_(True)


def half(network: Any) -> None:
    network.bfloat16()


@pytest.mark.parametrize(
    "change", [dropping, two_adapters, weights_of_their_own, a_bias_of_their_own, half]
)
def test_what_is_not_that_simple_is_computed_by_peft(change):
    network = layer()
    change(network)
    x = torch.randn(5, 16).to(network[0].get_base_layer().weight.dtype)
    torch.manual_seed(1)
    expected = passes(network, x)
    fuse_layers(network)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(passes(network, x), expected, strict=True))


def test_rollouts_with_merged_weights_and_learning_compute_the_same_velocities(
    onednn, load_tiny, inputs
):
    made = policy(load_tiny, 4, fused=True)
    with made.merged(), torch.no_grad():
        sampled = made.velocity(*inputs)
    learned = made.velocity(*inputs)
    assert learned.requires_grad and torch.equal(learned, sampled)
    assert not torch.equal(made.reference(*inputs), sampled)
    with ordinary_layers(made.network), torch.no_grad():
        assert torch.allclose(made.velocity(*inputs), sampled, atol=1e-5)


def test_a_copy_computes_with_its_own_weights():
    network, x = layer(), torch.randn(5, 16)
    fuse_layers(network)
    other, before = copy.deepcopy(network), network(x)
    with torch.no_grad():
        other[0].lora_B[POLICY].weight.zero_()
    assert torch.equal(network(x), before)
    assert torch.allclose(other(x), other[0].get_base_layer()(x))


def test_checkpointed_blocks_have_the_same_gradients(onednn, load_tiny, inputs):
    made = policy(load_tiny, 4, fused=True)
    expected = gradients(made, inputs)
    network: Any = made.network
    network.train()  # diffusers checkpoints no block of a network that only evaluates
    network.enable_gradient_checkpointing()
    for ours, its in zip(gradients(made, inputs), expected, strict=True):
        assert torch.equal(ours, its)


@pytest.mark.parametrize("tokens", [5, 40])  # 40: weights are made again in the backward pass
@pytest.mark.parametrize("chunk", [1, 90, 10_000])
def test_attention_and_its_gradients_are_those_of_torch(monkeypatch, tokens, chunk):
    monkeypatch.setattr(cpu_layers, "CHUNK", chunk)
    torch.manual_seed(0)
    rows = [torch.randn(2, 3, n, 4, dtype=torch.float64) for n in (3, tokens, tokens)]
    ours, its = ([t.clone().requires_grad_(True) for t in rows] for _ in range(2))
    found = cpu_layers._attention(*ours)
    expected = F.scaled_dot_product_attention(*its)  # type: ignore[call-arg]
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(found.sin().sum(), ours),
        torch.autograd.grad(expected.sin().sum(), its),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("everything_fused")
def test_attention_with_a_mask_or_in_half_precision_is_computed_by_diffusers(load_tiny):
    network: Any = load_tiny().transformer
    fuse_layers(network)
    attn: Any = network.transformer_blocks[0].attn
    assert isinstance(attn.processor, JointAttention)
    x, text = torch.randn(2, 4, attn.query_dim), torch.randn(2, 6, attn.query_dim)
    asked: list[Any] = []
    attn.processor.own = lambda *args, **kwargs: asked.append(args)
    attn(x, text)
    assert not asked
    attn(x, text, attention_mask=torch.zeros(2, 1, 10, 10))
    attn(x.half(), text.half())
    assert len(asked) == 2


@pytest.mark.usefixtures("everything_fused")
def test_under_autocast_to_bf16_it_is_as_near_to_fp32_as_diffusers_and_peft_are(load_tiny, inputs):
    expected = gradients(policy(load_tiny, 4, fused=False), inputs)
    errors = []
    for fused in (True, False):
        made = policy(load_tiny, 4, fused, torch.bfloat16)
        for p in made.parameters():  # as training has them
            p.data = p.data.float()
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(made, inputs)
        errors.append(
            torch.stack([(a.float() - b).norm() for a, b in zip(found, expected, strict=True)])
        )
    ours, its = (error[1:].norm() for error in errors)  # of all gradients
    assert 0 < ours < 1.5 * its
    assert 0 < errors[0][0] < 1.5 * errors[1][0]  # of the velocities
