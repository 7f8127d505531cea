"""Layers and product of a precision, checked before anything is computed with them."""

import pytest
import torch

from flowrl.errors import UserError
from flowrl.quantization.backends import Capability, FP8Rowwise, resolve
from flowrl.quantization.rollout_model import prepare

HOPPER = Capability(device="cuda", name="H100", compute=(9, 0), scaled_mm=True)
OPTIONS = {"dtype": torch.float32, "device": torch.device("cpu"), "min_dim": 0}


@pytest.fixture(scope="module")
def network(load_tiny):
    return load_tiny().transformer


def test_a_kernel_that_computes_otherwise_is_refused(network, monkeypatch):
    matmul = FP8Rowwise.matmul

    def reversed_scales(self, x, state, bias=None):
        return matmul(self, x, {**state, "scale": state["scale"].flip(1)}, bias)

    monkeypatch.setattr(FP8Rowwise, "matmul", reversed_scales)
    with pytest.raises(UserError, match="differs from its emulation"):
        prepare(network, resolve("fp8", HOPPER), **OPTIONS)
