"""A layer for rollouts: the replaced layer's interface, updates in place, one graph for all."""

import pytest
import torch
import torch.nn.functional as F
from software_nvfp4 import randn
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from flowrl.quantization.backends import (
    Backend,
    FP8Rowwise,
    NVFP4Emulated,
    NVFP4Native,
    PerRow,
)
from flowrl.quantization.linear import (
    RolloutLinear,
    SamePrecisionLinear,
)

RUNNING = [NVFP4Emulated(), FP8Rowwise()]
PACKING = [*RUNNING, NVFP4Native()]


def layer(backend: Backend, seed: int = 0, **options) -> RolloutLinear:
    return RolloutLinear(randn(48, 64, seed=seed), randn(48, seed=99), backend, **options)


def test_a_pointwise_layer_is_the_1x1_convolution_of_the_same_numbers():
    for backend in RUNNING:
        for layout in [torch.contiguous_format, torch.channels_last]:
            x = randn(2, 64, 3, 5).to(memory_format=layout)
            flat = layer(backend)
            convolution = RolloutLinear(
                randn(48, 64)[:, :, None, None], randn(48, seed=99), backend, pointwise=True
            )
            y = convolution(x)
            assert y.shape == (2, 48, 3, 5) and y.is_contiguous(memory_format=layout)
            assert torch.equal(y, flat(x.movedim(1, -1)).movedim(-1, 1))
            # Signs are exact in every format.
            signs, weight = x.sign(), randn(48, 64, 1, 1).sign()
            convolution = RolloutLinear(weight, randn(48), backend, pointwise=True)
            torch.testing.assert_close(convolution(signs), F.conv2d(signs, weight, randn(48)))


def addresses(made: nn.Module) -> dict[str, int]:
    return {name: buffer.data_ptr() for name, buffer in made.named_buffers()}


def test_updates_keep_every_address_and_leave_what_a_new_layer_would_hold():
    for backend in PACKING:
        made, new = layer(backend), layer(backend, seed=1)
        before = addresses(made)
        made.load(randn(48, 64, seed=1))
        assert addresses(made) == before and len(before) >= 2
        for name, buffer in made.named_buffers():
            assert torch.equal(buffer, new.get_buffer(name)), name


def check_one_graph(made: RolloutLinear, backend: str, x: torch.Tensor) -> None:
    """fullgraph also means that no value is read back from the device."""
    counter = CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, dynamic=False, backend=counter)
    # Compiled GPU kernels round in other places, so that a few activations round to other codes.
    tolerance = {"rtol": 0.05, "atol": 0.5} if x.is_cuda else {"rtol": 0, "atol": 0}
    first = compiled(x)
    torch.testing.assert_close(first, made(x), **tolerance)
    for seed in (1, 2):
        made.load(randn(48, 64, seed=seed).to(x.device))
        now = compiled(x)
        torch.testing.assert_close(now, made(x), **tolerance)
        assert (now - first).abs().max() > 1
    assert counter.frame_count == 1


def test_updates_need_no_new_graph():
    with torch.autocast("cpu", torch.bfloat16):
        check_one_graph(layer(NVFP4Emulated()), "aot_eager", randn(2, 5, 64))


SHAPE = OUT, IN = 48, 64
BACKENDS = [NVFP4Emulated(), PerRow(NVFP4Emulated()), FP8Rowwise()]


@pytest.fixture
def linear():
    layer = nn.Linear(IN, OUT).requires_grad_(False)
    layer.weight.copy_(randn(OUT, IN, seed=1))
    layer.bias.copy_(randn(OUT, seed=2))
    return layer


def gradient(x):
    assert x.grad is not None
    return x.grad


def test_the_layer_multiplies_as_its_backend_does(linear):
    for backend in BACKENDS:
        for dtype in [torch.float32, torch.bfloat16]:
            layer = SamePrecisionLinear(linear.to(dtype), backend)
            x = randn(3, 5, IN).to(dtype)
            rows = backend.matmul(x.view(15, IN), backend.pack(linear.weight.float()), linear.bias)
            assert torch.equal(layer(x), rows.view(3, 5, OUT))
            assert not torch.equal(layer(x), linear(x))


def test_the_gradient_is_that_of_a_product_with_the_quantised_weight(linear):
    for backend in BACKENDS:
        layer, x, dy = SamePrecisionLinear(linear, backend), randn(7, IN), randn(7, OUT, seed=3)
        x.requires_grad_()
        layer(x).backward(dy)
        # As the backend multiplies: rows of the identity are exact in every format.
        product = backend.matmul(torch.eye(IN), backend.pack(linear.weight)).T
        expected = dy.double() @ product.double()
        torch.testing.assert_close(gradient(x).double(), expected, rtol=1e-5, atol=1e-5)
        exact_one = dy.double() @ linear.weight.double()
        assert (gradient(x).double() - exact_one).norm() > 0.01 * exact_one.norm()
        assert linear.weight.grad is None and linear.bias.grad is None
