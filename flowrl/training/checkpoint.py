"""The run folder: one owner at a time, checkpoints that a crash cannot spoil, exact resume."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.errors import DamagedFile, UserError
from flowrl.training.owner import owned
from flowrl.utils.files import (
    load_state,
    locked_folder,
    save_state,
    sync_folder,
    write_bytes,
)

LOG = logging.getLogger(__name__)
CONFIG = "config.yaml"
STATE = "state.safetensors"
LATEST = "latest"
ASIDE = "set-aside"
STEP = re.compile(r"step-(\d{6,})")  # the whole name of a checkpoint's folder, or of a store's


def step_of(path: Path) -> int | None:
    """Return the number in `step-NNNNNN`; None for any other name, such as that of a copy."""
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else None


class Checkpoints:
    """The folders `checkpoints/step-NNNNNN/` of a run: the newest `keep`, and the best.

    The state is one file, written last and removed first, so a folder with a state is complete.
    """

    def __init__(self, run_dir: Path, *, keep: int):
        self.run_dir = run_dir
        self.folder = run_dir / "checkpoints"
        self.keep = keep

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        steps = (step_of(path.parent) for path in self.folder.glob(f"step-*/{STATE}"))
        return sorted(step for step in steps if step is not None)

    def save(self, step: int, state: dict[str, Any], *, best: int | None = None) -> Path:
        """Write a checkpoint, remove all but the newest and the best, return its folder."""
        save_state(self.path(step) / STATE, state)
        self.prune(best)
        return self.path(step)

    def prune(self, best: int | None) -> None:
        """Remove all but the newest and the best, which a killed process may not have come to."""
        for old in self.steps()[: -self.keep]:
            if old != best:
                remove_checkpoint(self.path(old))

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest whole checkpoint and its state; say which damaged ones are left out.

        Returns None for a run that was killed before its first. Raises DamagedFile when there are
        checkpoints and none is whole.
        """
        damaged: DamagedFile | None = None
        for step in reversed(self.steps()):
            try:
                checkpoint = self.path(step), read_checkpoint(self.path(step))
            except DamagedFile as error:
                LOG.warning("%s", error)
                damaged = damaged or error
                continue
            if damaged is not None:
                LOG.warning("resuming from the checkpoint before it, %s", checkpoint[0])
            return checkpoint
        if damaged is not None:
            raise DamagedFile(
                f"{damaged}, and {self.run_dir} has no whole checkpoint before it: choose another "
                "run.output_dir to start over"
            ) from damaged
        return None

    def remove_unfinished(self) -> None:
        """Remove the folders of checkpoints that a killed process was writing or removing."""
        for path in sorted(self.folder.glob("step-*")):
            if step_of(path) is not None and path.is_dir() and not (path / STATE).exists():
                shutil.rmtree(path)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, the state first: without it the rest is no checkpoint."""
    (folder / STATE).unlink()
    shutil.rmtree(folder)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, all of its files being whole.

    Raises DamagedFile, naming the file, and for weights that are not finite.
    """
    state = load_state(folder / STATE)
    check_finite(state, folder / STATE)
    if (folder / FILE).exists():
        open_lora(folder / FILE)
    return state


def check_finite(state: Any, path: Path) -> None:
    """Raise DamagedFile unless every number of policy and optimizer is finite."""
    for part in ("policy", "optimizer"):
        tensors = [t for t in tree_leaves(state.get(part)) if isinstance(t, torch.Tensor)]
        if not all(bool(t.isfinite().all()) for t in tensors):
            raise DamagedFile(f"{path} holds numbers of the {part} that are not finite")


def set_aside(run_dir: Path, step: int) -> Path | None:
    """Move what a run did after `step` below `set-aside/`, where it has later checkpoints.

    Checkpoints and evaluations are moved, metrics copied: the run cuts its own.
    Returns the new folder, None where there was nothing to move.
    """
    later = [p for p in (run_dir / "checkpoints").glob("step-*") if (step_of(p) or 0) > step]
    later = [p for p in later if (p / STATE).exists()]
    if not later:
        return None
    number = 1 + len(list((run_dir / ASIDE).glob("*")))
    aside = run_dir / ASIDE / f"{number:03d}-after-step-{step:06d}"
    if (metrics := run_dir / "metrics.jsonl").exists():
        write_bytes(aside / metrics.name, metrics.read_bytes())
    # The newest first: whatever interrupts this, those that are left are a run without a gap.
    moved = sorted(later, key=lambda p: step_of(p) or 0, reverse=True)
    paths = sorted((run_dir / "evaluations").glob("step-*.safetensors"))
    moved += [p for p in paths if (step_of(p.with_suffix("")) or 0) > step]
    for path in moved:
        target = aside / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
        sync_folder(target.parent)
    return aside


@contextmanager
def claim(run_dir: Path, *, resume: str | None) -> Iterator[None]:
    """Own a run folder while inside: nobody else writes to it, and no old run is overwritten.

    A killed process leaves no lock behind. Raises UserError when another process trains there, when
    the folder holds a run and `resume` is None, and when there can be no such folder.
    """
    with locked_folder(run_dir), owned(run_dir):
        if resume is None and (run_dir / CONFIG).exists():
            raise UserError(
                f"{run_dir} already holds a run: continue it with --resume latest, or choose "
                "another run.output_dir"
            )
        yield
