"""Where metrics go beside `metrics.jsonl`: TensorBoard files, wandb, trackio.

A tracker has `log(step, metrics)`, `image(step, picture)` and `close()`. Its library is imported
when it is made, so that a run needs only what it names.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
from PIL import Image

from flowrl.errors import UserError


class Tracker(Protocol):
    """A place for finite numbers and pictures, each with the iteration they belong to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, step: int, picture: Image.Image) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under `<folder>/tensorboard`, without an account or a network."""

    def __init__(self, folder: Path, resume_step: int | None):
        _library("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        # Events from the purged step on are hidden: a resumed run writes them once more.
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, picture: Image.Image) -> None:
        self._writer.add_image("samples", np.asarray(picture), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class Service:
    """wandb, and trackio, which speaks the same language.

    A resumed run is a new run in the group of its folder: neither service lets a run go back to
    an earlier step.
    """

    def __init__(self, module: ModuleType, folder: Path, resume_step: int | None):
        self._module = module
        name = folder.resolve().name
        suffix = "" if resume_step is None else f"-from-{resume_step}"
        module.init(project="flowrl", name=name + suffix, group=name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def image(self, step: int, picture: Image.Image) -> None:
        self._module.log({"samples": self._module.Image(picture)}, step=step)

    def close(self) -> None:
        self._module.finish()


def _wandb(folder: Path, resume_step: int | None) -> Tracker:
    module = _library("wandb")
    os.environ.setdefault("WANDB_DIR", str(folder))  # else its files go to the working directory
    return Service(module, folder, resume_step)


def _trackio(folder: Path, resume_step: int | None) -> Tracker:
    return Service(_library("trackio"), folder, resume_step)


TRACKERS: dict[str, Callable[[Path, int | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


def make_tracker(name: str, folder: Path, resume_step: int | None) -> Tracker:
    """The tracker called `name`. Raises UserError for an unknown or a missing one."""
    if name not in TRACKERS:
        raise UserError(f"unknown tracker {name!r}: run.trackers takes {', '.join(TRACKERS)}.")
    return TRACKERS[name](folder, resume_step)


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"the tracker {name!r} needs a package that is not installed: run "
            f"`pip install {name}`, or take {name!r} out of run.trackers."
        ) from error
