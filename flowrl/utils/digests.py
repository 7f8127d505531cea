"""Digests of files: a seal in the header of a safetensors file, and a digest of JSON content."""

import json
from collections.abc import Mapping
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from flowrl.errors import DamagedFile
from flowrl.utils.untrusted import open_regular

SEAL = "flowrl_digest"  # in the header, beside what others keep there
NOTES = "__metadata__"  # safetensors' name for the texts in a header
MAX_HEADER = 100_000_000  # bytes, safetensors' own limit
_HEX = 32


def digest(data: bytes) -> str:
    """Return 32 hex digits that identify the bytes."""
    return blake2b(data, digest_size=_HEX // 2).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the digest of a regular file, read in pieces."""
    with open_regular(path) as file:
        return file_digest(file, lambda: blake2b(digest_size=_HEX // 2)).hexdigest()


def content_digest(content: Any) -> str:
    """Return the digest of JSON content, whatever spaces and escapes it is written with."""
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def seal(data: bytes) -> bytes:
    """Return a safetensors file with a digest of tensors and header in its header."""
    header, tensors = _parts(data)
    notes = header.get(NOTES, {}) | {SEAL: _digest_of(header, tensors)}
    whole = header | {NOTES: dict(sorted(notes.items()))}
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, tensors])


def check_seal(data: bytes, path: Path) -> bool:
    """Return whether the file has a seal, which files of other programs have not.

    Raises DamagedFile when the bytes are not those that were sealed.
    """
    try:
        header, tensors = _parts(data)
        sealed = header.get(NOTES, {}).get(SEAL)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path} is not a safetensors file, or damaged: {error}") from error
    if sealed is None:
        return False
    if sealed != _digest_of(header, tensors):
        raise DamagedFile(f"{path} is damaged: its digest does not match its content")
    return True


def notes_of(data: bytes) -> dict[str, str]:
    """Return the texts in the header of a safetensors file. Raises ValueError where it is none."""
    return _parts(data)[0].get(NOTES, {})


def sealed_digest(path: Path) -> str | None:
    """Return the digest in a file's header, unchecked; None for a file without."""
    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        header = from_json(file.read(min(size, MAX_HEADER)))
    return header.get(NOTES, {}).get(SEAL)


def _digest_of(header: dict[str, Any], tensors: memoryview) -> str:
    """Return the digest of a file without the one that its header may have."""
    notes = {name: text for name, text in header.get(NOTES, {}).items() if name != SEAL}
    whole = json.dumps(header | {NOTES: notes}, sort_keys=True)
    hasher = blake2b(whole.encode(), digest_size=_HEX // 2)
    hasher.update(tensors)
    return hasher.hexdigest()


def _parts(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return a file's header and its tensors. Raises ValueError where it has none."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= len(data) - 8:
        raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
    header = from_json(data[8 : 8 + size])  # refuses deep nesting, where json has no limit
    if not isinstance(header, dict) or not isinstance(header.get(NOTES, {}), Mapping):
        raise ValueError("its header is not a table of tensors")
    return header, memoryview(data)[8 + size :]
