"""Sampling and training compute the same numbers, and nothing else is changed."""

import pytest
import torch
from torch import nn

from flowrl.quantization.backends import FP8Rowwise, NVFP4Emulated, PerRow
from flowrl.quantization.linear import (
    SamePrecisionLinear,
)

SHAPE = OUT, IN = 48, 64
BACKENDS = [NVFP4Emulated(), PerRow(NVFP4Emulated()), FP8Rowwise()]


def normal(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.fixture
def linear():
    layer = nn.Linear(IN, OUT).requires_grad_(False)
    layer.weight.copy_(normal(OUT, IN, seed=1))
    layer.bias.copy_(normal(OUT, seed=2))
    return layer


def gradient(x):
    assert x.grad is not None
    return x.grad


def test_the_layer_multiplies_as_its_backend_does(linear):
    for backend in BACKENDS:
        for dtype in [torch.float32, torch.bfloat16]:
            layer = SamePrecisionLinear(linear.to(dtype), backend)
            x = normal(3, 5, IN, dtype=dtype)
            rows = backend.matmul(x.view(15, IN), backend.pack(linear.weight.float()), linear.bias)
            assert torch.equal(layer(x), rows.view(3, 5, OUT))
            assert not torch.equal(layer(x), linear(x))


def test_the_gradient_is_that_of_a_product_with_the_quantised_weight(linear):
    for backend in BACKENDS:
        layer, x, dy = SamePrecisionLinear(linear, backend), normal(7, IN), normal(7, OUT, seed=3)
        x.requires_grad_()
        layer(x).backward(dy)
        # As the backend multiplies: rows of the identity are exact in every format.
        product = backend.matmul(torch.eye(IN), backend.pack(linear.weight)).T
        expected = dy.double() @ product.double()
        torch.testing.assert_close(gradient(x).double(), expected, rtol=1e-5, atol=1e-5)
        exact_one = dy.double() @ linear.weight.double()
        assert (gradient(x).double() - exact_one).norm() > 0.01 * exact_one.norm()
        assert linear.weight.grad is None and linear.bias.grad is None
