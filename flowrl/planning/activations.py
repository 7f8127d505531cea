"""Count activations and operations of networks of real size, without a GPU and without weights.

The network of the real configuration runs under torch's fake tensors of the device "cuda", so that
autocast and dtypes are torch's own. Saved-tensor hooks count what a forward keeps for backward.
Attention alone is replaced: without a GPU torch would take the kernel that makes an (L, L) matrix.
Repeated blocks run twice, and the second stands for all further ones.
"""

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flowrl.backbones.families import family_of
from flowrl.backbones.loading import enable_vae_tiling
from flowrl.backbones.small import small_pipeline
from flowrl.errors import UserError
from flowrl.planning.model_specs import ModelSpec, build_network, spatial_factor

# sample: a forward without gradients. train: a forward and a backward. train_with_reference: the
# same with a forward of the reference in between.
Mode = Literal["sample", "train", "train_with_reference"]


class Uncountable(UserError):
    """Activations that cannot be counted; weights can be."""


FLASH_HEAD = 256  # widest head of FlashAttention; wider ones go to memory-efficient attention
# Sizes of a network's inputs by the names of its configuration.
WIDTHS = (
    "joint_attention_dim", "caption_channels", "cap_feat_dim", "text_hidden_dim", "text_embed_dim",
    "text_in_dim", "in_text_dim", "llm_features_dim", "text_emb_dim", "text_encoder_dim",
    "context_in_dim", "in_text_dim2", "text_embed_2_dim", "cross_attention_dim",
)  # fmt: skip
CHANNELS = ("in_channels", "in_visual_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of a transformer with a LoRA: all that its memory depends on."""

    spec: ModelSpec
    rows: int  # images, twice as many with guidance
    height: int  # pixels
    width: int
    text_tokens: int  # max_sequence_length of the pipeline's call
    dtype: torch.dtype
    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What one forward makes, in bytes, with all blocks of the network."""

    saved: int  # kept for backward
    outside: int  # the part of `saved` that is not in repeated blocks
    inputs: int  # of all repeated blocks: what checkpointing keeps
    largest_block: int  # the part of `saved` in one block, at most
    working: int  # most bytes at once that are not kept for backward
    operations: float  # multiplications and additions of matrix products


def transformer_peak(forward: Forward, mode: Mode, *, checkpointing: bool = False) -> int:
    """Return the most bytes of activations at once.

    Backward makes as much at a time as forward does: a gradient for each intermediate result.
    """
    if mode == "sample":
        return count_forward(forward, gradients=False).working
    counted = count_forward(forward, gradients=True)
    working = counted.working
    if mode == "train_with_reference":
        working = max(working, count_forward(forward, gradients=False).working)
    if checkpointing:
        return counted.inputs + counted.outside + counted.largest_block + working
    return counted.saved + working


@lru_cache(maxsize=256)
def count_forward(forward: Forward, *, gradients: bool) -> Activations:
    """Run a forward under fake tensors.

    Raises:
        Uncountable: The network cannot run without values, or the pipeline class cannot be built
            small, which tells the shapes of the network's inputs.
    """
    spec, inputs = forward.spec, network_inputs(forward)
    network = build_network(spec.transformer, spec.config, forward.dtype)
    times = shorten(network)
    add_adapter(network, forward.rank, forward.targets)
    try:
        return _count(network, times, inputs, forward.dtype, gradients)
    except Exception as error:
        raise Uncountable(
            f"the activations of {spec.transformer} cannot be counted without values "
            f"({type(error).__name__}: {str(error).splitlines()[0][:200]})"
        ) from error


def _count(
    network: nn.Module,
    times: Mapping[nn.Module, int],
    inputs: Mapping[str, Any],
    dtype: torch.dtype,
    gradients: bool,
) -> Activations:
    with fake_cuda(dtype) as fake:
        place(network, fake)
        kept = [*network.parameters(), *network.buffers()]
        counter = StorageCounter(kept)
        blocks = _BlockCounts(counter, times)
        arguments = {key: _fake_input(value) for key, value in inputs.items()}
        with counter, torch.set_grad_enabled(gradients), counter.saved_hooks():
            output = network(**arguments)
        blocks.remove()
        outside = counter.saved - sum(blocks.saved.values())
        operations = counter.operations - sum(blocks.operations.values())
        total = sum(n * blocks.saved[block] for block, n in times.items())
        del output
    return Activations(
        saved=outside + total,
        outside=outside,
        inputs=sum(n * blocks.inputs[block] for block, n in times.items()),
        largest_block=max(blocks.saved.values(), default=0),
        working=counter.working,
        operations=operations + sum(n * blocks.operations[block] for block, n in times.items()),
    )


@lru_cache(maxsize=64)
def count_decode(
    spec: ModelSpec, rows: int, height: int, width: int, dtype: torch.dtype, *, tiling: bool = False
) -> Activations:
    """Run the decoder under fake tensors, on the latents of `rows` images (height, width)."""
    network: Any = build_network(spec.autoencoder, spec.autoencoder_config, dtype)
    if tiling:
        enable_vae_tiling(network)
    with fake_cuda(dtype) as fake:
        place(network, fake)
        frames = (1,) if spec.frames else ()
        size = rows, spec.channels, *frames, height // spec.factor, width // spec.factor
        z = torch.empty(size, dtype=dtype, device="cuda")
        counter = StorageCounter([*network.parameters(), *network.buffers(), z])
        with counter, torch.no_grad():
            network.decode(z, return_dict=False)[0].float()
    return Activations(
        saved=0, outside=0, inputs=0, largest_block=0, working=counter.working,
        operations=counter.operations,
    )  # fmt: skip


# --- a network, its adapter and its inputs ------------------------------------------------------


def shorten(network: nn.Module) -> dict[nn.Module, int]:
    """Leave two of each run of equal blocks; return how many blocks each one left stands for."""
    times: dict[nn.Module, int] = {}
    lists = {
        n: m for n, m in network.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1
    }
    for name, blocks in lists.items():
        if any(name.startswith(f"{outer}.") for outer in lists):
            continue
        runs: list[list[nn.Module]] = []
        before: Any = None
        for block in blocks:
            shapes = [(key, tuple(p.shape)) for key, p in block.named_parameters()]
            if shapes != before:
                runs.append([])
            runs[-1].append(block)
            before = shapes
        for run in runs:
            times |= {block: 1 for block in run[:2]}
            times[run[:2][-1]] = max(1, len(run) - 1)
        parent, _, child = name.rpartition(".")
        left = nn.ModuleList(block for run in runs for block in run[:2])
        setattr(network.get_submodule(parent), child, left)
    return times


def add_adapter(network: nn.Module, rank: int, targets: tuple[str, ...]) -> None:
    """Add a LoRA in fp32 by PEFT."""
    from peft import LoraConfig, inject_adapter_in_model

    with torch.device("meta"):
        inject_adapter_in_model(LoraConfig(r=rank, target_modules=list(targets)), network)
    for name, parameter in network.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()


@lru_cache(maxsize=64)
def network_inputs(f: Forward) -> dict[str, Any]:
    """Return meta tensors like those that the pipeline's call passes to its transformer.

    A small random pipeline of the same class is called and stopped at its network; widths of text
    and channels become those of the real configuration.
    """
    import diffusers

    kind = getattr(diffusers, f.spec.pipeline, None)
    if kind is None:
        raise Uncountable(f"this diffusers has no {f.spec.pipeline}: install a newer one")
    small = small_pipeline(kind)
    names = list(inspect.signature(type(small.transformer).forward).parameters)[1:]
    positional, keywords = _captured_call(small, f)
    arguments = dict(zip(names, positional, strict=False)) | keywords
    resize = Resize(small.transformer.config, f.spec.config, names[0], f.dtype)
    inputs = {
        key: value if key.endswith("ids") else resize(value, key)
        for key, value in arguments.items()
    }
    if f.spec.config.get("guidance_embeds") and inputs.get("guidance", 0) is None:
        inputs["guidance"] = torch.empty(f.rows, device="meta")
    return inputs


class Resize:
    """Turns inputs of a small network into meta tensors for a network of the real configuration.

    Args:
        old, new: Configurations of the small and of the real network.
        latents: The name of the input that is the latents.
        dtype: Of the new tensors, unless they are of whole numbers or times.
    """

    def __init__(
        self, old: Mapping[str, Any], new: Mapping[str, Any], latents: str, dtype: torch.dtype
    ):
        def sizes(*keys: str) -> dict[int, int]:
            pairs = ((old.get(key), new.get(key)) for key in reversed(keys))
            return {a: b for a, b in pairs if isinstance(a, int) and isinstance(b, int)}

        self.channels, self.widths = sizes(*CHANNELS), sizes(*WIDTHS)
        self.pooled, self.layers = sizes("pooled_projection_dim"), sizes("num_text_layers")
        self.latents, self.dtype = latents, dtype

    def __call__(self, value: Any, key: str) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self(part, key) for part in value)
        if not isinstance(value, Tensor):
            return value
        shape, real = list(value.shape), value.is_floating_point()
        if key == self.latents:  # packed (B, L, C), (B, C, h, w), or a list of (C, ...)
            axes = (-1,) if len(shape) == 3 else (1, 0)
            axis = next((i for i in axes if shape[i] in self.channels), -1)
            shape[axis] = self.channels.get(shape[axis], shape[axis])
        elif real and len(shape) > 1:
            widths = self.pooled if "pooled" in key else self.widths
            shape[-1] = widths.get(shape[-1], shape[-1])
            if len(shape) == 4:  # texts with the states of several layers
                shape[2] = self.layers.get(shape[2], shape[2])
        dtype = self.dtype if real and value.ndim > 1 else value.dtype
        return torch.empty(shape, dtype=dtype, device="meta")


class _Stop(Exception):
    pass


def _captured_call(small: Any, f: Forward) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call a small pipeline for `rows` prompts of the longest text; return its network's call."""
    captured: list[Any] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.append((args, kwargs))
        raise _Stop

    scale, unguided = spatial_factor(small.vae.config), family_of(f.spec.pipeline).unguided
    wanted = {
        "num_inference_steps": 2,
        "height": f.height * scale // f.spec.factor,
        "width": f.width * scale // f.spec.factor,
        "max_sequence_length": f.text_tokens,
        "guidance_scale": 1.0 if unguided is None else unguided,
        "num_frames": 1,
        "use_resolution_binning": False,
        "output_type": "latent",
    }
    parameters = inspect.signature(type(small).__call__).parameters
    hook = small.transformer.register_forward_pre_hook(stop, with_kwargs=True)
    small.set_progress_bar_config(disable=True)
    small.check_inputs = lambda *_, **__: None  # sides of a small autoencoder may be odd
    try:
        with quiet_libraries(), torch.no_grad():
            prompts = ["x" * 2 * f.text_tokens] * f.rows
            small(prompt=prompts, **{k: v for k, v in wanted.items() if k in parameters})
    except _Stop:
        return captured[0]
    except Exception as error:
        raise Uncountable(f"a small {f.spec.pipeline} cannot be called: {error}") from error
    finally:
        hook.remove()
    raise Uncountable(f"{f.spec.pipeline} does not call its transformer")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Switch off the warnings of diffusers and transformers, such as on texts that are cut."""
    import diffusers
    import transformers

    logs = diffusers.utils.logging, transformers.utils.logging
    levels = [log.get_verbosity() for log in logs]
    for log in logs:
        log.set_verbosity_error()
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.set_verbosity(level)


# --- fake tensors of a GPU ----------------------------------------------------------------------


@contextmanager
def fake_cuda(dtype: torch.dtype) -> Iterator[FakeTensorMode]:
    """Run everything on fake tensors, with autocast to `dtype` as on a GPU; none for fp32."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with ExitStack() as stack:
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_FusedAttention())
        # torch.autocast would switch itself off where no GPU is.
        torch.set_autocast_enabled("cuda", dtype != torch.float32)
        torch.set_autocast_dtype("cuda", dtype if dtype != torch.float32 else torch.bfloat16)
        torch.autocast_increment_nesting()
        try:
            yield fake
        finally:
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


