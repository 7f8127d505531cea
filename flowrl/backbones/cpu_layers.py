"""Layers of a transformer on a CPU: a LoRA with its layer, and attention, as one step of autograd.

W x + s B (A x) costs the frozen matmul, two narrow ones and two passes over the output, and keeps
A x; its backward six matmuls. With W + s B A, made anew in every call, one matmul serves each of
forward and backward. It is also the weight that rollouts sample with: see `Policy.merged`.

Matmuls are oneDNN's on AMD's CPUs with AVX-512, which torch's own library, MKL, leaves unused
there. Both compute in fp32; they add in another order. Under autocast to bf16 the adapter stays
beside the frozen weight, which would round it away; attention is computed in fp32 there.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CPU_INFO = Path("/proc/cpuinfo")
# Elements of the attention weights that are made at a time: 1.6 MB, for a core's caches.
CHUNK = 400_000
# A head's weights are kept for the backward pass up to so many columns for each of its dimensions;
# made again they take half as long as a backward pass that keeps them, and no memory.
KEPT = 8


# --- Matmuls -------------------------------------------------------------------------------------


@functools.cache
def has_faster_matmul() -> bool:
    """Return whether oneDNN's matmul uses this CPU's AVX-512, and torch's own does not."""
    if not hasattr(_matmul_options(), "fp32_precision"):
        return False  # before torch 2.9
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    amd = CPU_INFO.is_file() and "AuthenticAMD" in CPU_INFO.read_text()
    return wide and amd and torch.backends.mkldnn.is_available() and _is_exact()


def _is_exact() -> bool:
    """Whether oneDNN computes in fp32 here, where it would also be allowed to round to bf16."""
    x = torch.arange(128.0 * 128).sin().view(128, 128)
    limit = 1e-5 * (x.abs() @ x.abs()).max()  # in bf16 an error is 100 times as large
    with _onednn():
        found = _products(x)
    pairs = zip(found, _products(x.double()), strict=True)
    return all(bool((ours - exact).abs().max() < limit) for ours, exact in pairs)


def _products(x: Tensor) -> list[Tensor]:
    """Multiply x (128, 128) with itself in each way that layers and attention do below."""
    heads = x.view(2, 64, 128)
    out = torch.empty_like(heads)
    torch.bmm(heads, x.expand(2, -1, -1), out=out)
    return [
        x @ x, x @ x.t(), x.t() @ x, F.linear(x, x, x[0]), torch.addmm(x, x, x.t()),
        out, heads @ heads.mT, heads.mT @ heads,
    ]  # fmt: skip


def _matmul_options() -> Any:
    return getattr(torch.backends.mkldnn, "matmul", None)


@dataclass
class _Allowed:
    """The blocks that oneDNN computes in, of all threads, and the option's value before them.

    The first to enter saves the value and the last to leave restores it, in whatever order threads
    come and go. Blocks are a set and not a number, so that an interrupted one is there or is not.
    """

    # Reentrant: the collector may end a block that was left by an error amid another's entry.
    lock: Any = field(default_factory=threading.RLock)
    blocks: set[object] = field(default_factory=set)
    before: str | None = None  # kept until it is restored, should that be interrupted

    def enter(self, block: object) -> None:
        with self.lock:
            first, options = not self.blocks, _matmul_options()
            if first:
                self.before = self.before or options.fp32_precision
            self.blocks.add(block)
            if first:
                options.fp32_precision = "bf16"

    def leave(self, block: object) -> None:
        with self.lock:
            if block in self.blocks:
                self.blocks.remove(block)
                if not self.blocks:
                    _matmul_options().fp32_precision, self.before = self.before, None


_ALLOWED = _Allowed()


@contextmanager
def _onednn() -> Iterator[None]:
    """Let oneDNN compute the matmuls of fp32 inside the block.

    torch asks oneDNN only where bf16 is allowed, for which this CPU has no faster way than fp32.
    The option is the process's: meanwhile oneDNN computes the matmuls of other threads, too, in
    fp32 as `_is_exact` finds, so that they are rounded otherwise but no less exact.
    """
    block = object()
    try:
        _ALLOWED.enter(block)
        yield
    finally:
        _ALLOWED.leave(block)


def fastest() -> AbstractContextManager[None]:
    """Let the fastest library compute the matmuls of fp32 inside the block."""
    return _onednn() if has_faster_matmul() else nullcontext()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W' + bias by the fastest library. x: (..., in); weight: (out, in)."""
    rows = x.reshape(-1, x.shape[-1])  # one matmul, where torch would make one for each image
    with fastest():
        return F.linear(rows, weight, bias).view(*x.shape[:-1], len(weight))


# --- Linear layers -------------------------------------------------------------------------------


