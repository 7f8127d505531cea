"""Noise by name: what a draw is for decides its value, not when or in which batch it is made."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flowrl.utils.devices import send


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
    """Hash of the name, so that similar names get unrelated seeds. 63 bits.

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
) -> Tensor:
    """Standard normal rows, each a function of its own seed alone. (len(seeds), *shape)

    Sampled in fp32 on the CPU, so that the values do not depend on `device`. torch's
    CPU generator uses 32 bits of the seed: of n rows about n^2 / 2^33 pairs are equal.
    """
    noise = torch.empty(len(seeds), *shape)
    generator = torch.Generator()
    for row, seed in zip(noise, seeds, strict=True):
        row.normal_(generator=generator.manual_seed(seed))
    return send(noise, device)


def keyed_uniform(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Rows uniform in [0, 1), each a function of its own seed alone. (len(seeds), *shape) CPU."""
    numbers = torch.empty(len(seeds), *shape)
    generator = torch.Generator()
    for row, seed in zip(numbers, seeds, strict=True):
        row.uniform_(generator=generator.manual_seed(seed))
    return numbers


# --- Noise of siblings: how the K children of one node depend on each other --------------------


def coupled(z: Tensor, kind: str, strength: float, shared: Callable[[], Tensor]) -> Tensor:
    """Return the noises of K siblings, made of independent ones. (R, K, *latent)

    independent: z itself, as a lone child's always is. shared: (xi_0 + s z_b) / sqrt(1 + s^2),
    equation 2 of BranchGRPO (2509.06040), with xi_0 what `shared` draws and s the strength: 0 makes
    siblings identical, a large one independent. simplex: sqrt(K / (K - 1)) (z_b - mean z), siblings
    as far apart as can be; they sum to 0.
    """
    siblings = z.shape[1]
    if siblings == 1 or kind == "independent":
        return z
    if kind == "shared":
        return (shared().unsqueeze(1) + strength * z) / math.hypot(1.0, strength)
    return math.sqrt(siblings / (siblings - 1)) * (z - z.mean(1, keepdim=True))
