"""The most bytes that a forward, or a forward and backward, has alive beside the weights.

Counted on the meta device through the real network with the real adapter. Peaks are affine in the
number of blocks of each kind as long as one asks for the peak within a block, so that networks of
a few blocks tell those of any depth; `whole` counts all blocks instead.
"""

import gc
import inspect
import json
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flowrl.planning.model_specs import Size

# --- How many bytes of tensors are alive at once, counted operation by operation ---------------

# torch's CUDA allocator hands out multiples of this (kMinBlockSize in CUDACachingAllocator.cpp).
BLOCK = 512

# (arguments of an operation, its result) -> bytes that its kernel holds meanwhile
During = Callable[[tuple[Any, ...], Any], int]


class LiveBytes(TorchDispatchMode):
    """Inside, every storage that an operation makes is counted until nothing holds it any more.

    outside: tensors whose storages do not count, such as parameters. block: what sizes are rounded
    up to. during: by operation, what it needs for itself. `live` is what is alive now, `peak` the
    most so far; `peaks` has the same for each region that was entered.
    """

    def __init__(
        self,
        outside: Iterable[Tensor] = (),
        *,
        block: int = BLOCK,
        during: Mapping[Any, During] | None = None,
    ):
        super().__init__()
        self.block, self.during = block, dict(during or {})
        self.live = 0
        self.peaks: dict[Any, int] = {}
        self._region: Any = None
        self._known: dict[int, Any] = {}
        self._outside = [tensor.untyped_storage() for tensor in outside]
        for storage in self._outside:
            self._known[id(storage)] = None

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    def enter(self, region: Any) -> None:
        """What is alive from now on counts for this region, too."""
        self._region = region
        self._note(self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._hold(tensor)
        during = self.during.get(func)
        if during is not None:
            self._note(self.live + during(args, out))
        return out

    def _hold(self, tensor: Tensor) -> None:
        # torch keeps one Python object a storage for as long as the storage lives.
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = -(-storage.nbytes() // self.block) * self.block

        def gone(_: Any) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self._note(self.live)

    def _note(self, live: int) -> None:
        if live > self.peaks.get(self._region, -1):
            self.peaks[self._region] = live


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for one in out:
            yield from _tensors(one)


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage once."""
    storages = {id(s): s for s in (t.untyped_storage() for t in tensors)}
    return sum(s.nbytes() for s in storages.values())


def on_meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# --- Operations on the meta device as a GPU computes them --------------------------------------


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


# --- A published transformer of some depth on the meta device, its inputs and its adapter ------


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A class of diffusers or transformers and its configuration as JSON, to be a key."""

    made: str
    config: str

    def of(self, changes: Mapping[str, Any]) -> "Module":
        return as_module(self.made, json.loads(self.config) | dict(changes))


def as_module(made: str, config: Mapping[str, Any]) -> Module:
    return Module(made=made, config=json.dumps(dict(config), sort_keys=True))


def build(module: Module, dtype: torch.dtype) -> nn.Module:
    """On the meta device, frozen and in eval mode."""
    import diffusers

    made = getattr(diffusers, module.made)
    known = inspect.signature(made.__init__).parameters
    config = {k: v for k, v in json.loads(module.config).items() if k in known}
    with torch.device("meta"):
        network: nn.Module = made(**config)
    nn.Module.to(network, dtype)  # diffusers' own warns of layers that loading leaves in fp32
    return network.requires_grad_(False).eval()


def add_adapter(network: nn.Module, rank: int, targets: tuple[str, ...]) -> list[nn.Parameter]:
    """PEFT's LoRA in fp32 -> its parameters, each with a gradient, as after a first backward."""
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


def adapter_parameters(network: nn.Module, rank: int, targets: tuple[str, ...]) -> int:
    """Numbers of a LoRA: rank * (in + out) of every layer whose name ends in one of `targets`."""
    found = 0
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and ends_in(name, targets):
            weight = layer.weight
            found += rank * (weight.shape[0] + weight[0].numel())
    return found


def ends_in(name: str, targets: tuple[str, ...]) -> bool:
    """PEFT's rule for lists: the name itself, or its last parts."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


# --- depth ------------------------------------------------------------------------------------


def depths(module: Module) -> dict[str, int]:
    """Blocks of each kind; "dual" are SD3.5-Medium's first ones, with a second attention."""
    config = json.loads(module.config)
    found = {key: config[key] for key in ("num_layers", "num_single_layers") if key in config}
    if dual := len(config.get("dual_attention_layers") or ()):
        found = {"dual": dual, "num_layers": found["num_layers"] - dual}
    return found


def of_depths(module: Module, depth: Mapping[str, int]) -> Module:
    """The same network with other numbers of blocks."""
    changes: dict[str, Any] = dict(depth)
    dual = changes.pop("dual", 0)
    changes["num_layers"] += dual
    if "dual_attention_layers" in json.loads(module.config):
        changes["dual_attention_layers"] = list(range(dual))
    return module.of(changes)


# --- inputs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Of one forward. rows: images, twice as many with guidance; height, width: of latents."""

    family: str
    rows: int
    channels: int
    height: int
    width: int
    text_tokens: int
    text_width: int
    pooled_width: int | None
    guidance: bool  # an input of the network

    @property
    def latent(self) -> int:
        """Numbers in one latent."""
        return self.channels * self.height * self.width


def shapes_of(size: Size, rows: int, height: int, width: int, text_tokens: int | None) -> Shapes:
    """height, width: pixels. Raises UserError for sides that the network cannot patch."""
    for side in (height, width):
        size.latent_shape(side)
    return Shapes(
        family=size.family,
        rows=rows,
        channels=size.channels,
        height=height // size.factor,
        width=width // size.factor,
        text_tokens=size.text_tokens if text_tokens is None else text_tokens,
        text_width=size.text_width,
        pooled_width=size.pooled_width,
        guidance=bool(size.config.get("guidance_embeds")),
    )


def inputs(s: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the backbone of the family hands to its transformer."""
    given = {
        "hidden_states": on_meta(s.rows, s.channels, s.height, s.width, dtype=dtype),
        "timestep": on_meta(s.rows, dtype=torch.float32),
        "encoder_hidden_states": on_meta(s.rows, s.text_tokens, s.text_width, dtype=dtype),
    }
    if s.pooled_width is not None:
        given["pooled_projections"] = on_meta(s.rows, s.pooled_width, dtype=dtype)
    if s.family == "sana":
        given["encoder_attention_mask"] = on_meta(s.rows, s.text_tokens, dtype=torch.long)
    if s.family == "flux":
        tokens = s.height // 2 * (s.width // 2)
        given["hidden_states"] = on_meta(s.rows, tokens, 4 * s.channels, dtype=dtype)
        given["timestep"] = on_meta(s.rows, dtype=dtype)
        given["txt_ids"] = on_meta(s.text_tokens, 3, dtype=dtype)
        given["img_ids"] = on_meta(tokens, 3, dtype=dtype)
        if s.guidance:
            given["guidance"] = on_meta(s.rows, dtype=torch.float32)
    return given


# --- The most bytes that a forward, or a forward and backward, has alive beside the weights ----


SHORT = 3  # blocks of each kind: the first and the last may be special

Peaks = Mapping[Any, int]
# A forward without gradients; with a backward; with another forward, of the reference, in between.
What = Literal["draw", "learn", "compare"]


@lru_cache(maxsize=256)
def forward_peak(
    module: Module, shapes: Shapes, dtype: torch.dtype, *, rank: int, targets: tuple[str, ...],
    whole: bool = False,
) -> int:  # fmt: skip
    """Of one forward without gradients, of as many rows as the shapes have."""

    def measured(made: Module) -> Peaks:
        return track(_adapted(made, dtype, rank, targets), inputs(shapes, dtype), dtype, "draw")

    return _at_depth(module, measured, whole)


@lru_cache(maxsize=256)
def training_peak(
    module: Module, shapes: Shapes, dtype: torch.dtype, *, rank: int, targets: tuple[str, ...],
    checkpointing: bool, reference: bool = False, whole: bool = False,
) -> int:  # fmt: skip
    """Of a forward and a backward. reference: a forward without gradients comes in between."""

    def measured(made: Module) -> Peaks:
        network = _adapted(made, dtype, rank, targets)
        given = inputs(shapes, dtype)
        with _checkpointing(network, dtype) if checkpointing else nullcontext():
            return track(network, given, dtype, "compare" if reference else "learn")

    return _at_depth(module, measured, whole)


@lru_cache(maxsize=32)
def _adapted(module: Module, dtype: torch.dtype, rank: int, targets: tuple[str, ...]) -> nn.Module:
    network = build(module, dtype)
    add_adapter(network, rank, targets)
    return network


def _at_depth(module: Module, measured: Any, whole: bool) -> int:
    """The highest peak at the module's own depth, from those of short networks."""
    full = depths(module)
    short = {kind: min(n, SHORT) for kind, n in full.items()}
    if whole or short == full:
        return max(measured(module).values())
    base = measured(of_depths(module, short))
    found = dict(base)
    for kind, n in full.items():
        if n == short[kind]:
            continue
        longer = measured(of_depths(module, short | {kind: short[kind] + 1}))
        for region in base:
            found[region] += (n - short[kind]) * (longer[region] - base[region])
    return max(found.values())


def track(network: nn.Module, given: Mapping[str, Tensor], dtype: torch.dtype, what: What) -> Peaks:
    """Peaks by region, of one forward of an adapted network or of a forward and backward."""
    parameters = list(network.parameters())
    outside = [*parameters, *network.buffers(), *given.values()]
    outside += [p.grad for p in parameters if p.grad is not None]
    tracker = LiveBytes(outside, during=kernels_own())
    autocast = autocast_of(dtype)
    marks = _Marks(tracker)
    with _uncollected(), marks.on(network), tracker, autocast:
        marks.phase("forward")
        with torch.set_grad_enabled(what != "draw"):
            v = network(**given, return_dict=False)[0].float()
        if what == "compare":
            marks.phase("reference")
            with torch.no_grad():
                pulled = network(**given, return_dict=False)[0].float()
            v = v - pulled
        if what != "draw":
            loss = v.square().mean()
            autocast.forget()
            marks.phase("backward")
            torch.autograd.backward(loss)
    return tracker.peaks


def autocast_of(dtype: torch.dtype) -> AsOnGPU:
    """As `Runtime.autocast` is in a dtype: none in fp32."""
    return AsOnGPU(None if dtype == torch.float32 else dtype)


@contextmanager
def _checkpointing(network: Any, dtype: torch.dtype) -> Iterator[None]:
    """As diffusers does it; a mode for functions is not in force where blocks are run again."""

    def again(block: nn.Module, *args: Any) -> Any:
        return checkpoint(
            block.__call__, *args, use_reentrant=False,
            context_fn=lambda: (nullcontext(), autocast_of(dtype)),
        )  # fmt: skip

    network.enable_gradient_checkpointing(again)
    try:
        yield
    finally:
        network.disable_gradient_checkpointing()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, what only Python's garbage collector would free stays alive.

    Checkpointing leaves such cycles behind. When they go depends on everything else that Python
    does; so the count is the same every time, and the most that it can be.
    """
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Marks:
    """Tells the tracker which block is at work, by its place among its like, and in which phase."""

    def __init__(self, tracker: LiveBytes):
        self.tracker, self.name = tracker, ""

    def phase(self, name: str) -> None:
        self.name = name
        self.tracker.enter((name,))

    @contextmanager
    def on(self, network: nn.Module) -> Iterator[None]:
        hooks: list[Any] = []
        for name, blocks in network.named_children():
            if isinstance(blocks, nn.ModuleList):
                for block, place in zip(blocks, _places(list(blocks)), strict=True):
                    hooks += self._watch(block, (name, *place))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self, block: nn.Module, place: tuple) -> list[Any]:
        def enter(*_: Any) -> None:
            self.tracker.enter((self.name, *place))

        def after(module: nn.Module, args: Any, out: Any) -> None:
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(enter)

        return [block.register_forward_pre_hook(enter), block.register_forward_hook(after)]


def _places(blocks: list[nn.Module]) -> list[tuple[int, int]]:
    """For each block (number of its run of equal ones, 1 or 2 from the end of the run)."""
    kinds = [sorted((n, tuple(p.shape)) for n, p in b.named_parameters()) for b in blocks]
    runs: list[int] = []
    for i, kind in enumerate(kinds):
        runs.append(0 if i == 0 else runs[-1] + (kind != kinds[i - 1]))
    left = [sum(run == other for other in runs[i:]) for i, run in enumerate(runs)]
    return [(run, min(n, 2)) for run, n in zip(runs, left, strict=True)]


# --- The most bytes alive while images are decoded and texts encoded, beside the weights -----

CLIP_TOKENS = 77
# Gemma reads SANA's instruction before the prompt; its tokens, counted by words and rounded up.
INSTRUCTION_TOKENS = 256


@lru_cache(maxsize=64)
def decode_peak(module: Module, latents: tuple[int, int, int, int], dtype: torch.dtype) -> int:
    """Of latents (B, C, h, w) -> images in fp32, under the autocast of a rollout."""
    network: Any = build(module, dtype)
    network.encoder = nn.Identity()
    z = on_meta(*latents, dtype=dtype)
    tracker = _tracker(network, z)
    with tracker, autocast_of(dtype), torch.no_grad():
        images = network.decode(z / 1.0, return_dict=False)[0]
        (images * 0.5 + 0.5).clamp(0, 1).float()
    return tracker.peak


def encode_peak(size: Size, rows: int, text_tokens: int | None, dtype: torch.dtype) -> int:
    """Of the text encoder that needs most, for so many texts at once; 0 where there is none.

    Without autocast, which `TextCache` switches off.
    """
    found = [0]
    for encoder in size.text_encoders:
        tokens = tokens_of(size, encoder.config, text_tokens)
        module = as_module(encoder.model, encoder.config)
        found.append(_encoder_peak(module, encoder.config_class, rows, tokens, dtype))
    return max(found)


def tokens_of(size: Size, config: Any, text_tokens: int | None) -> int:
    """Of one text in an encoder: CLIP has its own number, the others share the rest."""
    if config.get("max_position_embeddings") == CLIP_TOKENS:
        return CLIP_TOKENS
    tokens = size.text_tokens if text_tokens is None else text_tokens
    if size.family == "sd3":
        return tokens - CLIP_TOKENS
    return tokens + (INSTRUCTION_TOKENS if size.family == "sana" else 0)


@lru_cache(maxsize=64)
def _encoder_peak(
    module: Module, config_class: str, rows: int, tokens: int, dtype: torch.dtype
) -> int:
    """One layer is enough: without gradients nothing of the earlier ones is kept."""
    import transformers

    config = json.loads(module.config)
    for depth in ("num_layers", "num_hidden_layers"):
        if depth in config:
            config[depth] = 1
    made = getattr(transformers, config_class)(**config)
    with torch.device("meta"):
        network = getattr(transformers, module.made)(made)
    nn.Module.to(network, dtype).requires_grad_(False).eval()
    if dtype == torch.float16:
        keep_wide(network)
    ids = on_meta(rows, tokens, dtype=torch.long)
    tracker = _tracker(network, ids)
    with tracker, autocast_of(torch.float32), torch.no_grad():
        network(input_ids=ids)
    return tracker.peak


def keep_wide(network: Any) -> int:
    """Put what transformers keeps in fp32 beside fp16 there -> how many numbers that is."""
    wide = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    found = 0
    for name, parameter in network.named_parameters():
        if wide & set(name.split(".")):
            parameter.data = parameter.data.float()
            found += parameter.numel()
    return found


def _tracker(network: nn.Module, given: torch.Tensor) -> LiveBytes:
    outside = [*network.parameters(), *network.buffers(), given]
    return LiveBytes(outside, during=kernels_own())
