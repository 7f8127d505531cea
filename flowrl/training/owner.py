"""Which process trains in a run's folder: `.owner.json` beside the lock, for others to read.

The lock alone keeps a second process out; this file says whom to ask to stop. A killed process
leaves it behind, and a stranger's folder may name any process, so that a reader looks whether that
very process has the folder's lock open.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from flowrl.errors import UserError
from flowrl.utils.untrusted import read_json

FILE, LOCK = ".owner.json", ".lock"
CLOCK_S = 2.0  # by which the time that a process began may seem to move with the machine's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The main process of a training session."""

    pid: int
    began: float  # seconds since 1970
    host: str

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    def process(self, run_dir: Path) -> psutil.Process | None:
        """Return the process that holds the lock of the run folder.

        None when it has ended, runs on another machine, or has not opened this folder's lock.
        """
        if not self.is_here or self.pid <= 0:
            return None
        lock = str(Path(run_dir).resolve() / LOCK)  # of the lock itself no link is followed
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.began) < CLOCK_S
            if not same or process.status() == psutil.STATUS_ZOMBIE:
                return None
            return process if any(file.path == lock for file in process.open_files()) else None
        except (psutil.Error, OSError, OverflowError):
            return None


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Say inside the block that this process trains in a folder, which it has locked."""
    from flowrl.utils.files import write_text  # which loads torch; readers do without

    process = psutil.Process()
    owner = Owner(pid=process.pid, began=process.create_time(), host=socket.gethostname())
    write_text(run_dir / FILE, json.dumps(asdict(owner)))
    try:
        yield
    finally:
        with suppress(OSError):  # which would hide the error that ends the block
            (run_dir / FILE).unlink(missing_ok=True)


def owner_of(run_dir: Path) -> Owner | None:
    """Return who trains in a folder, or did when it was killed; None for nobody."""
    try:
        said = read_json(run_dir / FILE, inside=run_dir, limit=4096)
        owner = Owner(pid=int(said["pid"]), began=float(said["began"]), host=str(said["host"]))
    except (OSError, UserError, OverflowError, ValueError, KeyError, TypeError):
        return None
    return owner
