"""Read files and JSON that somebody else may have written.

A run folder, a prompt file or a LoRA may come from a stranger. A named pipe would block the reader,
a link could lead out of the folder, a file may be endless, and JSON may be nested so deeply that a
parser overflows its stack. Everything of that kind is refused here, with one sentence.
"""

import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from flowrl.errors import UserError

MAX_BYTES = 64 * 2**20  # of a file, unless the caller says otherwise


class RefusedFile(UserError):
    """A file that is not read: no regular file, outside of its folder, or too large."""


def open_regular(path: Path, *, inside: Path | None = None) -> BufferedReader:
    """Open a regular file for reading, and never wait for one.

    Args:
        inside: folder that the file must lie in, after links are followed.

    Raises:
        OSError: the file is missing or may not be read.
        RefusedFile: it is a pipe, a device or a folder, or a link leads out of `inside`.
    """
    target = _resolve(path, inside)
    if not stat.S_ISREG(os.stat(target).st_mode):
        raise RefusedFile(f"{path} is not a regular file")
    # The file may have been replaced by a pipe since: without O_NONBLOCK, opening it would wait.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(target, flags | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RefusedFile(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def check_regular(path: Path) -> None:
    """Check a file, or all files below a folder, before a library opens them by their names.

    Raises RefusedFile for what is no regular file, and for a link out of the folder. Links between
    the folders of one repository in the cache of the Hub are in order.
    """
    if not path.is_dir():
        open_regular(path).close()
        return
    root = path.resolve()
    inside = root.parents[1] if root.parent.name == "snapshots" else root
    for file in path.rglob("*"):
        if not file.is_dir():
            open_regular(file, inside=inside).close()


def is_readable(path: Path, *, inside: Path | None = None) -> bool:
    """Return whether `open_regular` would open the file."""
    try:
        return stat.S_ISREG(os.stat(_resolve(path, inside)).st_mode)
    except (OSError, UserError):
        return False


def read_bytes(path: Path, *, inside: Path | None = None, limit: int | None = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        inside: as in `open_regular`.
        limit: bytes; a longer file is refused. None is the size that the file says it has.

    Raises:
        OSError, RefusedFile: as `open_regular`, and for a longer file.
    """
    with open_regular(path, inside=inside) as file:
        # Not limit + 1: the buffer is allocated at once.
        size = os.fstat(file.fileno()).st_size
        data = file.read(size if limit is None else min(limit, size) + 1)
    if limit is not None and len(data) > limit:
        raise RefusedFile(f"{path} has more than {limit} bytes")
    return data


def read_text(path: Path, *, inside: Path | None = None, limit: int = MAX_BYTES) -> str:
    """Return the UTF-8 text of a regular file. Raises as `read_bytes`, and UserError for others."""
    try:
        return read_bytes(path, inside=inside, limit=limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json(path: Path, *, inside: Path | None = None, limit: int = MAX_BYTES) -> Any:
    """Return the JSON in a regular file. Raises as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, inside=inside, limit=limit), str(path))


def parse_json(data: bytes | str, what: str) -> Any:
    """Return the JSON in `data`.

    Args:
        what: names the data in the error.

    Raises:
        UserError: the data are no JSON, or nested more than 200 levels deep.
    """
    try:
        return from_json(data)
    except ValueError as error:
        raise UserError(f"{what} is no JSON that can be read: {error}") from None


def _resolve(path: Path, inside: Path | None) -> Path:
    """Follow links. Raises OSError for a missing file, RefusedFile for one outside `inside`."""
    try:
        target = Path(path).resolve(strict=True)
    except RuntimeError as error:  # links in a circle, before Python 3.13
        raise RefusedFile(f"{path} is a link in a circle") from error
    except ValueError as error:  # a NUL character
        raise RefusedFile(f"{path!r} is not a file name") from error
    if inside is not None and not target.is_relative_to(Path(inside).resolve()):
        raise RefusedFile(f"{path} leads out of {inside}")
    return target
