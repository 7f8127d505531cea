"""Peak memory of forwards and backwards beside the weights, counted without a GPU.

The real network with a real adapter runs on the meta device, whose tensors have no memory, and
`MemoryCounter` adds up the bytes of those that are alive. `CUDAEmulation` replaces what differs on
a GPU: autocast and fused kernels.

torch's own `MemTracker` is not used: it cannot track frozen parameters; on fake CUDA tensors no
backward runs without a GPU, and attention is counted with its (L, L) matrix; on fake CPU tensors it
is 13 to 25 % below these counts, ten times as slow, and has no peak within a block (torch 2.15).
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from flowrl.backbones.loading import enable_vae_tiling
from flowrl.planning.model_specs import (
    CLIP_TOKENS,
    ModelSpec,
    TextEncoder,
    build_network,
    keep_fp32,
)
from flowrl.utils.imports import without_garbage_collection

# sample: a forward without gradients. train: a forward and a backward. train_with_reference: the
# same with a forward of the reference in between.
Mode = Literal["sample", "train", "train_with_reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of a transformer with a LoRA: all that its memory depends on."""

    spec: ModelSpec
    rows: int  # images, twice as many with guidance
    height: int  # pixels
    width: int
    text_tokens: int | None  # None for the spec's own
    dtype: torch.dtype
    rank: int
    targets: tuple[str, ...]


@lru_cache(maxsize=256)
def transformer_peak(
    forward: Forward, mode: Mode, *, checkpointing: bool = False, count_all: bool = False
) -> int:
    """Return the most bytes of activations at once.

    Peaks within a block are affine in the number of blocks of each kind, so networks of a few
    blocks tell those of any depth. count_all: count all blocks instead.
    """

    # Networks do the same for any number of rows but one, whose copies need not be made.
    many = replace(forward, rows=ROWS if forward.rows > 1 else 1)

    def peaks(depths: Mapping[str, int]) -> Mapping[Any, int]:
        recording = _recording(many, tuple(depths.items()), mode, checkpointing)
        return recording.peaks({ROWS: forward.rows})

    full = block_counts(forward.spec.config)
    short = {kind: min(n, SHORT) for kind, n in full.items()}
    if count_all or short == full:
        return max(peaks(full).values())
    base = peaks(short)
    found = dict(base)
    for kind, n in full.items():
        if n > short[kind]:
            longer = peaks(short | {kind: short[kind] + 1})
            for region in base:
                found[region] += (n - short[kind]) * (longer[region] - base[region])
    return max(found.values())


@lru_cache(maxsize=64)
def _recording(
    forward: Forward, counts: tuple[tuple[str, int], ...], mode: Mode, checkpointing: bool
) -> "Recording":
    key = forward.dtype, forward.rank, forward.targets
    network = _adapted_network(forward.spec, counts, *key)
    with _checkpointing(network, forward.dtype) if checkpointing else nullcontext():
        return _record(network, forward, mode)


@lru_cache(maxsize=64)
def decode_peak(
    spec: ModelSpec,
    rows: int,
    height: int,
    width: int,
    dtype: torch.dtype,
    *,
    tiling: bool = False,
) -> int:
    """Return the most bytes while so many latents are decoded to fp32 images, under autocast."""
    network: Any = build_network(spec.autoencoder, spec.autoencoder_config, dtype)
    network.encoder = nn.Identity()
    if tiling:
        enable_vae_tiling(network)
    shape = rows, spec.channels, height // spec.factor, width // spec.factor
    z = torch.empty(shape, dtype=dtype, device="meta")
    with _counter(network, z) as counter, autocast(dtype), torch.no_grad():
        images = network.decode(z / 1.0, return_dict=False)[0]
        (images * 0.5 + 0.5).clamp(0, 1).float()
    return counter.peak


# Gemma reads SANA's instruction before the prompt; its tokens, counted by words and rounded up.
INSTRUCTION_TOKENS = 256


def encode_peak(spec: ModelSpec, rows: int, text_tokens: int | None, dtype: torch.dtype) -> int:
    """Return the most bytes while any of the text encoders encodes `rows` texts; 0 without any."""
    longest = spec.text_tokens if text_tokens is None else text_tokens
    longest += {"sd3": -CLIP_TOKENS, "sana": INSTRUCTION_TOKENS}.get(spec.family, 0)
    found = [0]
    for encoder in spec.text_encoders:
        is_clip = encoder.config.get("max_position_embeddings") == CLIP_TOKENS
        found.append(_encoder_peak(encoder, rows, CLIP_TOKENS if is_clip else longest, dtype))
    return max(found)


