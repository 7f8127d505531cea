"""Keep the networks of rewards on the CPU while others use the GPU.

Moving weights there and back changes no bit of them, hence no score.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

DEPTH = 8  # of objects in objects, in which networks are looked for
_parked: WeakKeyDictionary[nn.Module, torch.device] = WeakKeyDictionary()
_moving = threading.Lock()


def park(reward: Any) -> None:
    """Move the networks of a reward to the CPU; those on several devices stay."""
    with _moving:
        for network in networks_of(reward):
            devices = {tensor.device for tensor in (*network.parameters(), *network.buffers())}
            if len(devices) == 1 and (device := devices.pop()).type != "cpu":
                _parked[network] = device
                network.to("cpu")


def restore(reward: Any) -> None:
    """Move the networks of a reward back to where they were when they were parked."""
    with _moving:
        for network in networks_of(reward) if _parked else ():
            if (device := _parked.pop(network, None)) is not None:
                network.to(device)


def networks_of(reward: Any) -> list[nn.Module]:
    """Return the networks that an object holds, in its attributes and in what these hold."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    level: list[Any] = [reward]
    for _ in range(DEPTH):
        level = [part for one in level for part in _parts(one, found, seen)]
    return list(found.values())


def _parts(value: Any, found: dict[int, nn.Module], seen: set[int]) -> Iterable[Any]:
    """Return what an object holds; a network is found, and not looked into."""
    if id(value) in seen or isinstance(value, str | bytes | type | torch.Tensor):
        return ()
    seen.add(id(value))
    if isinstance(value, nn.Module):
        found[id(value)] = value
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
