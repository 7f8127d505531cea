"""What run folders hold, read for people: lists, states, images, recipes. Nothing here loads torch.

Folders may be damaged, half-written or somebody else's: whatever cannot be read is left out. Files
are named by this program alone, from numbers, and links that lead out of a run are not followed.
"""

import io
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowrl.config.load import differences
from flowrl.config.yaml12 import load_yaml
from flowrl.errors import UserError
from flowrl.training.ledger import FILE as LEDGER
from flowrl.training.ledger import Event, Ledger
from flowrl.training.owner import FILE as OWNER
from flowrl.training.owner import owner_of
from flowrl.utils.untrusted import (
    RefusedFile,
    is_readable,
    open_regular,
    parse_json,
    read_tail,
)
from flowrl.web.metrics_log import Glance, MetricsLog, held_out_first

CONFIG, METRICS, AUDITS = "config.yaml", "metrics.jsonl", "audits.jsonl"
OWN = {  # folders of a run, in which no other run is looked for
    "checkpoints", "evaluations", "set-aside", "gallery", "samples", "tensorboard", "stores",
    "card",
}  # fmt: skip
DEPTH = 3  # folders below RUNS
MOST_RUNS = 500
MOST_LOGS = 32  # runs whose curves are kept in memory
MOST_TEXT = 2000  # characters of a prompt or of an option's value
MOST_ROWS = 200  # events, audits, images
MOST_IMAGE = MOST_LEDGER = 64 * 2**20  # bytes
MOST_AUDITS = 4 * 2**20  # bytes, of the latest
SCAN_S = 1.0  # for which a list of folders holds
STEP = re.compile(r"step-(\d{6,12})")
PNG = b"\x89PNG\r\n\x1a\n"

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
    glance: Glance = field(init=False)
    _ledger: tuple[Any, list[Event]] = field(init=False, default=(None, []))

    def __post_init__(self) -> None:
        self.glance = Glance(self.path / METRICS)

    def stamp(self) -> tuple[Any, ...]:
        """Return what changes whenever something that people see here changes."""
        names = (METRICS, LEDGER, CONFIG, AUDITS, OWNER, "samples", "evaluations", "checkpoints")
        owner = owner_of(self.path)
        alive = owner is not None and owner.process(self.path) is not None
        return (self.name, alive, *(_stamp(self.path / name) for name in names))

    def events(self) -> list[Event]:
        """Return the ledger, oldest first; empty for a run without."""
        path = self.path / LEDGER
        now = _stamp(path)
        if self._ledger[0] != now:
            try:
                fits = now[1] <= MOST_LEDGER and is_readable(path, inside=self.path)
                known = Ledger(self.path).events() if fits else []
                found = [event for event in known if isinstance(event["event"], str)]
            except (OSError, RefusedFile):
                found = []
            self._ledger = now, found
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
            detail = _text(last.get("detail", ""))
            if last.get("complete"):
                why = {"time": "its time was over (run.max_minutes)", "hacking": detail}
                return RunState(name="finished", detail=why.get(str(last.get("reason")), ""))
            if last.get("reason") == "interrupted":
                return RunState(name="stopped", detail="asked to stop; it can go on")
            return RunState(name="failed", detail=detail)
        if owner is not None and not owner.is_here:
            where = _text(owner.host, 80)
            return RunState(name="elsewhere", detail=f"trains on {where}, or was killed there")
        if not last:
            done = (self.path / "README.md").exists()
            return RunState(name="finished" if done else "unknown", detail="it has no ledger")
        return RunState(name="killed", detail="its process ended without a word; it can go on")

    def recipe(self) -> dict[str, Any]:
        """Return every option in force, nested; empty where none can be read."""
        found = self.last("start", "resume").get("recipe")
        if found is None:
            try:
                found = load_yaml(self.recipe_text(), CONFIG)
            except (UserError, RecursionError):
                found = None
        return found if isinstance(found, dict) else {}

    def recipe_text(self) -> str:
        try:
            with open_regular(self.path / CONFIG, inside=self.path) as file:
                return file.read(100_000).decode(errors="replace")
        except (OSError, RefusedFile):
            return ""

    def summary(self) -> dict[str, Any]:
        """Return a line of the list of runs."""
        self.glance.look()
        state, recipe, seen = self.state(), self.recipe(), self.glance
        steps = [*self.checkpoints()[-1:], seen.step or 0]
        return {
            "run": self.name,
            "state": state.name,
            "detail": state.detail,
            "step": max(steps),
            "iterations": _whole(_at(recipe, "run", "iterations")),
            "objective": _text(_at(recipe, "objective", "kind"), 80),
            "pipeline": _text(_at(recipe, "pipeline", "path"), 200),
            "reward": seen.latest.get("reward/mean"),
            "base": seen.base,
            "held_out": seen.held_out,
            "held_out_step": seen.held_out_step,
            "updated": _time(self.path / METRICS) or _time(self.path / LEDGER),
        }

    def details(self, log: MetricsLog) -> dict[str, Any]:
        """Return everything of a run but its curves and images."""
        summaries = log.summaries()
        names = held_out_first(summaries)
        return self.summary() | {
            "metrics": [[name, summaries[name]] for name in names],
            "damaged": log.damaged,
            "samples": self.samples(),
            "evaluations": self.evaluations(),
            "checkpoints": self.checkpoints(),
            "events": self.told_events(),
            "audits": self.audits(),
        }

    # --- images ---------------------------------------------------------------------------------

    def samples(self) -> list[int]:
        """Return the iterations of which a grid of training images is there."""
        return _steps(self.path / "samples", ".png")

    def evaluations(self) -> list[int]:
        return _steps(self.path / "evaluations", ".safetensors")

    def checkpoints(self) -> list[int]:
        """Return the iterations after which the run can go on."""
        found = _steps(self.path / "checkpoints", "")
        folder = self.path / "checkpoints"
        return [s for s in found if (folder / f"step-{s:06d}" / "state.safetensors").is_file()]

    def sample(self, step: int) -> bytes:
        """Return the PNG of a grid. Raises FileNotFoundError where there is none to show."""
        path = self._inside(f"samples/step-{step:06d}.png")
        if path.stat().st_size > MOST_IMAGE:
            raise FileNotFoundError
        data = path.read_bytes()
        if not data.startswith(PNG):
            raise FileNotFoundError
        return data

    def held_out(self, step: int) -> dict[str, Any]:
        """Return prompts and scores of the held-out images that an evaluation kept.

        Raises FileNotFoundError where there is none that can be read.
        """
        with _opened(self._inside(f"evaluations/step-{step:06d}.safetensors")) as (file, said):
            count = file.get_slice(said["images"]["__tensor__"]).get_shape()[0]
            count = min(count, MOST_ROWS, len(said["prompts"]))
            scores = file.get_slice(said["scores"]["__tensor__"])[:count].tolist()
            names = [_text(name, 80) for name in said["names"]]
            prompts = [_text(prompt) for prompt in said["prompts"][:count]]
        return {"prompts": prompts, "names": names, "scores": [_known(row) for row in scores]}

    def held_out_image(self, step: int, row: int) -> bytes:
        """Return one of them as a PNG. Raises FileNotFoundError where there is none."""
        from PIL import Image

        with _opened(self._inside(f"evaluations/step-{step:06d}.safetensors")) as (file, said):
            images = file.get_slice(said["images"]["__tensor__"])
            count, channels, height, width = images.get_shape()
            if not 0 <= row < count or channels != 3 or height * width > MOST_IMAGE // 3:
                raise FileNotFoundError
            pixels = images[row : row + 1][0].transpose(1, 2, 0)
            if pixels.dtype != "uint8":
                raise FileNotFoundError
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
        return buffer.getvalue()

    def _inside(self, name: str) -> Path:
        """Return a file of this run. Raises FileNotFoundError for one that a link leads away to."""
        try:
            path = (self.path / name).resolve(strict=True)
        except (OSError, RuntimeError) as error:  # a loop of links
            raise FileNotFoundError(name) from error
        if not path.is_relative_to(self.path.resolve()) or not path.is_file():
            raise FileNotFoundError(name)
        return path

    # --- tables ---------------------------------------------------------------------------------

    def told_events(self) -> list[dict[str, Any]]:
        """Return the latest events of the ledger without recipes and digests, newest first."""
        found = []
        for event in reversed(self.events()[-MOST_ROWS:]):
            changed = event.get("changed") or {}
            parts = [f"{n}: {_json(v, 200)}" for n, v in changed.items()] if changed else []
            told = [event.get("reason"), event.get("detail"), event.get("to"), *parts]
            found.append(
                {
                    "event": _text(event["event"], 40),
                    "time": _text(event.get("time"), 40),
                    "step": _whole(event.get("step")),
                    "detail": _text("; ".join(str(t) for t in told if t)),
                }
            )
        return found

    def audits(self) -> list[dict[str, Any]]:
        """Return the latest audits of cheap candidates, newest first."""
        try:
            data = read_tail(self.path / AUDITS, inside=self.path, limit=MOST_AUDITS)
            lines = data.splitlines()
        except (OSError, RefusedFile):
            return []
        found = []
        for line in lines[-MOST_ROWS:]:
            try:
                audit = parse_json(line, AUDITS)
                told = {name: _text(audit[name], 400) for name in ("precision", "action", "text")}
                found.append(told | {"iteration": _whole(audit["iteration"])})
            except (UserError, KeyError, TypeError):
                continue
        return found[::-1]


