import functools

import pytest
import torch
from small_sizes import TARGETS, small
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrl.planning.activations import MemoryCounter
from flowrl.planning.activations import (
    add_adapter,
    as_module,
    build,
    forward_peak,
    inputs,
    shapes_of,
    training_peak,
)

NAMES = ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]
# Each further family takes seconds.
ALL = pytest.mark.parametrize(
    "name", [NAMES[2], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[:2])]
)
BF16 = torch.bfloat16


@functools.cache
def training(name, *, rows=2, side=64, dtype=BF16, checkpointing=False, rank=4, **given):
    size = small(name)
    return training_peak(
        as_module(size.transformer, size.config),
        shapes_of(size, rows, side, side, None),
        dtype,
        rank=rank,
        targets=TARGETS[size.family],
        checkpointing=checkpointing,
        **given,
    )


@functools.cache
def forward(name, *, rows=2, whole=False):
    size = small(name)
    return forward_peak(
        as_module(size.transformer, size.config),
        shapes_of(size, rows, 64, 64, None),
        BF16,
        rank=4,
        targets=TARGETS[size.family],
        whole=whole,
    )


@ALL
def test_a_few_blocks_tell_the_peak_of_all_with_and_without_checkpoints_and_gradients(name):
    for checkpointing in (False, True):
        short = training(name, checkpointing=checkpointing)
        assert short == training(name, checkpointing=checkpointing, whole=True)
    assert forward(name) == forward(name, whole=True)
    assert forward(name) < training(name, checkpointing=True) < training(name)


def test_more_rows_bits_and_the_reference_take_more():
    name = "sana-1.6b"
    for checkpointing in (False, True):
        found = [training(name, rows=n, checkpointing=checkpointing) for n in (1, 2)]
        assert found == sorted(set(found))
    assert forward(name, rows=4) > 1.5 * forward(name)  # as with guidance
    assert training(name) < training(name, dtype=torch.float32)
    assert training(name, reference=True) >= training(name)


@ALL
def test_tensors_without_memory_are_counted_like_real_ones(name):
    """A forward and backward on the CPU, in fp32 and without fused kernels on both devices."""
    for checkpointing in (False, True):
        assert counted(name, "meta", checkpointing) == counted(name, "cpu", checkpointing)


def counted(name: str, device: str, checkpointing: bool) -> tuple[int, int]:
    size = small(name)
    network = build(as_module(size.transformer, size.config), torch.float32)
    add_adapter(network, 4, TARGETS[size.family])
    given = inputs(shapes_of(size, 2, 64, 64, None), torch.float32)
    if device != "meta":
        network.to_empty(device=device)
        for tensor in (*network.parameters(), *network.buffers()):
            torch.nn.init.normal_(tensor.data, std=0.02)
        given = {k: torch.ones(t.shape, dtype=t.dtype) for k, t in given.items()}
    if checkpointing:
        network.enable_gradient_checkpointing()  # type: ignore[operator]
    outside = [*network.parameters(), *network.buffers(), *given.values()]
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            outside.append(parameter.grad)
    with MemoryCounter(outside) as tracker, sdpa_kernel(SDPBackend.MATH):
        loss = network(**given, return_dict=False)[0].float().square().mean()
        held = tracker.live
        loss.backward()
    return held, tracker.peak