@lru_cache(maxsize=64)
def _encoder_peak(encoder: TextEncoder, rows: int, tokens: int, dtype: torch.dtype) -> int:
    # One layer is enough: without gradients nothing of the earlier ones is kept.
    depths: dict[str, Any] = {
        k: 1 for k in ("num_layers", "num_hidden_layers") if k in encoder.config
    }
    if "layer_types" in encoder.config:  # one for each layer
        depths["layer_types"] = encoder.config["layer_types"][:1]
    network = encoder.build(dtype, **depths)
    if dtype == torch.float16:
        keep_fp32(network)
    ids = torch.empty(rows, tokens, dtype=torch.long, device="meta")
    # `TextCache` switches autocast off.
    with _counter(network, ids) as counter, autocast(torch.float32), torch.no_grad():
        network(input_ids=ids)
    return counter.peak


# --- a network, its adapter and its inputs ------------------------------------------------------

SHORT = 3  # blocks of each kind that are counted: the first and the last may be special


def block_counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the blocks of each kind; "dual" are SD3.5-Medium's with a second attention."""
    found = {key: config[key] for key in ("num_layers", "num_single_layers") if key in config}
    if dual := len(config.get("dual_attention_layers") or ()):
        found = {"dual": dual, "num_layers": found["num_layers"] - dual}
    return found


def with_block_counts(config: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Return a configuration with other numbers of blocks."""
    changed: dict[str, Any] = {**config, **counts}
    dual = changed.pop("dual", 0)
    changed["num_layers"] += dual
    if "dual_attention_layers" in config:
        changed["dual_attention_layers"] = list(range(dual))
    return changed


@lru_cache(maxsize=32)
def _adapted_network(
    spec: ModelSpec,
    counts: tuple[tuple[str, int], ...],
    dtype: torch.dtype,
    rank: int,
    targets: tuple[str, ...],
) -> nn.Module:
    config = with_block_counts(spec.config, dict(counts))
    network = build_network(spec.transformer, config, dtype)
    add_adapter(network, rank, targets)
    return network


def add_adapter(network: nn.Module, rank: int, targets: tuple[str, ...]) -> list[nn.Parameter]:
    """Add PEFT's LoRA in fp32; return its parameters, with gradients as after a first backward."""
    from peft import LoraConfig

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets))
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network.add_adapter(config)  # type: ignore[operator]
    found = [p for name, p in network.named_parameters() if "lora_" in name]
    for parameter in found:
        parameter.data = parameter.data.float()
        parameter.grad = torch.empty_like(parameter)
    return found


