"""Votes: an append-only journal, and the pairs that follow from them."""

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from flowrl.errors import UserError
from flowrl.utils.files import write_text
from flowrl.utils.journal import append_line, read_lines

FILE = "votes.jsonl"
Choice = Literal["first", "second", "tie", "skip"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
ANSWERS = {"first": 1.0, "second": 0.0, "tie": 0.5}  # preference for the first image


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A choice between two images of one prompt."""

    prompt: str
    first: str  # image files, below the folder of candidates
    second: str
    choice: Choice

    @property
    def preferred(self) -> tuple[str, str] | None:
        """Return (better, worse), None for a tie and a skipped pair."""
        pairs = {"first": (self.first, self.second), "second": (self.second, self.first)}
        return pairs.get(self.choice)


class Ballot:
    """The journal of votes in a folder. A line is on disk before `cast` returns.

    `{"undo": true}` takes the last vote back. A damaged line (see `flowrl.utils.journal`) is logged
    and does not count.
    """

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self._votes: list[Vote] = []
        lines = read_lines(self.path)
        lines.warn(self.path)
        for entry in lines.entries:
            if entry.get("undo"):
                del self._votes[-1:]
            elif entry.get("choice") in CHOICES:
                names = ("prompt", "first", "second", "choice")
                self._votes.append(Vote(**{name: entry[name] for name in names}))

    @property
    def votes(self) -> Sequence[Vote]:
        """Return the votes that count, oldest first."""
        return tuple(self._votes)

    def cast(self, vote: Vote) -> None:
        """Write a vote."""
        append_line(self.path, asdict(vote) | {"time": round(time.time(), 3)})
        self._votes.append(vote)

    def undo(self) -> Vote | None:
        """Take the last vote back and return it; None where there is none."""
        if not self._votes:
            return None
        append_line(self.path, {"undo": True})
        return self._votes.pop()


def write_pairs(votes: Iterable[Vote], folder: Path, path: Path) -> int:
    """Write votes that prefer an image as pairs; return their number.

    A line has prompt, chosen and rejected, as in open-image-preferences.

    Args:
        folder: of the images.
        path: of the file, which names images relative to its own folder.

    Raises UserError when no vote prefers an image.
    """
    rows = []
    for vote in votes:
        if vote.preferred is not None:
            better, worse = (os.path.relpath(folder / name, path.parent) for name in vote.preferred)
            rows.append({"prompt": vote.prompt, "chosen": better, "rejected": worse})
    if not rows:
        raise UserError(f"no vote in {folder} prefers an image: there is nothing to train on")
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)
