"""Read run folders for people: lists, states, images, recipes. Nothing here loads torch.

Folders may be damaged, half-written or somebody else's: whatever cannot be read is left out. File
names are made here, from numbers, and links that lead out of a run are not followed.
"""

import io
import json
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

from flowrl.config.load import differences
from flowrl.training.ledger import FILE as LEDGER
from flowrl.training.ledger import Event, Ledger
from flowrl.training.owner import owner_of
from flowrl.utils.templates import finite_or_none
from flowrl.utils.untrusted import (
    RefusedFile,
    is_readable,
    open_regular,
    parse_json,
    read_bytes,
)
from flowrl.web.metrics_log import MetricsLog, held_out_first, stamp_of

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
RUN_PARTS = {  # folders of a run, in which no other run is looked for
    "checkpoints", "evaluations", "set-aside", "gallery", "samples", "tensorboard", "stores",
    "card",
}  # fmt: skip
DEPTH = 3  # folders below RUNS
MOST_RUNS, MOST_FOLDERS = 500, 5000  # that are shown, and looked at
MOST_TEXT = 2000  # characters of a prompt or of an option's value
MOST_ROWS = 200  # events, images, evaluations with intervals
MOST_SCORES = 100_000  # images of an evaluation
RESULTS = {  # what a run leaves, by what people call it
    "LoRA": "pytorch_lora_weights.safetensors",
    "card": "README.md",
    "gallery": "gallery/index.html",
}
PNG = b"\x89PNG\r\n\x1a\n"
MOST_IMAGE = MOST_LEDGER = 64 * 2**20  # bytes
SCAN_S = 1.0  # for which a list of folders holds
STEP = re.compile(r"step-(\d{6,12})")

