"""Which process trains in a run's folder: `.owner.json` beside the lock, for others to read.

The lock alone keeps a second process out; this file says whom to ask to stop. A killed process
leaves it behind, so that a reader looks whether that very process is still there.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

FILE = ".owner.json"
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

    def process(self) -> psutil.Process | None:
        """Return the process; None when it has ended, or runs on another machine."""
        if not self.is_here or self.pid <= 0:
            return None
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.began) < CLOCK_S
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except (psutil.Error, OverflowError):
            return None


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Say inside the block that this process trains in a folder, which it has locked."""
    from flowrl.utils.files import write_text  # which loads torch; readers do without

    own = psutil.Process()
    owner = Owner(pid=own.pid, began=own.create_time(), host=socket.gethostname())
    write_text(run_dir / FILE, json.dumps(asdict(owner)))
    try:
        yield
    finally:
        with suppress(OSError):  # which would hide the error that ends the block
            (run_dir / FILE).unlink(missing_ok=True)


def owner_of(run_dir: Path) -> Owner | None:
    """Return who trains in a folder, or did when it was killed; None for nobody."""
    try:
        said = json.loads((run_dir / FILE).read_bytes()[:4096])
        owner = Owner(pid=int(said["pid"]), began=float(said["began"]), host=str(said["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return owner