def recipe_differences(one: RunFiles, other: RunFiles) -> list[dict[str, str]]:
    """Return the options in which the recipes of two runs differ."""
    found = differences(one.recipe(), other.recipe())
    return [
        {"option": _text(name, 200), "one": _json(a), "other": _json(b)}
        for name, (a, b) in found.items()
    ][:MOST_ROWS]


class RunFolders:
    """The runs below a folder, and the curves of those that somebody looks at."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._runs: dict[str, RunFiles] = {}
        self._logs: OrderedDict[str, MetricsLog] = OrderedDict()
        self._scanned = float("-inf")
        self._lock = threading.Lock()

    def runs(self) -> list[RunFiles]:
        """Return all runs, those that changed last first."""
        with self._lock:
            if time.monotonic() - self._scanned > SCAN_S:
                found = {name: path for name, path in self._find()}
                self._runs = {
                    name: self._runs.get(name) or RunFiles(name, path)
                    for name, path in found.items()
                }
                self._scanned = time.monotonic()
            known = list(self._runs.values())
        return sorted(known, key=lambda run: _time(run.path / METRICS) or 0.0, reverse=True)

    def run(self, name: str) -> RunFiles:
        """Return the run of a name. Raises KeyError: no name leads to a folder that is no run."""
        found = self._runs.get(name)
        if found is None:
            found = {run.name: run for run in self.runs()}[name]
        return found

    def log(self, name: str) -> MetricsLog:
        """Return what is known of a run's metrics. Raises KeyError as `run` does."""
        run = self.run(name)
        with self._lock:
            log = self._logs.pop(name, None) or MetricsLog(run.path / METRICS)
            self._logs[name] = log
            while len(self._logs) > MOST_LOGS:
                self._logs.popitem(last=False)
            return log

    def _find(self) -> Iterator[tuple[str, Path]]:
        if is_run(self.root):
            yield self.root.name, self.root
        count, level = 0, [self.root]
        for _ in range(DEPTH):
            below = [path for folder in level for path in _folders(folder)]
            for path in below:
                if is_run(path) and count < MOST_RUNS:
                    count += 1
                    yield path.relative_to(self.root).as_posix(), path
            level = below[: 10 * MOST_RUNS]


