"""Atomic writes, and nested state as safetensors without pickle."""

import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load, save

from flowrl.errors import DamagedFile, UserError
from flowrl.utils.digests import check_seal, notes_of, seal
from flowrl.utils.untrusted import read_bytes

TEMPORARY = ".tmp"  # ending of files that are being written
_HALF_WRITTEN = re.compile(rf"\.(.+)\.[a-z0-9_]{{8}}{re.escape(TEMPORARY)}")

FolderKind = Literal["run", "images", "leaderboard", "votes", "dataset"]
# Every name that flowrl writes at the top of a folder, as patterns. Nothing else in a folder is
# ever deleted, and everything else there is somebody else's.
WRITTEN: dict[FolderKind, tuple[str, ...]] = {
    "run": (
        ".lock", ".owner.json", "metrics.jsonl", "tensorboard", "wandb", "config.yaml",
        "ledger.jsonl", "reference.safetensors",
        "pytorch_lora_weights.safetensors", "README.md", "checkpoints", "evaluations",
        "samples", "gallery", "card", "comparison", "set-aside",
    ),
    "images": (
        ".lock", "drawn.json", "scores.csv", "[0-9][0-9][0-9][0-9][0-9]",
    ),
    "leaderboard": (
        ".lock", "evaluations", "index.html", "leaderboard.csv", "comparisons.csv", "scores.csv",
    ),
    "votes": (".lock", "votes.jsonl"),
    "dataset": (".lock", "store.json", "shards"),
}  # fmt: skip
_TENSOR = "__tensor__"
_INT_KEYS = "__int_keys__"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path`; sync and rename it when the block succeeds."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
        temporary = Path(name)
        os.close(handle)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # which would say nothing
            error.filename = str(path)
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power cut.

    Windows cannot open a folder, and keeps its entries in order by itself.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(folder: Path) -> None:
    """Flush everything below a folder to disk, and the folders' entries."""
    for path in [*sorted(folder.rglob("*")), folder]:
        if path.is_dir():
            sync_folder(path)
            continue
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def unused(path: Path) -> Path:
    """Return the path, or where there is such a file the next free one: a.png, a-2.png, a-3.png."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return path if not path.exists() else next(name for name in names if not name.exists())


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def save_state(path: Path, state: Any) -> None:
    """Write nested dicts and lists of tensors, numbers, strings and None, atomically.

    Tensors go to safetensors, everything else into its JSON header, so reading runs no code. The
    header has a digest of the whole file. Raises TypeError for other types.
    """
    write_bytes(path, state_bytes(state))


def state_bytes(state: Any) -> bytes:
    """Return the bytes of the file that `save_state` writes."""
    tensors: dict[str, torch.Tensor] = {}
    tree = _flatten(state, tensors)
    return seal(save(tensors, metadata={"state": json.dumps(tree)}))


def load_state(path: Path) -> Any:
    """Return the state that `save_state` wrote, with the tensors on the CPU.

    Raises DamagedFile when the file is not what was written, and what `read_bytes` raises.
    """
    return parse_state(read_bytes(path, limit=None), path)


def parse_state(data: bytes, path: Path) -> Any:
    """Return the state in the bytes of a file that `save_state` wrote; see `load_state`."""
    if not check_seal(data, path):
        raise DamagedFile(f"{path} is damaged: it has no digest")
    try:
        return _unflatten(json.loads(notes_of(data)["state"]), load(data))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path} is damaged: {error}") from error


# --- what flowrl wrote in a folder ----------------------------------------------------------------


def name_of(path: Path) -> str:
    """Return the name of a file; of one that is half-written, the name that it would have had."""
    half_written = _HALF_WRITTEN.fullmatch(path.name)
    return half_written[1] if half_written else path.name


def foreign_entries(folder: Path, kind: FolderKind) -> list[Path]:
    """Return what lies at the top of a folder and flowrl did not write, sorted."""
    return [path for path in _entries(folder) if not _is_written(path, kind)]


def remove_leftovers(folder: Path, kind: FolderKind) -> None:
    """Remove what killed writers left half-written; needs a folder that nobody else writes to.

    Folders of others below it, such as further runs, stay as they are.
    """
    for entry in filter(lambda path: _is_written(path, kind), _entries(folder)):
        below = sorted(entry.rglob(f".*{TEMPORARY}")) if entry.is_dir() else []
        for path in (entry, *below):
            if _HALF_WRITTEN.fullmatch(path.name):
                remove(path)


@contextlib.contextmanager
def locked_folder(folder: Path, *kinds: FolderKind) -> Iterator[None]:
    """Hold the lock of a folder; remove files that a killed process left half-written.

    Raises UserError when another process has the lock, and when there can be no such folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {folder}: {error.strerror}; name another folder"
        ) from error
    try:
        with FileLock(folder / ".lock", blocking=False):
            for kind in kinds:
                remove_leftovers(folder, kind)
            yield
    except Timeout:
        raise UserError(
            f"{folder} is in use by another flowrl process: end that one, or give another folder"
        ) from None


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all it holds; one that is missing is removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_written(path: Path, kind: FolderKind) -> bool:
    return any(fnmatchcase(name_of(path), pattern) for pattern in WRITTEN[kind])


def _flatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, dict):
        flat = {str(k): _flatten(v, tensors) for k, v in value.items()}
        # JSON knows only string keys; torch's optimisers number their parameters.
        if value and all(isinstance(k, int) for k in value):
            return {_INT_KEYS: flat}
        return flat
    if isinstance(value, (list, tuple)):
        return [_flatten(v, tensors) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"cannot store a {type(value).__name__}: only tensors, numbers, strings and None"
    )


def _unflatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_unflatten(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _INT_KEYS in value:
        return {int(k): _unflatten(v, tensors) for k, v in value[_INT_KEYS].items()}
    return {k: _unflatten(v, tensors) for k, v in value.items()}
