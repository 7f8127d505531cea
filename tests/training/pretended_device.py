"""A device that is pretended on the CPU, to count what would make the host wait for a GPU.

Tensors that would be on the GPU are marked, and so is what is computed from them; they say that
they are on `DEVICE`, which is the CPU under another name. Reading a value, searching for the places
that are true, and copying between host and device are counted by the line of flowrl that asks.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import flowrl

DEVICE = torch.device("cpu", 0)
PACKAGE = Path(flowrl.__file__).parent
SEND = str(PACKAGE / "utils" / "devices.py")
TORCH = str(Path(torch.__file__).parent)
# Methods that return what is on the device to the host, or whose result has a size that the host
# must know.
READS = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero",
    "masked_select", "unique", "argwhere", "equal", "allclose",
}  # fmt: skip
INDEXING = {"__getitem__", "__setitem__", "copy_", "__set__", "_is_view", "backward"}
MARK = "_pretended"


def on_device(tensor: Any) -> bool:
    return hasattr(tensor, MARK)


def mark(*tensors: Tensor) -> None:
    """Put tensors on the pretended device."""
    for tensor in tensors:
        setattr(tensor, MARK, True)


class Waits(TorchFunctionMode):
    """Count waits inside the block, by file and line of flowrl."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = list(_tensors((*args, *kwargs.values())))
        given, target = any(map(on_device, tensors)), _target(name, args, kwargs)
        if func == torch.Tensor.device.__get__:
            return DEVICE if given else func(*args, **kwargs)
        # torch's own calls go between kernels of one device, and `send` does not wait.
        caller = sys._getframe(1).f_code.co_filename
        if not caller.startswith(TORCH) and not (caller == SEND and target == DEVICE):
            self._check(name, args, kwargs, tensors, target)
        found = func(*args, **kwargs)
        place = target == DEVICE if target is not None else given and name != "cpu"
        if place:
            mark(*_tensors((found,)))
        elif target is not None or name == "cpu":
            found = _unmarked(found)
        return found

    def _check(self, name, args, kwargs, tensors, target) -> None:
        """Count a call that waits. Raises AssertionError for one that a GPU would refuse."""
        given = any(map(on_device, tensors))
        if name in READS and given:
            self._count(name)
        elif target is not None and tensors and given != (target == DEVICE):
            self._count(f"{name} {'device' if target == DEVICE else 'host'}")
        elif target == DEVICE and name in ("tensor", "as_tensor"):
            self._count(name)
        elif name in ("__getitem__", "__setitem__"):
            self._check_index(args[0], args[1])
        elif target is None and given and name not in INDEXING:
            sizes = [t.ndim for t in tensors if not on_device(t)]
            assert not any(sizes), f"{name} of tensors on the host and on the device"

    def _check_index(self, tensor: Tensor, index: Any) -> None:
        for part in index if isinstance(index, tuple) else (index,):
            if isinstance(part, Tensor) and part.ndim:
                if not on_device(tensor):
                    assert not on_device(part), "a tensor on the host, an index on the device"
                elif not on_device(part):
                    self._count("index from the host")
                elif part.dtype == torch.bool:
                    self._count("mask")

    def _count(self, what: str) -> None:
        frame = sys._getframe(3)
        while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
            frame = frame.f_back
        where = "?"
        if frame is not None:
            path = Path(frame.f_code.co_filename).relative_to(PACKAGE)
            where = f"{path}:{frame.f_lineno}"
        self.lines[f"{where} {what}"] += 1


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _target(name: str, args: tuple, kwargs: dict) -> torch.device | None:
    """Return the device that a call names, of a factory or of `to`."""
    device = kwargs.get("device")
    if device is None and name == "to":
        for value in args[1:2]:
            if isinstance(value, Tensor):
                return DEVICE if on_device(value) else torch.device("cpu")
            device = value if isinstance(value, str | torch.device) else None
    return None if device is None else torch.device(device)


def _unmarked(found: Any) -> Any:
    """Return tensors without the mark: a copy to the same place is the same object."""
    if isinstance(found, Tensor) and on_device(found):
        with torch._C.DisableTorchFunction():
            return found.view_as(found)
    return found
