"""How many bytes of tensors are alive at once, counted operation by operation.

It sees shapes alone, so that tensors on the meta device are counted like real ones.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