def is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() or (path / METRICS).is_file()


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            names = [e.name for e in found if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if name not in OWN and name[0] != "."]


def _steps(folder: Path, ending: str) -> list[int]:
    """Return the numbers of the entries `step-NNNNNN<ending>` of a folder, ascending."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = (STEP.fullmatch(n.removesuffix(ending)) for n in names if n.endswith(ending))
    return sorted(int(match[1]) for match in found if match)


class _opened:
    """Open an evaluation: (file, what it says). Everything unreadable is a FileNotFoundError."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> tuple[Any, dict[str, Any]]:
        from safetensors import SafetensorError, safe_open

        try:
            self._file = safe_open(self.path, framework="np").__enter__()
            said = parse_json((self._file.metadata() or {})["state"], str(self.path))
            assert isinstance(said["prompts"], list) and isinstance(said["names"], list)
            return self._file, said
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AssertionError,
                UserError) as error:  # fmt: skip
            raise FileNotFoundError(str(self.path)) from error

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self._file.__exit__(None, None, None)
        if kind is not None and not issubclass(kind, FileNotFoundError):
            if issubclass(kind, Exception):
                raise FileNotFoundError(str(self.path)) from error


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _time(path: Path) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _at(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**53 else None


def _known(row: list[Any]) -> list[float | None]:
    return [v if isinstance(v, float) and abs(v) < float("inf") else None for v in row]


def _text(value: Any, most: int = MOST_TEXT) -> str:
    """Return a text that is cut where it is long."""
    text = "" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def _json(value: Any, most: int = MOST_TEXT) -> str:
    return _text(json.dumps(value, ensure_ascii=False), most)
