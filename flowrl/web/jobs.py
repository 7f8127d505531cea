"""Stop runs, and plan, start and resume them in child processes.

A run is stopped as by Ctrl-C: it completes its iteration and saves. Children are `flowrl` commands
in sessions of their own, which continue when the page's server ends.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowrl.errors import UserError
from flowrl.training.owner import owner_of
from flowrl.web.form import RunForm, checked_folder
from flowrl.web.runs import RunFiles, is_run

LOGS = ".ui-logs"  # beside the runs
MOST_JOBS = 50  # in memory
SHOWN = 20_000  # bytes of the end of a child's output

Kind = Literal["plan", "dry run", "start", "resume", "train on votes"]


@dataclass(slots=True, kw_only=True)
class PageJob:
    """A child process and its output."""

    name: str
    kind: Kind
    title: str
    words: tuple[str, ...]  # after `flowrl`
    log: Path
    process: subprocess.Popen[bytes]
    folder: Path | None = None  # of the run that it starts or resumes
    began: float = field(default_factory=time.time)

    def row(self) -> dict[str, Any]:
        """Return it for the page. exit: None while it runs."""
        return {
            "job": self.name, "kind": self.kind, "title": self.title, "began": self.began,
            "pid": self.process.pid, "exit": self.process.poll(), "output": self.output(),
            "command": shlex.join(("flowrl", *self.words)),
            "run": self.title if self.folder is not None and is_run(self.folder) else None,
        }  # fmt: skip

    def output(self) -> str:
        """Return the end of its output; of a line that was overwritten, the last state."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - SHOWN))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


class Jobs:
    """Starts children and lists them; several threads may use it."""

    def __init__(self, root: Path):
        """root: the folder of runs, or a run's own, whose neighbours new ones become."""
        self.root = root.resolve().parent if is_run(root) else root.resolve()
        self._jobs: dict[str, PageJob] = {}
        self._stopping: set[tuple[int, float]] = set()  # (pid, start) of processes sent a signal
        self._lock = threading.Lock()

    def rows(self) -> list[dict[str, Any]]:
        """Return all jobs for the page, the newest first."""
        with self._lock:
            return [job.row() for job in reversed(self._jobs.values())]

    # --- stop -----------------------------------------------------------------------------------

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

    def end(self, name: str) -> None:
        """Stop a job, such as a run that still loads. Raises KeyError for an unknown one."""
        with self._lock:
            job = self._jobs[name]
            key = (job.process.pid, job.began)
            if job.process.poll() is None and key not in self._stopping:
                job.process.send_signal(signal.SIGTERM)
                self._stopping.add(key)

    # --- children -------------------------------------------------------------------------------

    def order(self, kind: Kind, form: RunForm) -> PageJob:
        """Plan, rehearse, or train in a new folder.

        Raises FieldRefusal for a field that cannot be used.
        """
        folder = checked_folder(self.root, form.folder) if kind == "start" else None
        words = ["plan" if kind == "plan" else "train", *form.words(self.root)]
        words += ["--dry-run"] if kind == "dry run" else []
        words += [f"run.output_dir={json.dumps(str(folder))}"] if folder else []
        return self._begin(kind, form.folder or form.recipe, tuple(words), folder)

    def resume(self, run: RunFiles) -> PageJob:
        """Resume a run from its newest intact checkpoint, with the recipe it has saved.

        Raises UserError for a run that trains, or has no checkpoint.
        """
        state = run.state()
        if state.name in ("running", "elsewhere"):
            raise UserError(f"{run.name} {state.detail or 'is running'}")
        if not run.checkpoints():
            raise UserError(f"{run.name} has no checkpoint to resume from")
        if self._runs("resume", run.name):
            raise UserError(f"{run.name} is being resumed")
        words = ("train", "--resume", str(run.path))
        if run.last("stop").get("reason") == "time":
            words += ("run.max_minutes=null",)  # or it would end at once
        return self._begin("resume", run.name, words, run.path)

    def train_on_votes(self, words: Sequence[str]) -> PageJob:
        """Run `flowrl` with these words. Raises UserError while another such job runs."""
        if self._runs("train on votes", self.root.name):
            raise UserError("a LoRA is being trained on the votes")
        return self._begin("train on votes", self.root.name, tuple(words))

    def _runs(self, kind: Kind, title: str) -> bool:
        with self._lock:
            return any(
                job.process.poll() is None
                for job in self._jobs.values() if (job.kind, job.title) == (kind, title)
            )  # fmt: skip

    def _begin(
        self, kind: Kind, title: str, words: tuple[str, ...], folder: Path | None = None
    ) -> PageJob:
        logs = self.root / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        name = uuid.uuid4().hex[:12]
        path = logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{kind.replace(' ', '-')}-{name}.log"
        variables = os.environ | {"PYTHONUNBUFFERED": "1"}
        with open(path, "wb") as log, self._lock:
            # A session of its own, so that Ctrl-C of the server does not reach it.
            process = subprocess.Popen(
                [sys.executable, "-m", "flowrl", *words], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env=variables, start_new_session=True,
            )  # fmt: skip
            job = self._jobs[name] = PageJob(
                name=name, kind=kind, title=title, words=words, log=path, process=process,
                folder=folder,
            )  # fmt: skip
            ended = [n for n, j in self._jobs.items() if j.process.poll() is not None]
            for old in ended[: max(0, len(self._jobs) - MOST_JOBS)]:
                del self._jobs[old]
        return job
