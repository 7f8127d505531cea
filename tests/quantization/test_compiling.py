"""A compiled network follows weights that are written in place, without being compiled anew."""

import shutil

import pytest
import torch
from policies import ALPHA, RANK, disturb, relative, velocity
from torch import nn
from torch._dynamo import config

from flowrl.backbones import families
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import OLD, POLICY, Policy
from flowrl.errors import UserError
from flowrl.quantization.backends import NVFP4Emulated, Plain
from flowrl.quantization.layer_rules import choose_layers
from flowrl.quantization.linear import RolloutLinear
from flowrl.quantization.rollout_model import (
    GRAPHS,
    RolloutModel,
    compile_network,
    recompilations,
    within_limit,
)

compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler on the CPU",
)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_weights_written_in_place_are_followed_without_compiling_anew():
    def layer(backend, seed, side=None):
        return RolloutLinear(randn(32, 32, seed=seed), randn(32, seed=9), backend, side=side)

    factors = randn(4, 32, seed=5), randn(32, 4, seed=6)
    packed, beside = layer(NVFP4Emulated(), 0), layer(Plain(torch.float32), 1, (*factors, 1.5))
    network = nn.Sequential(packed, nn.SiLU(), beside)
    eager = nn.Sequential(*network)
    # Guards, hence recompilations, are the same whatever generates the code.
    assert compile_network(network, backend="aot_eager") is network
    start, x = recompilations(), randn(3, 32, seed=7)
    network(x)
    warm = recompilations()
    assert warm == start + 1
    for seed in range(10, 13):
        packed.load(randn(32, 32, seed=seed))
        beside.load_side(randn(4, 32, seed=seed), randn(32, 4, seed=seed + 1))
        torch.testing.assert_close(network(x), eager(x), rtol=1e-4, atol=1e-4)
    assert recompilations() == warm
    network(randn(5, 32, seed=8))  # and a shape of its own is counted
    assert recompilations() == warm + 1


class Blocks(nn.Module):
    """As many as it is told, so that networks of this class differ in what is compiled."""

    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def limited():
    torch.compiler.reset()
    with config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield
    torch.compiler.reset()


@torch.no_grad()
def test_more_graphs_than_the_limit_are_an_error_and_not_silently_uncompiled(limited):
    first, second = (compile_network(Blocks(count), backend="eager") for count in (1, 2))
    config.recompile_limit = 3
    for rows in (2, 3):
        first(randn(rows, 4, seed=0))
    second(randn(2, 4, seed=0))
    start = recompilations()
    with pytest.raises(UserError, match="choose a rollout.batch_size"), within_limit():
        second(randn(3, 4, seed=0))
    assert recompilations() == start
    with pytest.raises(ZeroDivisionError), within_limit():  # other errors pass as they are
        raise ZeroDivisionError


def test_a_higher_limit_that_someone_set_is_left(limited):
    for before, after in ((8, GRAPHS), (GRAPHS + 36, GRAPHS + 36)):
        config.recompile_limit = before
        compile_network(Blocks(1), backend="eager")
        assert config.recompile_limit == after and config.fail_on_recompile_limit_hit


@pytest.mark.slow  # a minute of compiling
@compiler
def test_a_compiled_twin_follows_the_policy_without_compiling_anew(load_tiny):
    backbone = PipelineBackbone(load_tiny(), max_sequence_length=12)
    policy = Policy(backbone, rank=RANK, alpha=ALPHA, seed=0, keep_old=True)
    choices = choose_layers(policy.network, families.SD3.layer_rules, "nvfp4", min_dim=128)
    model, plain = (
        RolloutModel(policy, choices, NVFP4Emulated(), compile=c) for c in (True, False)
    )
    cond = backbone.encode(["a red circle", "a blue square"], ["", ""])
    x = randn(2, *backbone.latent_shape(), seed=0)
    start = recompilations()
    velocity(model, x, torch.tensor(0.9), cond)
    warm = recompilations()
    assert warm == start + 1  # the whole network is one graph
    seen = []
    for n, adapter in enumerate((POLICY, OLD, POLICY, POLICY)):
        disturb(policy, seed=n)
        for either in (model, plain):
            either.sync(adapter)
        sigma = torch.tensor(0.8 - 0.1 * n)
        with policy.disabled():  # whatever the policy's network does in between
            seen.append(velocity(model, x, sigma, cond))
        # A sum in another order may fall on the other side of a rounding step.
        assert relative(seen[-1], velocity(plain, x, sigma, cond)) < 0.05
    assert recompilations() == warm
    assert all(relative(a, b) > 0.05 for a, b in zip(seen, seen[1:], strict=False))
