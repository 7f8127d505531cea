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


def layer(backend: Backend, seed: int = 0) -> RolloutLinear:
    return RolloutLinear(randn(48, 64, seed=seed), randn(48, seed=99), backend)


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


def test_updates_keep_every_address_and_leave_what_a_new_layer_would_hold():
    for backend in [*RUNNING, NVFP4Native()]:
        made, new = layer(backend), layer(backend, seed=1)
        before = {name: buffer.data_ptr() for name, buffer in made.named_buffers()}
        made.load(randn(48, 64, seed=1))
        assert len(before) >= 2
        for name, buffer in made.named_buffers():
            assert buffer.data_ptr() == before[name], name
            assert torch.equal(buffer, new.get_buffer(name)), name


@torch.autocast("cpu", torch.bfloat16)
def test_updates_need_no_new_graph():
    """fullgraph also means that no value is read back from the device."""
    made, x = layer(NVFP4Emulated()), randn(2, 5, 64)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, dynamic=False, backend=counter)
    first = compiled(x)
    assert torch.equal(first, made(x))
    for seed in (1, 2):
        made.load(randn(48, 64, seed=seed))
        now = compiled(x)
        assert torch.equal(now, made(x))
        assert (now - first).abs().max() > 1
    assert counter.frame_count == 1


SHAPE = OUT, IN = 48, 64
BACKENDS = [NVFP4Emulated(), PerRow(NVFP4Emulated()), FP8Rowwise()]


@pytest.fixture
def linear():
    layer = nn.Linear(IN, OUT).requires_grad_(False)
    layer.weight.copy_(randn(OUT, IN, seed=1))
    layer.bias.copy_(randn(OUT, seed=2))
    return layer


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
        torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-5)
        exact_one = dy.double() @ linear.weight.double()
        assert (x.grad.double() - exact_one).norm() > 0.01 * exact_one.norm()
        assert linear.weight.grad is None and linear.bias.grad is None


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def gradient(linear, backend, dy, quantize):
    x = randn(*dy.shape[:-1], IN).to(dy.dtype).requires_grad_()
    SamePrecisionLinear(linear, backend, quantize)(x).backward(dy)
    return x.grad


@pytest.mark.parametrize(
    ("backend", "least"), [(FP8Rowwise(), 0.999), (PerRow(NVFP4Emulated()), 0.99)]
)
def test_rounded_gradients_point_where_the_exact_ones_do(linear, backend, least):
    dy = randn(3, 50, OUT, seed=3) * torch.logspace(-6, 2, 50)[:, None]  # rows of all sizes
    dy[1, 7] = 0
    exact, rounded = (gradient(linear, backend, dy, quantize) for quantize in (False, True))
    rows = [cosine(a, b) for a, b in zip(exact.flatten(0, 1), rounded.flatten(0, 1), strict=True)]
    assert least < cosine(exact, rounded) < 1 - 1e-6 and min(rows[:57] + rows[58:]) > least - 0.02
    assert rounded[1, 7].abs().max() == 0
    # A row alone is rounded as in a batch; the weight is that of the forward pass.
    alone = gradient(linear, backend, dy[2, 9:10], True)
    torch.testing.assert_close(alone, rounded[2, 9:10], rtol=1e-5, atol=1e-9)
    weight = backend.unpack(backend.pack(linear.weight)).double()
    expected = backend.round(dy.flatten(0, 1)).double() @ weight
    torch.testing.assert_close(rounded.flatten(0, 1).double(), expected, rtol=1e-4, atol=1e-4)


class Identity(FP8Rowwise):
    def round(self, x):
        return x.float()


def test_gradients_that_nothing_rounds_are_equal_bit_for_bit(linear):
    for dtype in (torch.float32, torch.bfloat16):
        dy, layer = randn(7, OUT, seed=3).to(dtype), linear.to(dtype)
        exact, same = (gradient(layer, Identity(), dy, quantize) for quantize in (False, True))
        assert torch.equal(exact, same)
        assert not torch.equal(exact, gradient(layer, FP8Rowwise(), dy, True))
