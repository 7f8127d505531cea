"""The run folder: one owner at a time, checkpoints that a crash cannot spoil, exact resume."""

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from flowrl.errors import UserError
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import load_state, parse_state, save_state

CONFIG = "config.yaml"
LOCK = ".lock"
STATE = "state.safetensors"
LATEST = "latest"


class Checkpoints:
    """The folders `checkpoints/step-NNNNNN/` of a run: the newest `keep`, and the best.

    The state is one file, written beside and renamed, so a folder with a state is complete.
    """

    def __init__(self, run_dir: Path, *, keep: int):
        self.folder = run_dir / "checkpoints"
        self.keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        found = self.folder.glob(f"step-*/{STATE}")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def save(self, step: int, state: dict[str, Any], *, best: int | None = None) -> Path:
        """Write a checkpoint, remove all but the newest and the best, return its folder."""
        save_state(self.path(step) / STATE, state)
        for old in self.steps()[: -self.keep]:
            if old != best:
                shutil.rmtree(self.path(old))
        return self.path(step)

    def remove_after(self, step: int) -> None:
        """Remove later checkpoints, which a run resumed from an older one does not continue."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later))

    def load(self, resume: str) -> dict[str, Any] | None:
        """Return the state that `find` finds."""
        path = self.find(resume)
        return None if path is None else load_state(path)

    def find(self, resume: str) -> Path | None:
        """Return the file with the state of "latest" (or of the run's folder, the same) or of a
        checkpoint.

        Returns None when "latest" finds a run without a checkpoint yet, which starts over. Raises
        UserError when there is no run, or no checkpoint in the folder.
        """
        if resume == LATEST or Path(resume).resolve() == self.folder.parent.resolve():
            if not (self.folder.parent / CONFIG).exists():
                raise UserError(f"nothing to resume: {self.folder.parent} holds no run")
            steps = self.steps()
            return self.path(steps[-1]) / STATE if steps else None
        path = Path(resume) / STATE
        if not path.exists():
            raise UserError(f"cannot resume from {resume}: no {STATE} there; give 'latest' or a "
                            f"folder below {self.folder}")  # fmt: skip
        return path


def load_on_all(checkpoints: Checkpoints, resume: str, runtime: Runtime) -> dict[str, Any] | None:
    """Return `Checkpoints.load` of the main process on every process: others need no such file."""

    def read() -> bytes:
        path = checkpoints.find(resume)
        return b"" if path is None else path.read_bytes()

    data = runtime.from_main(read)
    return parse_state(data) if data else None


@contextlib.contextmanager
def claim(run_dir: Path, *, resume: str | None) -> Iterator[None]:
    """Own a run folder while inside: nobody else writes to it, and no old run is overwritten.

    A killed process leaves no lock behind, and a start that fails before the folder holds a run
    leaves nothing of its own. Raises UserError when another process trains there, when the folder
    holds a run and `resume` is None, and when there can be no such folder.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_new_folders(run_dir))
        try:
            stack.enter_context(FileLock(run_dir / LOCK, blocking=False))
        except Timeout:
            raise UserError(f"{run_dir} is in use by another process that trains there") from None
        stack.enter_context(_kept_if_run(run_dir))
        if resume is None and (run_dir / CONFIG).exists():
            raise UserError(
                f"{run_dir} already holds a run: continue it with --resume latest, or choose "
                "another run.output_dir"
            )
        yield


@contextlib.contextmanager
def _new_folders(run_dir: Path) -> Iterator[None]:
    """Make the folder and those above it; remove them again if they are empty in the end."""
    new = [path for path in (run_dir, *run_dir.parents) if not os.path.lexists(path)]
    try:
        _make_folder(run_dir)
        yield
    finally:
        for path in new:
            with contextlib.suppress(OSError):  # not empty: a run, or somebody else's
                path.rmdir()


def _make_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the run folder {run_dir}: {error.strerror}; choose another run.output_dir"
        ) from error


@contextlib.contextmanager
def _kept_if_run(run_dir: Path) -> Iterator[None]:
    """Remove what was written inside the block unless a run has begun there; needs the lock."""
    before = {path.name for path in run_dir.iterdir()} - {LOCK}
    try:
        yield
    finally:
        if not (run_dir / CONFIG).exists():
            for path in run_dir.iterdir():
                if path.is_dir() and path.name not in before:
                    shutil.rmtree(path)
                elif path.name not in before:
                    path.unlink()


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's global generators.

    flowrl uses keyed noise and none of them; a user's reward or libraries may.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words_of_numpy = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, words_of_numpy, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
