"""Prompts as vectors, each encoded once: the images of a group share their prompt."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LIMIT = 4096  # remembered prompts; 16 MB at 1024 numbers each


class TextEmbeddings:
    """Calls `encode` (texts -> (N, D)) for new texts alone, and forgets all beyond LIMIT.

    No gradient is kept. Equal prompts get the very same vector, in one call and in the next.
    """

    def __init__(self, encode: Callable[[list[str]], Tensor]):
        self.encode = encode
        self._vectors: dict[str, Tensor] = {}

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """B prompts -> (B, D)."""
        if len(self._vectors) > LIMIT:
            self._vectors.clear()
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._vectors]
        if new:
            with torch.no_grad():
                rows = [row.clone() for row in self.encode(new)]
            self._vectors |= dict(zip(new, rows, strict=True))
        return torch.stack([self._vectors[prompt] for prompt in prompts])


def warn_of_cut(reward: str, prompts: Sequence[str], lengths: Sequence[int], limit: int) -> None:
    """Say which prompts are longer than the text encoder reads: their ends are not scored."""
    for prompt, length in zip(prompts, lengths, strict=True):
        if length > limit:
            warnings.warn(
                f"{reward} reads {limit} tokens and scores only the beginning of this prompt of "
                f"{length}: {prompt!r}",
                stacklevel=2,
            )