class _Frozen(torch.autograd.Function):
    """A linear layer whose weight needs no gradient."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # without autocast, as forwards are called
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (weight,) = ctx.saved_tensors
        return linear(grads[0], weight.t()), None, None


class _Adapted(torch.autograd.Function):
    """A linear layer with a LoRA: x (W + s B A)' + bias.

    With g the output's gradient and D = g' x, the gradients are g (W + s B A) of x, s D A' of B
    and s B' D of A.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return linear(x, merged(weight, a, b, scale), bias)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # without autocast, as forwards are called
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        g, grad_x = grads[0].contiguous(), None
        if ctx.needs_input_grad[0]:  # the weight is made again: smaller than what it would keep
            grad_x = linear(g, merged(weight, a, b, ctx.scale).t())
        g, x = g.flatten(0, -2), x.flatten(0, -2)
        with fastest():
            if narrow_is_cheaper(weight, len(a)):
                grad_b, grad_a = g.t() @ (x @ a.t()), (g @ b).t() @ x
            else:
                product = g.t() @ x
                grad_b, grad_a = product @ a.t(), b.t() @ product
        return grad_x, None, None, grad_a * ctx.scale, grad_b * ctx.scale, None


class _Beside(torch.autograd.Function):
    """The same in bf16, with the LoRA beside the weight: x W' + bias + (x A') s B'.

    x, weight, bias: bf16; a, b: fp32, rounded here.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        rows, a, b = x.reshape(-1, x.shape[-1]), a.to(x.dtype), (b * scale).to(x.dtype)
        inner = rows @ a.t()
        ctx.save_for_backward(rows, weight, a, b, inner)
        ctx.scale = scale
        return F.linear(rows, weight, bias).addmm_(inner, b.t()).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # without autocast, as forwards are called
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, a, b, inner = ctx.saved_tensors
        g = grads[0].reshape(-1, len(weight))
        narrow, grad_x = g @ b, None
        if ctx.needs_input_grad[0]:
            grad_x = (g @ weight).addmm_(narrow, a).view(*grads[0].shape[:-1], -1)
        grad_a, grad_b = (narrow.t() @ rows).float(), (g.t() @ inner).float()
        return grad_x, None, None, grad_a, grad_b * ctx.scale, None


def narrow_is_cheaper(weight: Tensor, rank: int) -> bool:
    """Return whether a LoRA's gradients cost less from its two factors than from that of W."""
    out, into = weight.shape
    return 2 * rank * (out + into) < out * into


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + s B A. weight: (out, in); a: (r, in); b: (out, r)"""
    return weight + (b @ a) * scale


def _frozen_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    dtype = _computes_in(x, layer.weight) if _is_frozen(layer) else None
    if dtype is None:
        return nn.Linear.forward(layer, x)
    with torch.autocast("cpu", enabled=False):
        return _Frozen.apply(*_cast(dtype, x, layer.weight, layer.bias))  # type: ignore[no-any-return]


def _adapted_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    base = layer.get_base_layer()
    factors = _only_factors(layer) if _is_frozen(base) and not (args or kwargs) else None
    dtype = None if factors is None else _computes_in(x, base.weight)
    if factors is None or dtype is None:
        return type(layer).forward(layer, x, *args, **kwargs)
    function = _Beside if dtype == torch.bfloat16 else _Adapted
    with torch.autocast("cpu", enabled=False):
        return function.apply(*_cast(dtype, x, base.weight, base.bias), *factors)  # type: ignore[no-any-return]


def _is_frozen(layer: nn.Linear) -> bool:
    """Whether neither weight nor bias wants a gradient, as none is computed here."""
    return not (layer.weight.requires_grad or layer.bias is not None and layer.bias.requires_grad)


def _cast(dtype: torch.dtype, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _only_factors(layer: Any) -> tuple[Tensor, Tensor, float] | None:
    """Return A, B and the strength of the one adapter in use, None where it is not that simple."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    (name,) = layer.active_adapters
    if name not in layer.lora_A or name in layer.lora_variant:
        return None
    if not isinstance(layer.lora_dropout[name], nn.Identity) or layer.fan_in_fan_out:
        return None
    a, b = layer.lora_A[name], layer.lora_B[name]
    return None if b.bias is not None else (a.weight, b.weight, layer.scaling[name])


def _computes_in(x: Tensor, weight: Tensor | None = None) -> torch.dtype | None:
    """Return fp32, or fp64 as in tests, or autocast's bf16; None where these layers do not compute.

    They do on a CPU, with plain tensors. weight: None where the layer has none of its own.
    """
    plain = x.device.type == "cpu" and (weight is None or type(weight) is nn.Parameter)
    if not plain or torch.compiler.is_compiling():
        return None
    if torch.is_autocast_enabled("cpu"):
        asked = torch.get_autocast_dtype("cpu")
        return asked if asked == torch.bfloat16 and x.dtype != torch.float64 else None
    same = weight is None or x.dtype == weight.dtype
    return x.dtype if same and x.dtype in (torch.float32, torch.float64) else None


