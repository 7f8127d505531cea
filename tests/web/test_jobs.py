"""Stopping, and children that plan, start and resume."""

import json
import signal
import subprocess
import sys
import time

import pytest

from flowrl.errors import UserError
from flowrl.training.checkpoint import LATEST, claim
from flowrl.web import jobs as module
from flowrl.web.form import RunForm
from flowrl.web.jobs import Jobs
from flowrl.web.runs import RunFiles

WORK = """
import json, os, psutil, signal, socket, sys, time
folder, got = sys.argv[1], []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
own = {"pid": os.getpid(), "began": psutil.Process().create_time(), "host": socket.gethostname()}
lock = open(folder + "/.lock", "w")
open(folder + "/.owner.json", "w").write(json.dumps(own))
open(folder + "/ready", "w").close()
while not os.path.exists(folder + "/enough"):
    time.sleep(0.01)
open(folder + "/signals", "w").write(str(len(got)))
"""  # in place of a training process, and without its imports


class Child:
    """Stands for a process: what was asked to run, and how it ended."""

    def __init__(self, command, **how):
        self.command, self.pid, self.ended, self.signals = command, 1, None, []

    def poll(self) -> int | None:
        return self.ended

    def send_signal(self, number):
        self.signals.append(number)


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(module.subprocess, "Popen", Child)
    (tmp_path / "runs").mkdir(exist_ok=True)
    return Jobs(tmp_path / "runs")


def test_a_run_is_asked_to_stop_once_however_often_one_clicks(make_folder, tmp_path):
    run = RunFiles("run", make_folder())
    child = subprocess.Popen([sys.executable, "-c", WORK, str(run.path)])
    try:
        while not (run.path / "ready").exists():
            assert child.poll() is None
            time.sleep(0.02)
        assert run.state().name == "running" and run.state().pid == child.pid
        jobs = Jobs(tmp_path / "runs")
        assert not jobs.stopping(run)
        for _ in range(3):
            jobs.stop(run)
            assert jobs.stopping(run)
        (run.path / "enough").touch()
        child.wait(120)
    finally:
        child.kill()
        child.wait()
    assert (run.path / "signals").read_text() == "1"
    assert run.state().name == "killed"
    with pytest.raises(UserError, match="no process of this machine trains in run"):
        jobs.stop(run)


def test_a_job_leads_to_its_run_once_that_is_there_and_no_folder_is_started_twice(jobs):
    form = RunForm(recipe="quickstart", folder="new", changes=("optim.lr=1e-4", "", " run.seed=3 "))
    place = f"run.output_dir={json.dumps(str(jobs.root / 'new'))}"
    words = ["train", "quickstart", "optim.lr=1e-4", "run.seed=3", place]
    assert jobs.order("start", form).process.command[3:] == words
    assert jobs.rows()[0]["run"] is None
    (jobs.root / "new").mkdir()
    (jobs.root / "new" / "config.yaml").touch()
    assert jobs.rows()[0]["run"] == "new"
    with pytest.raises(UserError, match="there is a folder new"):
        jobs.order("start", form)


def test_a_run_is_resumed_from_its_checkpoint_unless_it_trains_or_has_none(make_folder, jobs):
    run = RunFiles("run", make_folder())
    resumed = jobs.resume(run)
    assert resumed.process.command[3:] == ["train", "--resume", str(run.path)]
    with pytest.raises(UserError, match="is being resumed"):
        jobs.resume(run)
    resumed.process.ended = 0
    with claim(run.path, resume=LATEST), pytest.raises(UserError, match="is running"):
        jobs.resume(run)
    (run.path / "checkpoints" / "step-000004" / "state.safetensors").unlink()
    with pytest.raises(UserError, match="no checkpoint"):
        jobs.resume(run)


def test_a_job_is_asked_to_stop_once_and_its_last_words_are_kept(jobs):
    job = jobs.order("plan", RunForm(recipe="quickstart"))
    for _ in range(2):
        jobs.end(job.name)
    assert job.process.signals == [signal.SIGTERM]
    job.log.write_bytes(b"a" * 50_000 + b"\n1/9\r2/9\r3/9\nlast \xff\n")
    assert job.output().endswith("\n3/9\nlast �\n") and len(job.output()) <= module.SHOWN
