"""Small policies on the networks of diffusers, and what models of them are compared by."""

import shutil

import pytest
import torch
from torch import Tensor, nn

from flowrl.backbones.policy import Policy
from flowrl.quantization.rollout_model import RolloutModel
from flowrl.sampling.rollout import with_network
from flowrl.trajectory import Conditioning

RANK, ALPHA = 4, 6
compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler on the CPU",
)


def disturb(policy: Policy, scale: float = 0.1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters():
        p.data += scale * torch.randn(p.shape, generator=generator)


def tensors(network: nn.Module) -> dict[str, Tensor]:
    return dict(network.named_parameters()) | dict(network.named_buffers())


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@torch.no_grad()
def velocity(model: RolloutModel, x: Tensor, sigma: Tensor, cond: Conditioning) -> Tensor:
    return with_network(model.policy.backbone, model.network).velocity(x, sigma, cond)
