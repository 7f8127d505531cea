"""Count activations and operations of networks of real size, without a GPU and without weights.

The network of the real configuration runs forward and backward under torch's fake tensors, with
torch's own autocast, attention and checkpointing, while a dispatch mode counts the storages that
are alive. Of each run of equal blocks two run, and stand for all.
"""

import inspect
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flowrl.backbones.call import call_arguments
from flowrl.backbones.gate import Stop
from flowrl.backbones.loading import (
    diffusers_class,
    enable_gradient_checkpointing,
    enable_vae_tiling,
)
from flowrl.backbones.small import small_pipeline
from flowrl.errors import UserError, first_line
from flowrl.planning.model_specs import ModelSpec, build_network, spatial_factor

# sample: a forward without gradients. train: a forward and a backward. train_with_reference: the
# same with a forward of the reference in between.
Mode = Literal["sample", "train", "train_with_reference"]


class Uncountable(UserError):
    """Activations that cannot be counted; weights can be."""


# Sizes of a network's inputs by the names of its configuration.
WIDTHS = (
    "joint_attention_dim", "caption_channels", "cap_feat_dim", "text_hidden_dim", "text_embed_dim",
    "text_in_dim", "in_text_dim", "llm_features_dim", "text_emb_dim", "text_encoder_dim",
    "context_in_dim", "in_text_dim2", "text_embed_2_dim", "cross_attention_dim",
)  # fmt: skip
CHANNELS = ("in_channels", "in_visual_dim")
# Operations of each of torch's kernels; torch 2.14 lacks those of a CPU's attention.
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[ATTENTION],
    **flop_registry,
}


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
    """What a network makes, in bytes, with all of its blocks."""

    peak: int  # most at once, without gradients of the adapter
    held: int  # after the forward: what backward needs
    operations: float  # multiplications and additions of the forward's matrix products


def transformer_peak(forward: Forward, mode: Mode, *, checkpointing: bool = False) -> int:
    """Return the most bytes of activations at once."""
    sampled = count_forward(forward, gradients=False) if mode != "train" else None
    if sampled is not None and mode == "sample":
        return sampled.peak
    trained = count_forward(forward, gradients=True, checkpointing=checkpointing)
    return max(trained.peak, trained.held + sampled.peak if sampled else 0)


@lru_cache(maxsize=256)
def count_forward(forward: Forward, *, gradients: bool, checkpointing: bool = False) -> Activations:
    """Run a forward, and with `gradients` a backward, under fake tensors.

    Raises:
        Uncountable: The network cannot run without values, or the pipeline class cannot be built
            small, which tells the shapes of the network's inputs.
    """
    spec, inputs = forward.spec, network_inputs(forward)
    network = build_network(spec.transformer, spec.config, forward.dtype)
    repeats = shorten(network)
    add_adapter(network, forward.rank, forward.targets)
    if checkpointing:
        enable_gradient_checkpointing(network)
    try:
        with fake_tensors(forward.dtype):
            make_fake(network)
            return _count(network, repeats, inputs, gradients)
    except Exception as error:
        raise Uncountable(
            f"the activations of {spec.transformer} cannot be counted without values "
            f"({type(error).__name__}: {first_line(error)[:200]})"
        ) from error


def _count(
    network: nn.Module, repeats: "Iterable[Repeat]", inputs: dict[str, Any], learn: bool
) -> Activations:
    arguments = {key: _fake(value) for key, value in inputs.items()}
    counter = LiveBytes([*network.parameters(), *network.buffers(), *tree_leaves(arguments)])
    for repeat in repeats:
        book_repeat(counter, *repeat)
    # Gradients of the adapter are counted by their size, not here.
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with counter, torch.set_grad_enabled(learn):
        output = [t for t in tree_leaves(network(**arguments)) if isinstance(t, Tensor)]
        held, operations = counter.live, counter.operations
        if learn:
            torch.autograd.backward(output, [torch.empty_like(t) for t in output])
    return Activations(peak=counter.peak, held=held, operations=operations)


