"""Stop runs, and resume them in child processes.

A run is stopped as by Ctrl-C: it completes its iteration and saves. A resumed one is a `flowrl`
command in a session of its own, which continues when the page's server ends.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from flowrl.errors import UserError
from flowrl.training.owner import owner_of
from flowrl.web.runs import RunFiles, is_run

LOGS = ".ui-logs"  # beside the runs


class Control:
    """Stops and resumes runs; several threads may use it."""

    def __init__(self, root: Path):
        """root: the folder of runs, or a run's own, beside which the output of resumed ones is."""
        self.root = root.resolve().parent if is_run(root) else root.resolve()
        self._resumed: dict[Path, subprocess.Popen[bytes]] = {}  # by the run's folder
        self._stopping: set[tuple[int, float]] = set()  # (pid, start) of processes sent a signal
        self._lock = threading.Lock()

    def running(self) -> int:
        """Return how many runs still train that were resumed here."""
        with self._lock:
            return sum(process.poll() is None for process in self._resumed.values())

    def stopping(self, run: RunFiles) -> bool:
        """Return whether the run's process was sent a signal and has not ended yet."""
        owner = owner_of(run.path)
        return owner is not None and (owner.pid, owner.began) in self._stopping

    def stop(self, run: RunFiles) -> None:
        """Send a run the signal to complete its iteration, save and stop, once.

        Raises UserError when no process of this machine trains there.
        """
        owner = owner_of(run.path)
        process = None if owner is None else owner.process(run.path)
        if owner is None or process is None:
            raise UserError(f"no process of this machine trains in {run.name}")
        with self._lock:
            if (owner.pid, owner.began) in self._stopping:
                return  # a second signal would end it at once, in the middle of an iteration
            process.send_signal(signal.SIGTERM)
            self._stopping.add((owner.pid, owner.began))

    def resume(self, run: RunFiles) -> Path:
        """Resume a run from its newest intact checkpoint, with the recipe it has saved.

        Returns the file of the command's output. Raises UserError for a run that trains, or has no
        checkpoint.
        """
        state = run.state()
        if state.name in ("running", "elsewhere"):
            raise UserError(f"{run.name} {state.detail or 'is running'}")
        if not run.checkpoints():
            raise UserError(f"{run.name} has no checkpoint to resume from")
        path = self.root / LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{run.path.name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            earlier = self._resumed.get(run.path)
            if earlier is not None and earlier.poll() is None:
                raise UserError(f"{run.name} is being resumed")
            with open(path, "ab") as log:
                # A session of its own, so that Ctrl-C of the server does not reach it; and one
                # process, whatever launched the server.
                self._resumed[run.path] = subprocess.Popen(
                    [sys.executable, "-m", "flowrl", "train", "--resume", str(run.path)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=_environment(), start_new_session=True,
                )  # fmt: skip
        return path


def _environment() -> dict[str, str]:
    launcher = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return inherited | {"PYTHONUNBUFFERED": "1"}
