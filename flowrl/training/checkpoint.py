"""The run folder: one owner at a time, checkpoints that a crash cannot spoil, exact resume."""

import contextlib
import fcntl
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.errors import UserError
from flowrl.utils.files import load_state, save_state, write_text

CONFIG = "config.yaml"
STATE = "state.safetensors"
LATEST = "latest"


class Checkpoints:
    """`checkpoints/step-NNNNNN/` of a run folder: the newest `keep`, and the best.

    The state is one file, written beside and renamed, so that a folder with a state is whole.
    """

    def __init__(self, run_dir: Path, *, keep: int):
        self.folder = run_dir / "checkpoints"
        self.keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        found = self.folder.glob(f"step-*/{STATE}")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def save(self, step: int, state: dict[str, Any], *, best: int | None = None) -> Path:
        """Write a checkpoint, then remove all but the newest and the best -> its folder."""
        save_state(self.path(step) / STATE, state)
        for old in self.steps()[: -self.keep]:
            if old != best:
                shutil.rmtree(self.path(old))
        return self.path(step)

    def forget_after(self, step: int) -> None:
        """Remove later checkpoints: a run that goes on from an older one leaves that branch."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later))

    def load(self, resume: str) -> dict[str, Any] | None:
        """The state of "latest" (or of the run's own folder, which means the same), or of a
        checkpoint's folder.

        None when "latest" finds a run that was stopped before its first checkpoint: it starts
        over. Raises UserError when there is no run, or no checkpoint in the folder.
        """
        if resume == LATEST or Path(resume).resolve() == self.folder.parent.resolve():
            if not (self.folder.parent / CONFIG).exists():
                raise UserError(f"nothing to resume: {self.folder.parent} holds no run")
            steps = self.steps()
            return load_state(self.path(steps[-1]) / STATE) if steps else None
        path = Path(resume) / STATE
        if not path.exists():
            raise UserError(f"cannot resume from {resume}: no {STATE} there; give 'latest' or a "
                            f"folder below {self.folder}")  # fmt: skip
        return load_state(path)


@contextlib.contextmanager
def claim(run_dir: Path, *, resume: str | None) -> Iterator[None]:
    """Own a run folder while inside: nobody else writes to it, and no old run is overwritten.

    The lock is the operating system's, so a killed process leaves none behind. Raises UserError
    when another process trains there, or when it holds a run and `resume` is None.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{run_dir} is in use by another process that trains there") from None
        if resume is None and (run_dir / CONFIG).exists():
            raise UserError(
                f"{run_dir} already holds a run: continue it with --resume latest, or choose "
                "another run.output_dir"
            )
        yield


def write_config(run_dir: Path, text: str) -> None:
    write_text(run_dir / CONFIG, text)


def random_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators. flowrl draws by key and uses none of
    them; a user's reward or libraries may."""
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
