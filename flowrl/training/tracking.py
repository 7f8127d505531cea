"""What a run logs: `metrics.jsonl`, sample grids, and trackers (TensorBoard, wandb, trackio).

The JSON lines are the record: always written, flushed line by line, and repaired on resume, so
that each iteration is in them once, whatever happened to the process before.
"""

import importlib
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from flowrl.errors import UserError
from flowrl.utils.files import write_bytes
from flowrl.utils.images import to_pil
from flowrl.utils.journal import read_lines, seal_line
from flowrl.utils.plots import Column, draw_grid
from flowrl.utils.templates import finite_or_none

FILE = "metrics.jsonl"


class TensorBoard:
    """Writes event files under `<folder>/tensorboard`."""

    def __init__(self, folder: Path, resume_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        # Events from the purged step on are hidden: a resumed run writes them once more.
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, image: Image.Image) -> None:
        self._writer.add_image("samples", np.asarray(image), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class TrackingService:
    """Logs to wandb or to trackio, which has the same functions.

    A resumed run is a new run in the group of its folder: neither lets a run go back to an earlier
    step.
    """

    def __init__(self, module: ModuleType, folder: Path, resume_step: int | None):
        self._module = module
        name = folder.resolve().name
        suffix = "" if resume_step is None else f"-from-{resume_step}"
        module.init(project="flowrl", name=name + suffix, group=name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def image(self, step: int, image: Image.Image) -> None:
        self._module.log({"samples": self._module.Image(image)}, step=step)

    def close(self) -> None:
        self._module.finish()


def make_tracker(name: str, folder: Path, resume_step: int | None) -> TensorBoard | TrackingService:
    """Return the tracker called `name`. Raises UserError where its package is missing."""
    if name == "tensorboard":
        return TensorBoard(folder, resume_step)
    os.environ.setdefault("WANDB_DIR", str(folder))  # else its files go to the working directory
    return TrackingService(_library(name), folder, resume_step)


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"the tracker {name!r} needs a package that is not installed: run "
            f"`pip install {name}`, or take {name!r} out of run.trackers."
        ) from error


class Report:
    """Writes a run's metrics and sample grids; a context manager of the main process.

    Lines after `resume_step` are cut, as is a line that a crash left unfinished. Without it the
    run is new, and a folder with metrics raises UserError.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        trackers: Sequence[str] = ("tensorboard",),
        resume_step: int | None = None,
    ):
        self.folder = Path(folder)
        path = self.folder / FILE
        for name in trackers:  # before anything is written
            _library(name)
        if resume_step is None and path.exists() and path.stat().st_size:
            raise UserError(
                f"{path} holds the metrics of an earlier run: resume that run, "
                "or choose another run.output_dir."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            lines = [line for line in read_rows(self.folder) if line["step"] <= resume_step]
            write_bytes(path, b"".join(seal_line(line) + b"\n" for line in lines))
        self._trackers = [make_tracker(name, self.folder, resume_step) for name in trackers]
        self._file = open(path, "ab")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one line. NaN and infinities become null there and are kept from the trackers."""
        clean = {name: finite_or_none(float(value)) for name, value in metrics.items()}
        self._file.write(seal_line({"step": step} | clean) + b"\n")
        self._file.flush()
        finite = {name: value for name, value in clean.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def sync(self) -> None:
        """Flush the lines to disk, so that a power cut loses none of what a checkpoint follows."""
        os.fsync(self._file.fileno())

    def log_images(self, step: int, images: Tensor, captions: Sequence[str]) -> Path:
        """Write images (B, 3, H, W) in [0, 1] with captions to `samples/step-<step>.png`."""
        columns = [
            Column(caption=caption, images=[image])
            for image, caption in zip(to_pil(images), captions, strict=True)
        ]
        grid = draw_grid(columns)
        path = self.folder / "samples" / f"step-{step:06d}.png"
        write_bytes(path, grid)
        for tracker in self._trackers:
            tracker.image(step, Image.open(io.BytesIO(grid)).convert("RGB"))
        return path

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        with suppress(OSError) if kind else nullcontext():  # which says more, of a full disk too
            self.close()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """Return a run's metrics by ascending step, one dict a step with its number under "step".

    Lines of one step are merged; later values win. Missing values are None. Without a file the
    list is empty.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in read_rows(Path(folder)):
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return every line of a run's metrics in the file's order; damaged ones are logged."""
    lines = read_lines(folder / FILE)
    lines.warn(folder / FILE)
    return [entry for entry in lines.entries if type(entry.get("step")) is int]