StateName = Literal["running", "finished", "stopped", "failed", "killed", "elsewhere", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """How a run stands, and in words why."""

    name: StateName
    detail: str = ""
    pid: int | None = None  # of the process that trains


@dataclass(slots=True)
class RunFiles:
    """One run folder."""

    name: str  # its path below RUNS, with slashes
    path: Path
    log: MetricsLog = field(init=False)
    _ledger: tuple[Any, list[Event]] = field(init=False, default=(None, []))
    _margins: dict[Any, dict[str, float]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.log = MetricsLog(self.path / METRICS)

    # --- state and recipe -----------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return the ledger, oldest first; empty for a run without."""
        path = self.path / LEDGER
        stamp = stamp_of(path)
        if self._ledger[0] != stamp:
            events: list[Event] = []
            if stamp[1] <= MOST_LEDGER and is_readable(path, inside=self.path):
                try:
                    events = [e for e in Ledger(self.path).events() if isinstance(e["event"], str)]
                except (OSError, RefusedFile):
                    events = []
            self._ledger = stamp, events
        return self._ledger[1]

    def last(self, *names: str) -> Event:
        """Return the latest event of one of these names, empty when there is none."""
        return next((e for e in reversed(self.events()) if e["event"] in names), {})

    def state(self) -> RunState:
        owner = owner_of(self.path)
        if owner is not None and owner.process(self.path) is not None:
            return RunState(name="running", pid=owner.pid)
        last = self.last("start", "resume", "stop")
        if last.get("event") == "stop":
            return self._stopped(last)
        if owner is not None and not owner.is_here:
            host = _text(owner.host, 80)
            return RunState(name="elsewhere", detail=f"trains on {host}, or was killed there")
        if not last:
            return RunState(name="unknown", detail="it has no ledger")
        return RunState(name="killed", detail="the process was killed; it can be resumed")

    def _stopped(self, event: Event) -> RunState:
        detail, reason = _text(event.get("detail", "")), event.get("reason")
        if reason == "time":
            total = _whole(_at(self.recipe(), "run", "iterations"))
            done = f"{_whole(event.get('step'))} of {total} iterations"
            folder = shlex.quote(str(self.path))
            advice = f"continue: flowrl train --resume {folder} run.max_minutes=null"
            detail = f"stopped by run.max_minutes after {done}; {advice}"
            return RunState(name="stopped", detail=detail)
        if event.get("complete"):
            return RunState(name="finished", detail=detail)
        if reason == "interrupted":
            return RunState(name="stopped", detail="interrupted; it can be resumed")
        return RunState(name="failed", detail=detail)

    def recipe(self) -> dict[str, Any]:
        """Return every option in force, nested, by the ledger; empty without one."""
        recipe = self.last("start", "resume").get("recipe")
        return recipe if isinstance(recipe, dict) else {}

    def recipe_text(self) -> str:
        try:
            with open_regular(self.path / CONFIG, inside=self.path) as file:
                return file.read(100_000).decode(errors="replace")
        except (OSError, RefusedFile):
            return ""

    def summary(self) -> dict[str, Any]:
        """Return a line of the list of runs."""
        self.log.read()
        state, recipe, ends = self.state(), self.recipe(), self.log.ends()
        hacking = self.last("hacking")
        return {
            "run": self.name,
            "state": state.name,
            "detail": state.detail,
            "step": max(*self.checkpoints()[-1:], ends["step"], 0),
            "iterations": _whole(_at(recipe, "run", "iterations")),
            "objective": _text(_at(recipe, "objective", "kind"), 80),
            "pipeline": _text(_at(recipe, "pipeline", "path"), 200),
            "reward": ends["latest"].get("reward/mean"),
            "base": ends["base"],
            "held_out": ends["held_out"],
            "held_out_step": ends["held_out_step"],
            "hacking": _text(hacking.get("detail")),
            "hacking_step": _whole(hacking.get("step")),
            "updated": _time(self.path / METRICS) or _time(self.path / LEDGER),
        }

    def details(self) -> dict[str, Any]:
        """Return everything of a run but its curves and images."""
        summary, means = self.summary(), self.log.means()
        return summary | {
            "metrics": [[name, means[name]] for name in held_out_first(means)],
            "damaged": self.log.damaged,
            "samples": self.samples(),
            "evaluations": self.evaluations(),
            "checkpoints": self.checkpoints(),
            "events": self.journal(),
            "path": shlex.quote(str(self.path)),
            "results": {name: size for name in RESULTS if (size := self.result_size(name))},
        }

    # --- results --------------------------------------------------------------------------------

    def result_size(self, name: str) -> int:
        """Return the bytes of a result, 0 where there is none to open."""
        path = self.path / RESULTS[name]
        return stamp_of(path)[1] if is_readable(path, inside=self.path) else 0

    def result(self, name: str) -> BinaryIO:
        """Open one of RESULTS. Raises FileNotFoundError where there is none to open."""
        try:
            return open_regular(self.path / RESULTS[name], inside=self.path)
        except (OSError, RefusedFile) as error:
            raise FileNotFoundError from error

    def margins(self) -> dict[int, dict[str, float]]:
        """Return half of the 95 % interval over prompts of held-out means, by step and metric."""
        margins = {}
        for step in self.evaluations()[-MOST_ROWS:]:
            key = step, stamp_of(self.path / f"evaluations/step-{step:06d}.safetensors")
            if key not in self._margins:
                self._margins[key] = self._margin(step)
            margins[step] = self._margins[key]
        return margins

    def _margin(self, step: int) -> dict[str, float]:
        import numpy as np

        with suppress(FileNotFoundError), self._evaluation(step) as (file, content):
            names = content["names"]
            tensors = (content[key]["__tensor__"] for key in ("prompt", "scores"))
            prompt, scores = map(file.get_slice, tensors)
            rows = min(MOST_SCORES, *prompt.get_shape())
            prompt, scores = prompt[:rows], scores[:rows, : len(names)]
            margins = {}
            for name, column in zip(names, scores.T.astype(float), strict=True):
                valid = np.isfinite(column)
                of_row = np.unique(prompt[valid], return_inverse=True)[1]
                prompts = of_row.max(initial=0) + 1
                if prompts > 1:
                    sums = np.bincount(of_row, column[valid] - column[valid].mean())
                    spread = (sums @ sums * prompts / (prompts - 1)) ** 0.5
                    margins[f"eval/{name}"] = float(1.96 * spread / len(of_row))
            return margins
        return {}

    # --- images ---------------------------------------------------------------------------------

    def samples(self) -> list[int]:
        """Return the iterations that have a grid of training images."""
        return _steps(self.path / "samples", ".png")

    def evaluations(self) -> list[int]:
        return _steps(self.path / "evaluations", ".safetensors")

    def checkpoints(self) -> list[int]:
        """Return the iterations after which the run can be resumed."""
        folder = self.path / "checkpoints"
        return [
            step for step in _steps(folder, "")
            if (folder / f"step-{step:06d}" / "state.safetensors").is_file()
        ]  # fmt: skip

    def sample(self, step: int) -> bytes:
        """Return the PNG of a grid. Raises FileNotFoundError where there is none to show."""
        try:
            path = self.path / f"samples/step-{step:06d}.png"
            data = read_bytes(path, inside=self.path, limit=MOST_IMAGE)
        except (OSError, RefusedFile) as error:
            raise FileNotFoundError from error
        if not data.startswith(PNG):
            raise FileNotFoundError
        return data

    def held_out(self, step: int) -> dict[str, Any]:
        """Return prompts and scores of an evaluation's images.

        Raises FileNotFoundError where there is none that can be read.
        """
        with self._evaluation(step) as (file, content):
            count = file.get_slice(content["images"]["__tensor__"]).get_shape()[0]
            count = min(count, MOST_ROWS, len(content["prompts"]))
            scores = file.get_slice(content["scores"]["__tensor__"])[:count].tolist()
            return {
                "prompts": [_text(prompt) for prompt in content["prompts"][:count]],
                "names": [_text(name, 80) for name in content["names"]],
                "scores": [[finite_or_none(score) for score in row] for row in scores],
            }

    def held_out_image(self, step: int, row: int) -> bytes:
        """Return one of them as a PNG. Raises FileNotFoundError where there is none."""
        from PIL import Image

        with self._evaluation(step) as (file, content):
            images = file.get_slice(content["images"]["__tensor__"])
            count, channels, height, width = images.get_shape()
            if not 0 <= row < count or channels != 3 or height * width > MOST_IMAGE // 3:
                raise FileNotFoundError
            pixels = images[row : row + 1][0].transpose(1, 2, 0)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    @contextmanager
    def _evaluation(self, step: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Open an evaluation: (file, content). What cannot be read raises FileNotFoundError."""
        from safetensors import safe_open

        path = self.path / f"evaluations/step-{step:06d}.safetensors"
        if not is_readable(path, inside=self.path):
            raise FileNotFoundError(str(path))
        try:
            with safe_open(path, framework="np") as file:
                content = parse_json((file.metadata() or {})["state"], str(path))
                if not all(isinstance(content[name], list) for name in ("prompts", "names")):
                    raise TypeError
                yield file, content
        except Exception as error:  # a damaged file may be wrong in any way
            raise FileNotFoundError(str(path)) from error

    # --- tables ---------------------------------------------------------------------------------

    def journal(self) -> list[dict[str, Any]]:
        """Return the latest events of the ledger without recipes and digests, newest first."""
        rows = []
        for event in reversed(self.events()[-MOST_ROWS:]):
            changed = event.get("changed")
            changed = changed if isinstance(changed, dict) else {}
            parts = [event.get("reason"), event.get("detail"), event.get("to")]
            parts += [f"{name}: {_json(value, 200)}" for name, value in changed.items()]
            rows.append(
                {
                    "event": _text(event["event"], 40),
                    "time": _text(event.get("time"), 40),
                    "step": _whole(event.get("step")),
                    "detail": _text("; ".join(str(part) for part in parts if part)),
                }
            )
        return rows


def recipe_differences(one: RunFiles, other: RunFiles) -> list[dict[str, str]]:
    """Return the options in which the recipes of two runs differ."""
    changed = differences(one.recipe(), other.recipe())
    return [
        {"option": _text(name, 200), "one": _json(a), "other": _json(b)}
        for name, (a, b) in changed.items()
    ][:MOST_ROWS]


# --- folders -------------------------------------------------------------------------------------


class RunFolders:
    """The runs below a folder."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._runs: dict[str, RunFiles] = {}
        self._scanned = float("-inf")
        self._lock = threading.Lock()

    def runs(self) -> list[RunFiles]:
        """Return all runs, those that changed last first."""
        with self._lock:
            if time.monotonic() - self._scanned > SCAN_S:
                self._runs = {
                    name: self._runs.get(name) or RunFiles(name, path)
                    for name, path in islice(self._find(), MOST_RUNS)
                }
                self._scanned = time.monotonic()
            runs = list(self._runs.values())
        return sorted(runs, key=lambda run: _time(run.path / METRICS) or 0.0, reverse=True)

    def run(self, name: str) -> RunFiles:
        """Return the run of a name. Raises KeyError: no name leads to a folder that is no run."""
        run = self._runs.get(name)
        return run if run is not None else {run.name: run for run in self.runs()}[name]

    def _find(self) -> Iterator[tuple[str, Path]]:
        for folder, below, _ in islice(os.walk(self.root), MOST_FOLDERS):  # follows no links
            path = Path(folder)
            name = path.relative_to(self.root)
            if is_run(path):
                yield name.as_posix() if name.parts else self.root.name, path
            inner = sorted(n for n in below if n not in RUN_PARTS and n[0] != ".")
            below[:] = inner if len(name.parts) < DEPTH else []


def is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / METRICS).is_file()


def _steps(folder: Path, ending: str) -> list[int]:
    """Return the numbers of the entries `step-NNNNNN<ending>` of a folder, ascending."""
    names = (path.name.removesuffix(ending) for path in folder.glob(f"step-*{ending}"))
    return sorted(int(match[1]) for name in names if (match := STEP.fullmatch(name)))


# --- values of strangers -------------------------------------------------------------------------


def _time(path: Path) -> float | None:
    return stamp_of(path)[0] / 1e9 or None


def _at(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**53 else None


def _text(value: Any, most: int = MOST_TEXT) -> str:
    """Return a text that is cut where it is long."""
    text = "" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _json(value: Any, most: int = MOST_TEXT) -> str:
    return _text(json.dumps(value, ensure_ascii=False), most)
