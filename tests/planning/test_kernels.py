"""What is said to happen on a GPU, against torch's own autocast on tensors that pretend to be."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from small_sizes import TARGETS, small
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flowrl.planning.activations import (
    CUDAEmulation,
    Forward,
    MemoryCounter,
    add_adapter,
    fused_attention,
    transformer_inputs,
)
from flowrl.planning.model_specs import build_network

BF16 = torch.bfloat16


@contextmanager
def cudas_autocast() -> Iterator[None]:
    """`torch.autocast("cuda")`, which switches itself off where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


def pretend(network: nn.Module) -> None:
    for module in network.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    learns = tensor.requires_grad
                    tensors[name] = (
                        nn.Parameter(fake, learns) if tensors is not module._buffers else fake
                    )


class KernelsAlone(CUDAEmulation):
    """Replacements come before torch's own autocast, so that what they take is cast here."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dtype = CAST.get(getattr(func, "__name__", ""))
        if dtype is not None:
            args, kwargs = self._cast((args, kwargs), dtype)
        return super().__torch_function__(func, types, args, kwargs)


CAST = {"rms_norm": torch.float32, "scaled_dot_product_attention": BF16}


def forward_bytes(name: str, *, fake: bool) -> tuple[int, int]:
    """(most, at the end) of a forward with a graph."""
    size = small(name)
    network = build_network(size.transformer, size.config, BF16)
    add_adapter(network, 4, TARGETS[size.family])
    forward = Forward(
        spec=size, rows=2, height=64, width=64, text_tokens=None, dtype=BF16, rank=4,
        targets=TARGETS[size.family],
    )  # fmt: skip
    given = transformer_inputs(forward)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        if fake:
            pretend(network)
            given = {
                k: torch.empty(t.shape, dtype=t.dtype, device="cuda") for k, t in given.items()
            }
        tracker = MemoryCounter([*network.parameters(), *network.buffers(), *given.values()])
        mode = KernelsAlone(None) if fake else CUDAEmulation(BF16)
        with tracker, mode, cudas_autocast() if fake else nullcontext():
            v = network(**given, return_dict=False)[0].float()
        mode.forget()
        assert v.shape[0] == 2
        return tracker.peak, tracker.live


def test_a_forward_takes_what_it_takes_under_torchs_autocast():
    for name in ["sd3.5-medium", "flux.1-dev", "sana-1.6b"]:
        assert forward_bytes(name, fake=False) == forward_bytes(name, fake=True)


def test_results_have_the_dtype_that_autocast_gives():
    for call in [
        lambda x: F.linear(x, x),
        lambda x: x @ x,
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.rms_norm(x, (8,)),
        lambda x: x.softmax(-1),
        lambda x: x.pow(2),
        lambda x: torch.rsqrt(x),
        lambda x: x.sum(),
        lambda x: F.gelu(x),
        lambda x: x.mean(),
        lambda x: F.interpolate(x[None, None], scale_factor=2.0),
        lambda x: F.group_norm(x[None, :, None], 2),
        lambda x: F.conv2d(x[None, None], x[None, None]),
    ]:
        for dtype in [BF16, torch.float32]:
            with CUDAEmulation(BF16):
                ours = call(torch.empty(8, 8, dtype=dtype, device="meta"))
            with FakeTensorMode(), cudas_autocast():
                theirs = call(torch.empty(8, 8, dtype=dtype, device="cuda"))
            assert ours.dtype == theirs.dtype


def test_attention_never_holds_a_quadratic_matrix():
    for mask in [None, torch.bool]:
        q = torch.empty(1, 2, 4096, 64, dtype=BF16, device="meta", requires_grad=True)
        given = None if mask is None else torch.empty(1, 2, 1, 4096, dtype=mask, device="meta")
        with MemoryCounter([q]) as count:
            torch.autograd.backward(fused_attention(q, q, q, given).sum())
        assert count.peak < 2 * 4096 * 4096  # bytes of one such matrix in 8 bits


def test_a_weight_is_cast_once():
    weight = nn.Parameter(torch.empty(64, 64, device="meta"))
    x = torch.empty(1, 64, dtype=BF16, device="meta")
    mode = CUDAEmulation(BF16)
    with MemoryCounter([x, weight], block=1) as count, mode:
        held = [F.linear(x, weight), F.linear(x, weight)]
    assert len(held) == 2
    assert count.live == 64 * 64 * 2 + 2 * 64 * 2
    del held
    mode.forget()
    assert count.live == 0