# --- Attention -----------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    """softmax(q k' / sqrt(d)) v, some heads at a time, so that their weights stay in a cache.

    torch's own kernel for CPUs works on 32 rows at a time, in matmuls too small to be fast.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape, keep = q.shape, k.shape[-2] <= KEPT * k.shape[-1]
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        out, kept = torch.empty_like(q), []
        with fastest():
            for part in _parts(q, k):
                p = _weights(q[part], k[part])
                torch.bmm(p, v[part], out=out[part])
                if keep and any(ctx.needs_input_grad):
                    kept.append(p)
        ctx.save_for_backward(q, k, v, *kept)
        return out.view(shape)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # without autocast, as forwards are called
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *kept = ctx.saved_tensors
        (g,) = grads
        heads, scale = g.shape[:2], q.shape[-1] ** -0.5
        g = g.flatten(0, 1)
        found = tuple(torch.empty_like(t) for t in (q, k, v))
        with fastest():
            for number, part in enumerate(_parts(q, k)):
                p = kept[number] if kept else _weights(q[part], k[part])
                # Products whose right side is transposed are the faster ones.
                found[2][part] = (g[part].mT @ p).mT
                d = torch._softmax_backward_data(g[part] @ v[part].mT, p, -1, p.dtype)
                torch.mul(d @ k[part], scale, out=found[0][part])
                found[1][part] = ((q[part] * scale).mT @ d).mT
        return tuple(t.unflatten(0, heads) for t in found)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    p = (q * q.shape[-1] ** -0.5) @ k.mT
    return torch.softmax(p, -1, out=p)


def _parts(q: Tensor, k: Tensor) -> list[slice]:
    """Return slices of the heads; q, k: (heads, tokens, d)."""
    size = max(1, CHUNK // (q.shape[1] * k.shape[1]))
    return [slice(start, start + size) for start in range(0, len(q), size)]


class JointAttention:
    """What diffusers' `JointAttnProcessor2_0` computes, for SD3.

    The last block drops its text, whose rows but one are not computed there: None stands for them.
    """

    def __init__(self, own: Any):
        self.own = own

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        x, text = hidden_states, encoder_hidden_states
        if attention_mask is not None or _computes_in(x) is None:
            return self.own(attn, x, text, attention_mask, *args, **kwargs)
        q, k, v = (_heads(layer(x), attn) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
        kept = text is not None and not attn.context_pre_only
        if text is not None:
            k = torch.cat([k, _normed(attn.norm_added_k, _heads(attn.add_k_proj(text), attn))], 2)
            v = torch.cat([v, _heads(attn.add_v_proj(text), attn)], 2)
            # One row where they are dropped, so that the layer has its gradient, of 0.
            asked = text if kept else text[:, :1]
            q = torch.cat([q, _normed(attn.norm_added_q, _heads(attn.add_q_proj(asked), attn))], 2)
        out = _attention(q, k, v).transpose(1, 2).flatten(2)  # (B, tokens, heads * d)
        image, rest = out.split([x.shape[1], out.shape[1] - x.shape[1]], 1)
        image = attn.to_out[1](attn.to_out[0](image))
        if text is None:
            return image
        return image, attn.to_add_out(rest) if kept else None


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute in fp32 at least; q, k, v and the result: (B, heads, tokens, d)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        found = _Attention.apply(*(t.to(dtype).contiguous() for t in (q, k, v)))
        return found.to(v.dtype)  # type: ignore[union-attr]


def _heads(x: Tensor, attn: Any) -> Tensor:
    """(B, tokens, heads * d) -> (B, heads, tokens, d)"""
    return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


# --- Putting them into a network -----------------------------------------------------------------


def fuse_layers(network: nn.Module) -> None:
    """Let the layers of a network compute as above, wherever they can."""
    from diffusers.models.attention_processor import JointAttnProcessor2_0
    from peft.tuners.lora import Linear

    for module in network.modules():
        own = module.__dict__
        if type(module) is Linear and type(module.get_base_layer()) is nn.Linear:
            own["forward"] = functools.partial(_adapted_forward, module)
        elif type(module) is nn.Linear and has_faster_matmul():
            own["forward"] = functools.partial(_frozen_forward, module)
        processor: Any = getattr(module, "processor", None)
        if type(processor) is JointAttnProcessor2_0 and has_faster_matmul():
            own["processor"] = JointAttention(processor)


def restore_layers(network: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Compute as torch, diffusers and PEFT do again; return what was put in: (module, name, it)."""
    found: list[tuple[nn.Module, str, Any]] = []
    for module in network.modules():
        own = module.__dict__
        if getattr(own.get("forward"), "func", None) in (_adapted_forward, _frozen_forward):
            found.append((module, "forward", own.pop("forward")))
        if isinstance(own.get("processor"), JointAttention):
            found.append((module, "processor", own["processor"]))
            own["processor"] = own["processor"].own
    return found


@contextmanager
def ordinary_layers(network: nn.Module) -> Iterator[None]:
    """Compute as torch, diffusers and PEFT do inside the block."""
    kept = restore_layers(network)
    try:
        yield
    finally:
        for module, name, value in kept:
            module.__dict__[name] = value
