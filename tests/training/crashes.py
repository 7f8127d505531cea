"""Kill a process before one of its file operations; writes are also cut in half.

Processes are forked from this one, which has everything imported and loaded.
"""

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.training.tracking import Report

CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
KILLED = 137
# The least that teaches: one group of two.
SMALLEST = {
    "prompts_per_iteration": 1, "group_size": 2, "num_inference_steps": 2, "batch_size": 2,
}  # fmt: skip


@dataclass
class Recorder:
    """Calls `seen` before each operation that changes something below `folder`."""

    folder: Path
    seen: Callable[[str, Path | None], None]  # the operation, and a file that is half-written
    on: bool = False

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or event not in CHANGES:
            return
        path, flags = args[0], args[2] if event == "open" else WRITING
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        inside = isinstance(path, int) or str(path).startswith(str(self.folder))
        relative = not isinstance(path, int) and not os.path.isabs(path)  # of rmtree
        if inside or (relative and event != "open"):
            if flags & WRITING:
                self._note(event)

    def _note(self, event: str, half: Path | None = None) -> None:
        self.on = False  # what follows is not the run's
        try:
            self.seen(event, half)
        finally:
            self.on = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        fsync, log = os.fsync, Report.log

        def synced(handle: int) -> None:
            if self.on:
                path = Path(os.readlink(f"/proc/self/fd/{handle}"))
                if path.is_file():
                    self._note("write", path)
                self._note("fsync")
            fsync(handle)

        def logged(report: Report, *args: Any) -> None:
            log(report, *args)
            if self.on:
                self._note("write", report.folder / "metrics.jsonl")

        os.fsync, Report.log, self.on = synced, logged, True  # type: ignore[method-assign]
        try:
            yield
        finally:
            os.fsync, Report.log, self.on = fsync, log, False  # type: ignore[method-assign]


def halve(path: Path) -> None:
    """Leave a file as a write that was cut short leaves it."""
    size = path.stat().st_size
    lines = path.read_bytes().splitlines(keepends=True) if path.suffix == ".jsonl" else []
    last = len(lines[-1]) if lines else size  # of a file that lines are added to
    os.truncate(path, size - (last + 1) // 2)


def fork(work: Callable[[], int]) -> int:
    """Do the work in a forked process; return its exit code, 99 for an exception."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 99
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.stdout = io.StringIO()
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_at(number: int, folder: Path, work: Callable[[], object]) -> bool:
    """Do the work in a process that ends before its operation `number`; return whether it did."""

    def doomed() -> int:
        count = [0]

        def seen(event: str, half: Path | None) -> None:
            if count[0] == number:
                if half is not None:
                    halve(half)
                os._exit(KILLED)
            count[0] += 1

        recorder = Recorder(folder, seen)
        sys.addaudithook(recorder.hook)  # a process cannot stop to hear, so only a forked one does
        with recorder.recording():
            work()
        return 0

    return fork(doomed) == KILLED
