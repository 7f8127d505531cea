"""Operations on the meta device as a GPU computes them: fused kernels, and autocast's casts.

The meta device has neither: attention and norms fall apart into many operations there, and
autocast does not know it. What is cast is what ATen/autocast_mode.h lists.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flowrl.planning.tracking import During

# Of the lists, what transformers and autoencoders use.
LOWER = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "conv1d", "conv2d",
    "conv3d", "conv_transpose2d", "scaled_dot_product_attention",
}  # fmt: skip
FP32 = {
    "layer_norm", "group_norm", "rms_norm", "pow", "exp", "log", "rsqrt", "reciprocal", "softplus",
    "interpolate", "mse_loss", "logsumexp", "cosine_similarity",
}  # fmt: skip
FP32_RESULT = {"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"}
FLASH_HEAD = 256  # the widest head that FlashAttention takes; wider ones go to efficient attention


class AsOnGPU(TorchFunctionMode):
    """lower: autocast's dtype, or None without autocast."""

    def __init__(self, lower: torch.dtype | None):
        super().__init__()
        self.lower = lower
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        """As autocast does at its end, of weights that it has cast."""
        self._casts.clear()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.lower is not None:
            args, kwargs = self._autocast(name, args, kwargs)
        if name == "scaled_dot_product_attention":
            return fused_attention(*args, **kwargs)
        if name == "rms_norm" and isinstance(args[0], Tensor):
            return _FusedRMSNorm.apply(*args[:1], *_weight_of(args, kwargs))
        return func(*args, **kwargs)

    def _autocast(self, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if name in LOWER:
            return self._cast(args, kwargs, self.lower)
        if name in FP32:
            return self._cast(args, kwargs, torch.float32)
        if name in FP32_RESULT and kwargs.get("dtype") is None and _is_half(args[0]):
            return args, kwargs | {"dtype": torch.float32}
        return args, kwargs

    def _cast(self, args: tuple, kwargs: dict, dtype: Any) -> tuple[tuple, dict]:
        def one(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(one(v) for v in value)
            return self._to(value, dtype) if isinstance(value, Tensor) else value

        return tuple(one(v) for v in args), {k: one(v) for k, v in kwargs.items()}

    def _to(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        weight = tensor.requires_grad and tensor.is_leaf and dtype == self.lower
        if not weight:
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return self._casts[id(tensor)][1]


def fused_attention(
    q: Tensor = None,  # type: ignore[assignment]
    k: Tensor = None,  # type: ignore[assignment]
    v: Tensor = None,  # type: ignore[assignment]
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **given: Any,
) -> Tensor:
    """Scaled dot-product attention (B, heads, L, d) by the kernel that a GPU would take for it.

    FlashAttention, or with a mask, in fp32 or for wide heads memory-efficient attention: neither
    keeps an (L, L) matrix, and cuDNN's, which newer GPUs prefer, does not either.
    """
    q, k, v = (given.get(n, t) for n, t in (("query", q), ("key", k), ("value", v)))
    if k.shape[1] != q.shape[1]:  # grouped queries, whose keys and values the kernels repeat
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    ops = torch.ops.aten
    if attn_mask is None and _is_half(q) and q.shape[-1] <= FLASH_HEAD:
        flash: Any = ops._scaled_dot_product_flash_attention
        return flash(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask if attn_mask.is_floating_point() else attn_mask.to(q.dtype)
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    keep = any(t.requires_grad for t in (q, k, v)) and torch.is_grad_enabled()
    efficient: Any = ops._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, keep, dropout_p, is_causal, scale=scale)[0]


class _FusedRMSNorm(torch.autograd.Function):
    """The shapes of torch's own kernel: one result, and one fp32 number a row for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        rows = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, rows, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _weight_of(args: tuple, kwargs: dict) -> tuple[Tensor | None]:
    return (kwargs.get("weight", args[2] if len(args) > 2 else None),)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _fp32_queries(args: tuple, out: Any) -> int:
    """Backward of attention in 16 bits sums the queries' gradient in fp32 (dq_accum)."""
    return args[1].numel() * 4 if _is_half(args[1]) else 0


def _channels_last(args: tuple, out: Any) -> int:
    """cuDNN's 16-bit kernels are channels-last and turn what they read and write over: assumed."""
    x = args[0]
    if not _is_half(x) or x.is_contiguous(memory_format=torch.channels_last) or x.ndim != 4:
        return 0
    return (x.numel() + out.numel()) * x.element_size()


def kernels_own() -> dict[Any, During]:
    """By operation, what its kernel holds beside inputs and results."""
    ops = torch.ops.aten
    return {
        ops._scaled_dot_product_flash_attention_backward.default: _fp32_queries,
        ops._scaled_dot_product_efficient_attention_backward.default: _fp32_queries,
        ops.convolution.default: _channels_last,
    }