def place(network: nn.Module, fake: FakeTensorMode) -> None:
    """Replace a meta network's tensors by fake ones on a GPU."""
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    _fake_input(parameter.data), requires_grad=parameter.requires_grad
                )
        for tensors in (module._buffers, module.__dict__):
            for name, value in [*tensors.items()]:
                if isinstance(value, Tensor):
                    tensors[name] = _fake_input(value)


def _fake_input(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_fake_input(part) for part in value)
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


class _FusedAttention(TorchFunctionMode):
    """Takes the fused kernel that a GPU would take for attention (B, heads, L, d)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.scaled_dot_product_attention:
            return fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention by FlashAttention; with a mask, in fp32 or for wide heads by
    memory-efficient attention."""
    if key.shape[1] != query.shape[1]:  # grouped queries: kernels repeat keys and values
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    ops: Any = torch.ops.aten
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype
    query, key, value = (t.to(dtype) for t in (query, key, value))
    if attn_mask is None and dtype != torch.float32 and query.shape[-1] <= FLASH_HEAD:
        flash = ops._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = attn_mask.to(dtype).expand(*query.shape[:3], key.shape[2])
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    efficient = ops._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, learns, dropout_p, is_causal, scale=scale)[0]


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while anything holds them.

    Args:
        outside: Tensors whose storages do not count, such as parameters.
    """

    def __init__(self, outside: Iterable[Tensor]):
        super().__init__()
        self.live = self.saved = self.working = 0
        self.operations = 0.0
        self._outside = [tensor.untyped_storage() for tensor in outside]
        self._counted: dict[int, Any] = {id(storage): None for storage in self._outside}
        self._saved: set[int] = {id(storage) for storage in self._outside}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.operations += flop_registry[func.overloadpacket](
                *args, **(kwargs or {}), out_val=out
            )
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        # cuDNN's 16-bit kernels copy what they read and write to another layout: assumed.
        copies = 0
        if func is torch.ops.aten.convolution.default and out.dtype.itemsize == 2:
            copies = nbytes([args[0], out])
        self.working = max(self.working, self.live - self.saved + copies)
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)  # torch keeps one Python object a storage for as long as it lives
        if key in self._counted:
            return
        size = storage.nbytes()

        def release(_: Any) -> None:
            self.live -= size
            del self._counted[key]

        self._counted[key] = weakref.ref(storage, release)
        self.live += size

    def saved_hooks(self) -> Any:
        """Return the context in which tensors that autograd saves are counted once."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if id(storage) not in self._saved:
                self._saved.add(id(storage))
                self.saved += storage.nbytes()
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class _BlockCounts:
    """What each repeated block saves, reads and computes, by hooks on it."""

    def __init__(self, counter: StorageCounter, blocks: Iterable[nn.Module]):
        self.counter = counter
        self.saved: dict[nn.Module, int] = {}
        self.inputs: dict[nn.Module, int] = {}
        self.operations: dict[nn.Module, float] = {}
        self._began: dict[nn.Module, tuple[int, float]] = {}
        self._inputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._hooks: list[Any] = []
        for block in blocks:
            self._hooks += [
                block.register_forward_pre_hook(self._begin, with_kwargs=True),
                block.register_forward_hook(self._end),
            ]

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._began[block] = self.counter.saved, self.counter.operations
        tensors = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        storages = {id(s): s for s in (t.untyped_storage() for t in tensors)}
        # Inputs that blocks share, such as the time's embedding, are kept once. An id alone may be
        # that of a storage that is gone.
        self.inputs[block] = sum(s.nbytes() for s in storages.values() if not self._is_known(s))
        self._inputs |= {key: weakref.ref(storage) for key, storage in storages.items()}

    def _is_known(self, storage: torch.UntypedStorage) -> bool:
        reference = self._inputs.get(id(storage))
        return reference is not None and reference() is storage

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        saved, operations = self._began[block]
        self.saved[block] = self.counter.saved - saved
        self.operations[block] = self.counter.operations - operations

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    storages = {id(s): s for s in (t.untyped_storage() for t in tensors)}
    return sum(s.nbytes() for s in storages.values())
