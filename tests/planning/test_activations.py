import pytest
import torch
from small_sizes import TARGETS, small
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrl.planning.activations import (
    LiveBytes,
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
ALL = [NAMES[2], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[:2])]
BF16 = torch.bfloat16


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


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_few_blocks_tell_the_peak_of_all(name, checkpointing):
    short = training(name, checkpointing=checkpointing)
    assert short == training(name, checkpointing=checkpointing, whole=True)


@pytest.mark.parametrize("name", ALL)
def test_so_they_do_without_gradients(name):
    assert forward(name) == forward(name, whole=True)


@pytest.mark.parametrize("name", ALL)
def test_checkpointing_takes_less_and_no_gradients_take_least(name):
    assert forward(name) < training(name, checkpointing=True) < training(name)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_more_rows_take_more(checkpointing):
    found = [training("sana-1.6b", rows=n, checkpointing=checkpointing) for n in (1, 2, 4)]
    assert found == sorted(set(found))


def test_guidance_takes_what_twice_the_pictures_take():
    assert forward("sd3.5-medium", rows=4) > 1.5 * forward("sd3.5-medium", rows=2)


def test_16_bits_take_less_than_32():
    assert training("flux.1-dev") < training("flux.1-dev", dtype=torch.float32)


def test_asking_the_reference_meanwhile_never_takes_less():
    assert training("sana-1.6b", reference=True) >= training("sana-1.6b")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tensors_without_memory_are_counted_like_real_ones(name, checkpointing):
    """A forward and backward on the CPU, in fp32 and without fused kernels on both devices."""
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
    with LiveBytes(outside) as tracker, sdpa_kernel(SDPBackend.MATH):
        loss = network(**given, return_dict=False)[0].float().square().mean()
        held = tracker.live
        loss.backward()
    return held, tracker.peak
