"""A compiled copy of low-bit weights follows the policy."""

import shutil

import pytest
import torch
from policies import ALPHA, RANK, disturb, relative, velocity
from torch._dynamo.utils import counters

from flowrl.backbones import families
from flowrl.backbones.pipeline import PipelineBackbone
from flowrl.backbones.policy import OLD, POLICY, Policy
from flowrl.quantization.backends import NVFP4Emulated
from flowrl.quantization.layer_rules import choose_layers
from flowrl.quantization.rollout_model import RolloutModel

compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler on the CPU",
)


def compiled_graphs() -> int:
    """Return the number of graphs compiled in this process so far."""
    return counters["stats"]["unique_graphs"]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
    start = compiled_graphs()
    velocity(model, x, torch.tensor(0.9), cond)
    warm = compiled_graphs()
    assert warm > start
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
    assert compiled_graphs() == warm
    assert all(relative(a, b) > 0.05 for a, b in zip(seen, seen[1:], strict=False))