def transformer_inputs(f: Forward) -> dict[str, Tensor]:
    """Return meta tensors like those the family's backbone passes to its transformer."""
    spec, family = f.spec, f.spec.family
    h, w = f.height // spec.factor, f.width // spec.factor
    text = spec.text_tokens if f.text_tokens is None else f.text_tokens

    def on_meta(*shape: int, dtype: torch.dtype = f.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    found = {
        "hidden_states": on_meta(f.rows, spec.channels, h, w),
        "timestep": on_meta(f.rows, dtype=torch.float32),
        "encoder_hidden_states": on_meta(f.rows, text, spec.text_width),
    }
    if spec.pooled_width is not None:
        found["pooled_projections"] = on_meta(f.rows, spec.pooled_width)
    if family == "sana":
        found["encoder_attention_mask"] = on_meta(f.rows, text, dtype=torch.long)
    if family == "flux":
        tokens = h // 2 * (w // 2)
        found["hidden_states"] = on_meta(f.rows, tokens, 4 * spec.channels)
        found["timestep"] = on_meta(f.rows)
        found["txt_ids"] = on_meta(text, 3)
        found["img_ids"] = on_meta(tokens, 3)
        if spec.config.get("guidance_embeds"):
            found["guidance"] = on_meta(f.rows, dtype=torch.float32)
    return found


# --- counting -----------------------------------------------------------------------------------


# Rows of a recorded forward, a prime: what its bytes can be divided by has a part for each row,
# since no width and no number of tokens is a multiple of it.
ROWS = 65_537


def _record(network: nn.Module, forward: Forward, mode: Mode) -> "Recording":
    """Return what comes and goes in each region, see `_regions`."""
    inputs, cast = transformer_inputs(forward), autocast(forward.dtype)
    counter = _counter(network, *inputs.values())
    # Checkpointing leaves cycles behind. When they go depends on everything else that Python does;
    # so the count is the same every time, and the most that it can be.
    with without_garbage_collection(), _regions(network, counter) as begin, counter, cast:
        begin("forward")
        with torch.set_grad_enabled(mode != "sample"):
            v = network(**inputs, return_dict=False)[0].float()
        if mode == "train_with_reference":
            begin("reference")
            with torch.no_grad():
                reference = network(**inputs, return_dict=False)[0].float()
            v = v - reference
        if mode != "sample":
            loss = v.square().mean()
            cast.forget()
            begin("backward")
            torch.autograd.backward(loss)
    return counter.recording()


def _counter(network: nn.Module, *inputs: Tensor) -> "MemoryCounter":
    parameters = list(network.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    return MemoryCounter([*parameters, *network.buffers(), *grads, *inputs], kernels=KERNELS)


@contextmanager
def _regions(network: nn.Module, counter: "MemoryCounter") -> Iterator[Callable[[str], None]]:
    """Count peaks apart by (phase, list of blocks, place in it); yield what begins a phase."""
    phase = ""

    def begin(name: str) -> None:
        nonlocal phase
        phase = name
        counter.enter((phase,))

    def watch(block: nn.Module, place: tuple) -> list[Any]:
        def enter(*_: Any) -> None:
            counter.enter((phase, *place))

        def enter_in_backward(module: nn.Module, args: Any, out: Any) -> None:
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(enter)

        after = block.register_forward_hook(enter_in_backward)
        return [block.register_forward_pre_hook(enter), after]

    lists = [(n, list(m)) for n, m in network.named_children() if isinstance(m, nn.ModuleList)]
    places = [
        (block, (n, *place)) for n, m in lists for block, place in zip(m, _places(m), strict=True)
    ]
    hooks = [hook for block, place in places for hook in watch(block, place)]
    try:
        yield begin
    finally:
        for hook in hooks:
            hook.remove()


def _places(blocks: list[nn.Module]) -> list[tuple[int, int]]:
    """Return for each block (number of its run of equal ones, 1 or 2 from the end of the run)."""
    kinds = [sorted((n, tuple(p.shape)) for n, p in b.named_parameters()) for b in blocks]
    runs: list[int] = []
    for i, kind in enumerate(kinds):
        runs.append(0 if i == 0 else runs[-1] + (kind != kinds[i - 1]))
    return [(run, min(runs[i:].count(run), 2)) for i, run in enumerate(runs)]


@contextmanager
def _checkpointing(network: Any, dtype: torch.dtype) -> Iterator[None]:
    """Checkpoint as diffusers does; blocks that run again do so under autocast, too."""

    def run(block: nn.Module, *args: Any) -> Any:
        return checkpoint(
            block.__call__, *args, use_reentrant=False,
            context_fn=lambda: (nullcontext(), autocast(dtype)),
        )  # fmt: skip

    network.enable_gradient_checkpointing(run)
    try:
        yield
    finally:
        network.disable_gradient_checkpointing()


BLOCK = 512  # bytes; torch's CUDA allocator hands out multiples (kMinBlockSize)

# (arguments of an operation, its result) -> bytes that its kernel needs meanwhile
KernelMemory = Callable[[tuple[Any, ...], Any], int]


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of every storage that operations make, until nothing holds it any more.

    Args:
        outside: tensors whose storages do not count, such as parameters.
        block: sizes are rounded up to its multiples.
        kernels: memory that operations need for themselves.
    """

    def __init__(
        self,
        outside: Iterable[Tensor] = (),
        *,
        block: int = BLOCK,
        kernels: Mapping[Any, KernelMemory] | None = None,
    ):
        super().__init__()
        self.block, self.kernels = block, kernels or {}
        self.live = 0  # bytes alive now
        self._regions: list[Any] = [None]
        self._moves: list[tuple[int, int, int]] = []  # see Recording
        self._outside = [tensor.untyped_storage() for tensor in outside]
        self._known: dict[int, Any] = {id(storage): None for storage in self._outside}

    @property
    def peaks(self) -> dict[Any, int]:
        """Return the most bytes in each region that was entered."""
        return self.recording().peaks({})

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    def recording(self) -> "Recording":
        return Recording(
            moves=np.array(self._moves, dtype=np.int64).reshape(-1, 3),
            regions=tuple(self._regions),
            block=self.block,
        )

    def enter(self, region: Any) -> None:
        """Count what is alive from now on for this region."""
        self._regions.append(region)
        self._move(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = computed(func, args, kwargs or {})
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        if func in self.kernels:
            self._move(0, self.kernels[func](args, out))
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # torch keeps one Python object a storage for as long as it lives
        if key in self._known:
            return
        size = storage.nbytes()

        def release(_: Any) -> None:
            self._move(-size)
            del self._known[key]

        self._known[key] = weakref.ref(storage, release)
        self._move(size)

    def _move(self, size: int, kernel: int = 0) -> None:
        whole = -(-abs(size) // self.block) * self.block
        self.live += whole if size >= 0 else -whole
        self._moves.append((len(self._regions) - 1, size, kernel))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """What came and went, in order, of which the peaks for other sizes are computed."""

    moves: np.ndarray  # (N, 3): place in `regions`, bytes that come or go, bytes of a kernel
    regions: tuple[Any, ...]  # as they were entered, the same ones also more than once
    block: int

    def peaks(self, sizes: Mapping[int, int]) -> dict[Any, int]:
        """Return the most bytes in each region.

        sizes: bytes that can be divided by a key are taken times its value by the key.
        """
        place, size, kernel = self.moves.T
        for prime, value in sizes.items():
            size, kernel = (np.where(n % prime == 0, n // prime * value, n) for n in (size, kernel))
        whole = -(-abs(size) // self.block) * self.block
        live = np.cumsum(np.sign(size) * whole) + kernel
        most = np.full(len(self.regions), -1)
        np.maximum.at(most, place, live)
        found: dict[Any, int] = {}
        for region, bytes_ in zip(self.regions, most.tolist(), strict=True):
            if bytes_ >= 0:
                found[region] = max(bytes_, found.get(region, 0))
        return found


# What operations on the meta device made, by operation and arguments: torch's own answer takes
# Python up to a millisecond, and the blocks of a network ask the same again.
_MADE: dict[Any, Any] = {}
_Layout = tuple[Sequence[int], Sequence[int], torch.dtype]  # of a tensor: shape, strides, dtype


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation, or make tensors like those of an equal call on the meta device."""
    key = None
    if _makes_new_tensors(func):
        try:
            key = func, _layout(args), _layout(tuple(kwargs.items()))
            made = _MADE.get(key)
        except TypeError:  # arguments that are no key
            key = made = None
        if made is not None:
            return _again(made)
    out = func(*args, **kwargs)
    if key is not None and (made := _made(out, (args, kwargs))) is not None:
        _MADE[key] = made
    return out


class EqualCallsOnce(TorchDispatchMode):
    """Asks torch once for the results of equal calls on the meta device, see `computed`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return computed(func, args, kwargs or {})


@cache
def _makes_new_tensors(func: Any) -> bool:
    schema = func._schema
    returns = all(result.alias_info is None for result in schema.returns)
    return returns and not schema.is_mutable


def _layout(value: Any) -> Any:
    """Return what the result of an operation can depend on without memory, to be a key."""
    if isinstance(value, Tensor):
        return value.device.type, value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_layout, value))
    return type(value), value


def _made(out: Any, given: Any) -> Any:
    """Return the layouts of a call's results; None if they are no new tensors on the meta device.

    Some results are views whatever their schema says.
    """
    results = list(out) if isinstance(out, tuple | list) else [out]
    old = {id(t.untyped_storage()) for t in tree_leaves(given) if isinstance(t, Tensor)}
    found: list[_Layout | None] = []
    for result in results:
        if result is None:  # a gradient that nobody asked for
            found.append(None)
            continue
        if not isinstance(result, Tensor) or result.device.type != "meta":
            return None
        storage, layout = result.untyped_storage(), (result.shape, result.stride(), result.dtype)
        if id(storage) in old or storage.nbytes() != _strided(layout).untyped_storage().nbytes():
            return None
        old.add(id(storage))
        found.append(layout)
    return found if isinstance(out, tuple | list) else found[0]


def _again(made: Any) -> Any:
    return tuple(map(_empty, made)) if isinstance(made, list) else _empty(made)


def _empty(layout: _Layout | None) -> Tensor | None:
    return None if layout is None else _strided(layout)


def _strided(layout: _Layout) -> Tensor:
    shape, strides, dtype = layout
    return _ATEN.empty_strided.default(shape, strides, dtype=dtype, device="meta")


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    storages = {id(s): s for s in (t.untyped_storage() for t in tensors)}
    return sum(s.nbytes() for s in storages.values())


# --- what a GPU does differently ----------------------------------------------------------------

# What autocast casts; of its lists, what transformers and autoencoders use.
TO_LOWER = {
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "conv1d", "conv2d",
    "conv3d", "conv_transpose2d", "scaled_dot_product_attention",
}  # fmt: skip
TO_FP32 = {
    "layer_norm", "group_norm", "rms_norm", "pow", "exp", "log", "rsqrt", "reciprocal", "softplus",
    "interpolate", "mse_loss", "logsumexp", "cosine_similarity",
}  # fmt: skip
RESULT_IN_FP32 = {"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"}
FLASH_HEAD = 256  # widest head of FlashAttention; wider ones go to memory-efficient attention


class CUDAEmulation(TorchFunctionMode):
    """Casts as autocast on CUDA does and takes fused kernels, on the meta device."""

    def __init__(self, lower: torch.dtype | None):
        super().__init__()
        self.lower = lower  # autocast's dtype, None without autocast
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def forget(self) -> None:
        """Drop the cast weights, as autocast does at its end."""
        self._weights.clear()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.lower is not None:
            if name in TO_LOWER or name in TO_FP32:
                dtype = self.lower if name in TO_LOWER else torch.float32
                args, kwargs = self._cast((args, kwargs), dtype)
            elif name in RESULT_IN_FP32 and kwargs.get("dtype") is None and _is_half(args[0]):
                kwargs = kwargs | {"dtype": torch.float32}
        if name == "scaled_dot_product_attention":
            return fused_attention(*args, **kwargs)
        if name == "rms_norm" and isinstance(args[0], Tensor):
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            return _FusedRMSNorm.apply(args[0], weight)
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast all tensors of arguments; not torch's tree_map, which takes ten times as long."""
        if isinstance(value, Tensor):
            return self._cast_tensor(value, dtype)
        if type(value) in (tuple, list):
            return type(value)([self._cast(part, dtype) for part in value])
        if isinstance(value, dict):
            return {key: self._cast(part, dtype) for key, part in value.items()}
        return value

    def _cast_tensor(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf and dtype == self.lower):
            return tensor.to(dtype)
        if id(tensor) not in self._weights:  # a weight is cast once
            self._weights[id(tensor)] = (tensor, tensor.to(dtype))
        return self._weights[id(tensor)][1]


def autocast(dtype: torch.dtype) -> CUDAEmulation:
    """Emulate `Runtime.autocast` of a pipeline in this dtype: none in fp32."""
    return CUDAEmulation(None if dtype == torch.float32 else dtype)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention (B, heads, L, d) by the kernel that a GPU would take for it.

    FlashAttention, or with a mask, in fp32 or for wide heads memory-efficient attention: neither
    keeps an (L, L) matrix, and cuDNN's, which newer GPUs prefer, does not either.
    """
    if key.shape[1] != query.shape[1]:  # grouped queries: kernels repeat keys and values
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    ops: Any = torch.ops.aten
    if attn_mask is None and _is_half(query) and query.shape[-1] <= FLASH_HEAD:
        flash = ops._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask if attn_mask.is_floating_point() else attn_mask.to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    efficient = ops._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, learns, dropout_p, is_causal, scale=scale)[0]


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


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _fp32_queries(args: tuple, out: Any) -> int:
    """Backward of attention in 16 bits sums the queries' gradient in fp32 (dq_accum)."""
    return args[1].numel() * 4 if _is_half(args[1]) else 0


def _channels_last(args: tuple, out: Any) -> int:
    """cuDNN's 16-bit kernels reorder what they read and write to channels-last: assumed."""
    x = args[0]
    if not _is_half(x) or x.is_contiguous(memory_format=torch.channels_last) or x.ndim != 4:
        return 0
    return (x.numel() + out.numel()) * x.element_size()


_ATEN: Any = torch.ops.aten
KERNELS: dict[Any, KernelMemory] = {
    _ATEN._scaled_dot_product_flash_attention_backward.default: _fp32_queries,
    _ATEN._scaled_dot_product_efficient_attention_backward.default: _fp32_queries,
    _ATEN.convolution.default: _channels_last,
}