@lru_cache(maxsize=64)
def count_decode(
    spec: ModelSpec, rows: int, height: int, width: int, dtype: torch.dtype, *, tiling: bool = False
) -> Activations:
    """Run the decoder under fake tensors, on the latents of `rows` images (height, width)."""
    network: Any = build_network(spec.autoencoder, spec.autoencoder_config, dtype)
    if tiling:
        enable_vae_tiling(network)
    with fake_tensors(dtype):
        make_fake(network)
        frames = (1,) if spec.frames else ()
        size = rows, spec.channels, *frames, height // spec.factor, width // spec.factor
        z = torch.empty(size, dtype=dtype)
        counter = LiveBytes([*network.parameters(), *network.buffers(), z])
        with counter, torch.no_grad():
            network.decode(z, return_dict=False)[0].float()
    return Activations(peak=counter.peak, held=0, operations=counter.operations)


# --- a network, its adapter and its inputs ------------------------------------------------------


# The first and the second block of a run of equal ones, and how many more there are.
Repeat = tuple[nn.Module, nn.Module, int]


def book_repeat(counter: "LiveBytes", first: nn.Module, second: nn.Module, more: int) -> None:
    """Book the blocks that do not run as alive from the second one's forward to its backward.

    What one leaves behind is what is alive after the second and was not after the first.
    """
    after_first = [0, 0.0]
    booked: list[int] = []

    def leave_first(*_: Any) -> None:
        after_first[:] = counter.live, counter.operations

    def leave_second(*_: Any) -> None:
        if not booked:  # once: checkpointing runs it again in backward
            booked.append(more * int(counter.live - after_first[0]))
            counter.add(booked[0])
            counter.operations += more * (counter.operations - after_first[1])

    def enter_second(_: nn.Module, args: Any, kwargs: Any) -> None:
        learned = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        learned = [t for t in learned if t.requires_grad]
        if not booked and learned:
            learned[0].register_hook(lambda _: counter.add(-booked[0]))

    first.register_forward_hook(leave_first)
    second.register_forward_pre_hook(enter_second, with_kwargs=True)
    second.register_forward_hook(leave_second)


def shorten(network: nn.Module) -> list[Repeat]:
    """Leave two of each run of equal blocks; return the runs that were longer."""
    repeats: list[Repeat] = []
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
        repeats += [(run[0], run[1], len(run) - 2) for run in runs if len(run) > 2]
        parent, _, child = name.rpartition(".")
        left = nn.ModuleList(block for run in runs for block in run[:2])
        setattr(network.get_submodule(parent), child, left)
    return repeats


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
    """Return what the pipeline's call passes to its transformer: meta tensors, and real masks.

    A small random pipeline of the same class is called and stopped at its network; widths of text
    and channels become those of the real configuration. Whole numbers keep their values, which
    decide the shapes of some networks' texts.
    """
    try:
        small = small_pipeline(diffusers_class(f.spec.pipeline))
    except UserError as error:  # a class that this diffusers lacks
        raise Uncountable(str(error)) from error
    names = list(inspect.signature(type(small.transformer).forward).parameters)[1:]
    positional, keywords = _captured_call(small, f)
    arguments = dict(zip(names, positional, strict=False)) | keywords
    resize = Resize(small.transformer.config, f.spec.config, names[0], f.dtype)
    inputs = {key: resize(value, key) for key, value in arguments.items()}
    if f.spec.config.get("guidance_embeds") and inputs.get("guidance", 0) is None:
        inputs["guidance"] = torch.empty(f.rows, device="meta")
    return inputs


