"""Append-only files of JSON lines, each with a digest of its bytes.

A line is `{..., "digest": "32 hex digits"}`, where the digest is that of the line without it. Every
changed byte is noticed, and damage is named by its line's number. A line that a killed process left
unfinished is damaged, too; the next line begins below it.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from flowrl.utils.digests import digest
from flowrl.utils.untrusted import MAX_BYTES, read_bytes

LOG = logging.getLogger(__name__)
_BEFORE, _AFTER = b', "digest": "', b'"}'
_HEX = 32
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """What a journal holds."""

    entries: list[Entry]  # oldest first, without their digests
    damaged: list[int]  # numbers of the lines that are left out, from 1

    def warn(self, path: Path) -> None:
        """Log which lines of the file are damaged, if any."""
        if self.damaged:
            numbers = ", ".join(map(str, self.damaged[:10]))
            more = f" and {len(self.damaged) - 10} more" if len(self.damaged) > 10 else ""
            LOG.warning("%s: damaged or unfinished and left out: line %s%s", path, numbers, more)


def seal_line(entry: Mapping[str, Any]) -> bytes:
    """Return an entry that is not empty as a line with its digest, without the line's end."""
    body = json.dumps(dict(entry)).encode()
    return body[:-1] + _BEFORE + digest(body).encode() + _AFTER


def open_line(line: bytes) -> Entry | None:
    """Return the entry of a line, None for one that is not as `seal_line` wrote it."""
    body, mark, end = line.rpartition(_BEFORE)
    body += b"}"
    if not mark or len(end) != _HEX + len(_AFTER) or end != digest(body).encode() + _AFTER:
        return None
    try:
        entry = from_json(body)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def read_lines(path: Path) -> Lines:
    """Return what a journal holds, nothing for a missing one.

    Raises:
        RefusedFile: see `flowrl.utils.untrusted.read_bytes`.
    """
    try:
        data = read_bytes(path, limit=16 * MAX_BYTES)
    except FileNotFoundError:
        return Lines(entries=[], damaged=[])
    entries, damaged = [], []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line and number == len(lines):  # after the last line's end
            continue
        entry = open_line(line)
        if entry is None:
            damaged.append(number)
        else:
            entries.append(entry)
    return Lines(entries=entries, damaged=damaged)


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Write an entry below the last line, flushed to disk before it returns."""
    line = seal_line(entry) + b"\n"
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
