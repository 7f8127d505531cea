"""The most bytes that a forward, or a forward and backward, has alive beside the weights.

Counted on the meta device through the real network with the real adapter. Peaks are affine in the
number of blocks of each kind as long as one asks for the peak within a block, so that networks of
a few blocks tell those of any depth; `whole` counts all blocks instead.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flowrl.planning.kernels import AsOnGPU, kernels_own
from flowrl.planning.network import (
    Module,
    Shapes,
    add_adapter,
    build,
    depths,
    inputs,
    of_depths,
)
from flowrl.planning.tracking import LiveBytes

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