class Resize:
    """Turns inputs of a small network into meta tensors for a network of the real configuration.

    Args:
        old, new: Configurations of the small and of the real network.
        latents: The name of the input that is the latents.
        dtype: Of the new tensors, unless they are times.
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
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if key.endswith("ids"):
            return value.to("meta")
        shape = list(value.shape)
        if key == self.latents:  # packed (B, L, C), (B, C, h, w), or a list of (C, ...)
            axes = (-1,) if len(shape) == 3 else (1, 0)
            axis = next((i for i in axes if shape[i] in self.channels), -1)
            shape[axis] = self.channels.get(shape[axis], shape[axis])
        elif len(shape) > 1:
            widths = self.pooled if "pooled" in key else self.widths
            shape[-1] = widths.get(shape[-1], shape[-1])
            if len(shape) == 4:  # texts with the states of several layers
                shape[2] = self.layers.get(shape[2], shape[2])
        dtype = self.dtype if value.ndim > 1 else value.dtype
        return torch.empty(shape, dtype=dtype, device="meta")


def _captured_call(small: Any, f: Forward) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call a small pipeline for `rows` images of the longest text; return its network's call."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise Stop((args, kwargs))

    scale = spatial_factor(small.vae.config)
    call = call_arguments(
        small, guidance=1.0, max_sequence_length=f.text_tokens,
        height=f.height * scale // f.spec.factor, width=f.width * scale // f.spec.factor,
    )  # fmt: skip
    texts = ["x" * 2 * f.text_tokens]
    if "num_images_per_prompt" in inspect.signature(type(small).__call__).parameters:
        call["num_images_per_prompt"] = f.rows  # so that one text is encoded
    else:
        texts *= f.rows
    hook = small.transformer.register_forward_pre_hook(stop, with_kwargs=True)
    small.set_progress_bar_config(disable=True)
    small.check_inputs = lambda *_, **__: None  # sides of a small autoencoder may be odd
    try:
        with torch.no_grad():
            small(prompt=texts, num_inference_steps=2, output_type="latent", **call)
    except Stop as stopped:
        return stopped.value
    except Exception as error:
        raise Uncountable(f"a small {f.spec.pipeline} cannot be called: {error}") from error
    finally:
        hook.remove()
    raise Uncountable(f"{f.spec.pipeline} does not call its transformer")


# --- fake tensors -------------------------------------------------------------------------------


@contextmanager
def fake_tensors(dtype: torch.dtype) -> Iterator[None]:
    """Run everything on fake tensors, with autocast to `dtype` as on a GPU; none for fp32.

    Fake tensors are of the CPU: torch runs no backward of another device that is not there.
    """
    half = dtype != torch.float32
    autocast = torch.autocast("cpu", dtype if half else torch.bfloat16, enabled=half)
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), autocast:
        warnings.filterwarnings("ignore", message="Mismatch dtype")  # of norms on CPUs
        yield


def make_fake(network: nn.Module) -> None:
    """Replace a meta network's tensors by fake ones of the CPU.

    Norms get fp32, as by autocast of GPUs; that of CPUs leaves them in 16 bits.
    """
    for module in network.modules():
        norm = type(module) in (nn.LayerNorm, nn.GroupNorm)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = parameter.data.float() if norm else parameter.data
                module._parameters[name] = nn.Parameter(
                    _fake(value), requires_grad=parameter.requires_grad
                )
        if norm:
            module.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
        for tensors in (module._buffers, module.__dict__):
            for name, value in [*tensors.items()]:
                if isinstance(value, Tensor | list) and not isinstance(value, nn.Parameter):
                    tensors[name] = _fake(value)


def _fake(value: Any) -> Any:
    """Return fake tensors in place of meta ones."""
    if isinstance(value, list | tuple):
        return type(value)(_fake(part) for part in value)
    if not isinstance(value, Tensor) or value.device.type != "meta":
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while anything holds them.

    Args:
        outside: Values whose storages do not count, such as parameters.
    """

    def __init__(self, outside: Iterable[Any]):
        super().__init__()
        self.live = self.peak = 0
        self.operations = 0.0
        self._outside = [t.untyped_storage() for t in outside if isinstance(t, Tensor)]
        self._counted: dict[int, Any] = {id(storage): None for storage in self._outside}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        fake = any(isinstance(t, FakeTensor) or t.is_meta for t in tensors)
        whole = kwargs.get("dtype") in (torch.int64, torch.bool)  # of a new tensor
        if not fake and (tensors or whole):
            with unset_fake_temporarily():  # masks and indices have values
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if formula := FORMULAS.get(func.overloadpacket):
            self.operations += formula(*args, **kwargs, out_val=out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._hold(leaf.untyped_storage())
        # cuDNN's 16-bit kernels copy what they read and write to another layout: assumed.
        copies = 0
        if func is torch.ops.aten.convolution.default and out.dtype.itemsize == 2:
            copies = nbytes([args[0], out])
        self.peak = max(self.peak, self.live + copies)
        return out

    def add(self, size: int) -> None:
        """Count bytes that no storage has."""
        self.live += size
        self.peak = max(self.peak, self.live)

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


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each storage once."""
    storages = {id(s): s for s in (t.untyped_storage() for t in tensors)}
    return sum(s.nbytes() for s in storages.values())
