"""What a run says while it goes: `metrics.jsonl`, sample sheets, and trackers.

The JSON lines are the record: always written, flushed line by line, and repaired on resume, so
that each iteration stands in them once whatever happened to the process before.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image
from torch import Tensor

from flowrl.errors import UserError
from flowrl.training.trackers import make_tracker
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.images import Stack, png, sheet, to_pil
from flowrl.utils.templates import known

FILE = "metrics.jsonl"


class Report:
    """Writes a run's metrics and samples; a context manager. One process of a run makes one.

    `resume_step` is the last step that stays: lines after it are cut, as is a line that a crash
    left unfinished. Without it the run is new, and a folder with metrics raises UserError.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        trackers: Sequence[str] = ("tensorboard",),
        resume_step: int | None = None,
    ):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / FILE
        if resume_step is not None:
            kept = [line for line in read_lines(path) if line["step"] <= resume_step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        elif path.exists() and path.stat().st_size:
            raise UserError(
                f"{path} holds the metrics of an earlier run: resume that run, "
                "or choose another run.output_dir."
            )
        self._trackers = [make_tracker(name, self.folder, resume_step) for name in trackers]
        self._file = open(path, "a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one line. NaN and infinities become null there and are kept from the trackers."""
        clean = {name: known(float(value)) for name, value in metrics.items()}
        line = json.dumps({"step": step} | clean, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()
        finite = {name: value for name, value in clean.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(step, finite)

    def images(
        self, step: int, images: Tensor | Sequence[Image.Image], captions: Sequence[str]
    ) -> Path:
        """Write `samples/step-<step>.png`: pictures, or (B, 3, H, W) in [0, 1], with captions."""
        pictures = to_pil(images) if isinstance(images, Tensor) else images
        stacks = [
            Stack(caption=caption, pictures=[picture])
            for picture, caption in zip(pictures, captions, strict=True)
        ]
        drawn = sheet(stacks)
        path = self.folder / "samples" / f"step-{step:06d}.png"
        write_bytes(path, png(drawn))
        for tracker in self._trackers:
            tracker.image(step, drawn)
        return path

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The run's metrics by ascending step, one dict a step with its number under "step".

    Lines of one step are merged, later values first. Missing values are None. Without a file
    the list is empty.
    """
    steps: dict[int, dict[str, Any]] = {}
    for line in read_lines(Path(folder) / FILE):
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a metrics file as it stands; one that a crash cut short at the end is left out.

    Raises UserError, with the number of the line, for anything else that is not a metrics line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise UserError(
                f"line {number} of {path} is not a line of metrics: remove it by hand."
            ) from error
        found.append(row)
    return found
