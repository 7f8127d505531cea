"""Noise by name: what a draw is for decides its value, not when or in which batch it is made."""

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor


def noise_seed(
    *,
    seed: int,
    iteration: int,
    prompt: str,
    root: int,
    path: Sequence[int] = (),
    step: int,
    role: str,
) -> int:
    """A 63-bit seed from the name of one draw: a hash, so that no two names are alike by pattern.

    prompt: uid of the prompt; root: which image of its group; path: child index at each branch
    of a tree on the way from the root; step: index in the schedule; role: what the draw is for
    ("init", "step", ...).
    """
    name = json.dumps([seed, iteration, prompt, root, list(path), step, role])
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # fits a signed 64-bit number


def keyed_noise(
    seeds: Sequence[int],
    shape: Sequence[int],
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal rows, each a function of its own seed alone. (len(seeds), *shape)

    Drawn in fp32 on the CPU, so that the values depend on neither `device` nor `dtype`. The
    generator there uses 32 bits of a seed: of n draws about n^2 / 2^33 pairs are equal.
    """
    noise = torch.empty(len(seeds), *shape)
    generator = torch.Generator()
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return noise.to(device=device, dtype=dtype)


def keyed_uniform(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Rows uniform in [0, 1), each a function of its own seed alone. (len(seeds), *shape) CPU."""
    numbers = torch.empty(len(seeds), *shape)
    generator = torch.Generator()
    for row, seed in zip(numbers, seeds, strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return numbers
