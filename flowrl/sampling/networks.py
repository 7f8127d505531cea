"""The network as a stage draws with it: the policy's own, or a copy made for drawing."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from flowrl.backbones.base import Backbone, VelocityField
from flowrl.backbones.policy import Policy
from flowrl.quantization.compiling import within_limit
from flowrl.quantization.rollout_model import Twin
from flowrl.utils.distributed import Runtime


@contextmanager
def policys_own(
    policy: Policy, backbone: Backbone, adapter: str, *, merged: bool, runtime: Runtime
) -> Iterator[VelocityField]:
    """The policy's network with one adapter, folded into the weights or beside them."""
    # Folded before autocast begins, which would compute the change of the weights in 16 bits.
    network = policy.merged(adapter) if merged else policy.using(adapter)
    with torch.no_grad(), network, runtime.autocast():
        yield backbone.velocity


@contextmanager
def of_twin(
    twin: Twin, backbone: Backbone, adapter: str, *, runtime: Runtime
) -> Iterator[VelocityField]:
    """A copy, once it has learned what the adapter is by now. backbone: with the copy inside."""
    twin.sync(adapter)
    with torch.no_grad(), runtime.autocast(), within_limit():
        yield backbone.velocity


def with_network(backbone: Backbone, network: nn.Module) -> Backbone:
    """The same pipeline around another network of the same shape."""
    other = copy.copy(backbone)
    other.transformer = network
    return other
