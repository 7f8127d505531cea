"""Digests of files: a seal in the header of a safetensors file, and a digest of JSON content."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from flowrl.errors import DamagedFile, UserError

FORMAT = 1  # of the files that are sealed; a higher one is a newer flowrl's
SEAL, VERSION = "flowrl_digest", "flowrl_format"  # in the header, beside what others keep there
NOTES = "__metadata__"  # safetensors' name for the texts in a header
_HEX = 32
_PLACE = f'"{SEAL}":"'.encode()  # in a header that `seal` wrote; quotes inside a text are escaped


def digest(data: bytes) -> str:
    """Return 32 hex digits that identify the bytes."""
    return blake2b(data, digest_size=_HEX // 2).hexdigest()


def content_digest(content: Any) -> str:
    """Return the digest of JSON content, whatever spaces and escapes it is written with."""
    return digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def seal(data: bytes) -> bytes:
    """Return a safetensors file with a digest of tensors and header in its header.

    The digest is that of the whole file with zeros in the place of the digest.
    """
    header, start = _header(data)
    notes = header.pop(NOTES, {}) | {SEAL: "0" * _HEX, VERSION: str(FORMAT)}
    whole = {NOTES: dict(sorted(notes.items()))} | header
    text = json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    parts = len(text).to_bytes(8, "little") + text, data[start:]
    place = parts[0].index(_PLACE) + len(_PLACE)
    found = blake2b(parts[0], digest_size=_HEX // 2)
    found.update(parts[1])
    return b"".join(
        [parts[0][:place], found.hexdigest().encode(), parts[0][place + _HEX :], parts[1]]
    )


def check_seal(data: bytes, path: Path) -> bool:
    """Return whether the file has a seal: those of others and of earlier versions have none.

    Raises DamagedFile when the bytes are not those that were sealed, and UserError for the file of
    a newer version.
    """
    try:
        header, _ = _header(data)
        notes = header.get(NOTES, {})
        sealed = SEAL in notes or VERSION in notes
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{path} is not a safetensors file, or damaged: {error}") from error
    if not sealed:
        return False
    newer = _is_newer(notes.get(VERSION))
    if not _is_intact(data, notes.get(SEAL)):
        other = ", or a newer flowrl wrote it" if newer else ""
        raise DamagedFile(f"{path} is damaged: it is not what its digest was taken of{other}")
    if newer:
        raise UserError(
            f"{path} was written by a newer flowrl (format {notes[VERSION]}, this one reads up to "
            f"{FORMAT}): update flowrl"
        )
    return True


def notes_of(data: bytes) -> dict[str, str]:
    """Return the texts in the header of a safetensors file. Raises ValueError where it is none."""
    return _header(data)[0].get(NOTES, {})


def sealed_digest(path: Path) -> str | None:
    """Return the digest in a file's header, unchecked; None for a file without."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return header.get(NOTES, {}).get(SEAL)


def _is_newer(version: Any) -> bool:
    return isinstance(version, str) and version.isdecimal() and int(version) > FORMAT


def _is_intact(data: bytes, wanted: Any) -> bool:
    place = data.find(_PLACE) + len(_PLACE)
    if place < len(_PLACE) or not isinstance(wanted, str):
        return False
    found = blake2b(data[:place], digest_size=_HEX // 2)
    found.update(b"0" * _HEX)
    found.update(memoryview(data)[place + _HEX :])
    return found.hexdigest() == wanted


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Return a file's header and where its tensors begin. Raises ValueError where it has none."""
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= len(data) - 8:
        raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
    header = json.loads(data[8 : 8 + size])
    if not isinstance(header, dict) or not isinstance(header.get(NOTES, {}), Mapping):
        raise ValueError("its header is not a table of tensors")
    return header, 8 + size
