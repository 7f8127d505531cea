"""Weights in published layouts that are the same everywhere: by name and place, never by a seed.

Scores of published code for such weights are recorded in the tests: what is read and computed here
must give them too.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def weights_by_name(shapes: Mapping[str, Sequence[int]], gain: float = 1.5) -> dict[str, Tensor]:
    """Numbers that look random. Norms are near 1 and 0, other biases small."""
    return {name: _numbers(name, tuple(shape), gain) for name, shape in shapes.items()}


def _numbers(name: str, shape: tuple[int, ...], gain: float) -> Tensor:
    count = torch.Size(shape).numel()
    mixed = torch.arange(count, dtype=torch.int64) + zlib.crc32(name.encode())
    for factor in (2654435761, 2246822519):  # Knuth's and xxHash's
        mixed = (mixed * factor) % 2**32
        mixed = mixed ^ (mixed >> 15)
    uniform = (mixed.double() / 2**31 - 1).view(shape)
    norm = "norm" in name.lower() or ".ln_" in name or name.startswith("ln_")
    if norm and name.endswith("weight"):
        return (1 + 0.2 * uniform).float()
    if norm or len(shape) < 2:
        return (0.2 * uniform).float()
    return (uniform * gain * (3 / torch.Size(shape[1:]).numel()) ** 0.5).float()
