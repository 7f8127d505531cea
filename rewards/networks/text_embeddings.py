"""Prompts as vectors, each encoded once: the images of a group share their prompt."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LIMIT = 4096  # remembered prompts; 16 MB at 1024 numbers each


class TextEmbeddings:
    """Calls `encode` (texts -> (N, D)) for new texts alone, and remembers the last `limit`.

    No gradient is kept. Equal prompts get the very same vector, in one call and in the next.
    """

    def __init__(self, encode: Callable[[list[str]], Tensor], limit: int = LIMIT):
        self.encode, self.limit = encode, limit
        self._vectors: dict[str, Tensor] = {}  # the least recently used first

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """B prompts -> (B, D)."""
        unique = list(dict.fromkeys(prompts))
        new = [prompt for prompt in unique if prompt not in self._vectors]
        if new:
            with torch.no_grad():
                rows = [row.clone() for row in self.encode(new)]
            self._vectors |= dict(zip(new, rows, strict=True))
        for prompt in unique:
            self._vectors[prompt] = self._vectors.pop(prompt)
        result = torch.stack([self._vectors[prompt] for prompt in prompts])
        for prompt in list(self._vectors)[: max(0, len(self._vectors) - self.limit)]:
            del self._vectors[prompt]
        return result


def warn_of_cut(reward: str, prompts: Sequence[str], lengths: Sequence[int], limit: int) -> None:
    """Say which prompts are longer than the text encoder reads: their ends are not scored."""
    for prompt, length in zip(prompts, lengths, strict=True):
        if length > limit:
            warnings.warn(
                f"{reward} reads {limit} tokens and scores only the beginning of this prompt of "
                f"{length}: {prompt!r}",
                stacklevel=2,
            )
