"""The images that a person compares, and which pair comes next."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from flowrl.errors import UserError
from flowrl.scoring.files import prompted_images

Pair = tuple[int, int]  # two images of one prompt, by their rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Images, several of each prompt."""

    folder: Path
    files: tuple[str, ...]  # (N,) below the folder
    texts: tuple[str, ...]  # (N,) the prompts

    def by_prompt(self) -> dict[str, list[int]]:
        """Return the rows of each prompt's images."""
        rows: dict[str, list[int]] = {}
        for row, text in enumerate(self.texts):
            rows.setdefault(text, []).append(row)
        return rows

    def pairs(self) -> list[Pair]:
        return [pair for rows in self.by_prompt().values() for pair in combinations(rows, 2)]


def read_candidates(folder: Path) -> Candidates:
    """Read a folder of images with their prompts.

    Args:
        folder: in GenEval's layout, or with metadata.jsonl (see `labelled_images`).

    Raises:
        UserError: no prompts, an image outside the folder, or no prompt with two images.
    """
    images = prompted_images(folder)
    candidates = Candidates(
        folder=folder,
        files=tuple(image.path.relative_to(folder).as_posix() for image in images),
        texts=tuple(image.prompt for image in images),
    )
    if not candidates.pairs():
        raise UserError(f"no prompt of {folder} has two images, and votes compare two of a prompt")
    return candidates


def next_pair(
    pairs: Sequence[Pair], texts: Sequence[str], voted: Sequence[Pair], seed: int
) -> Pair | None:
    """Return the next pair to show, None after the last one.

    Prompts with the fewest votes come first, so that 50 votes are about 50 prompts where there are
    so many. The order of prompts, pairs and sides is random.
    """
    done = {frozenset(pair) for pair in voted}
    left = [pair for pair in pairs if frozenset(pair) not in done]
    if not left:
        return None
    votes = Counter(texts[pair[0]] for pair in voted)
    fewest = min(votes[texts[pair[0]]] for pair in left)
    rng = random.Random(f"{seed}/{len(voted)}")
    first, second = rng.choice([pair for pair in left if votes[texts[pair[0]]] == fewest])
    return (first, second) if rng.random() < 0.5 else (second, first)
