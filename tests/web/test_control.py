"""Stopping runs, and children that resume them."""

import subprocess
import sys
import time

import pytest

from flowrl.errors import UserError
from flowrl.training.checkpoint import LATEST, claim
from flowrl.web import control as module
from flowrl.web.control import Control
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


CHILDREN: list["Child"] = []


class Child:
    """Stands for a process: what it was to run, and how it ended."""

    def __init__(self, command, **how):
        self.command, self.how, self.ended = command, how, None
        CHILDREN.append(self)

    def poll(self) -> int | None:
        return self.ended


@pytest.fixture
def control(tmp_path, monkeypatch):
    CHILDREN.clear()
    monkeypatch.setattr(module.subprocess, "Popen", Child)
    (tmp_path / "runs").mkdir(exist_ok=True)
    return Control(tmp_path / "runs")


def until(holds) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_asked_to_stop_once_however_often_one_clicks(make_folder, tmp_path):
    run = RunFiles("run", make_folder())
    child = subprocess.Popen([sys.executable, "-c", WORK, str(run.path)])
    try:
        until((run.path / "ready").exists)
        assert run.state().name == "running" and run.state().pid == child.pid
        control = Control(tmp_path / "runs")
        assert not control.stopping(run)
        for _ in range(3):
            control.stop(run)
            assert control.stopping(run)
        (run.path / "enough").touch()
        child.wait(120)
    finally:
        child.kill()
        child.wait()
    assert (run.path / "signals").read_text() == "1"
    assert run.state().name == "killed"
    with pytest.raises(UserError, match="no process of this machine trains in run"):
        control.stop(run)


def test_a_run_is_resumed_from_its_checkpoint_unless_it_trains_or_has_none(make_folder, control):
    run = RunFiles("run", make_folder())
    output = control.resume(run)
    (child,) = CHILDREN
    assert child.command[3:] == ["train", "--resume", str(run.path)]
    assert child.how["start_new_session"] is True  # Ctrl-C of the server does not reach it
    assert output.parent == run.path.parent / module.LOGS and control.running() == 1
    with pytest.raises(UserError, match="is being resumed"):
        control.resume(run)
    child.ended = 0
    with claim(run.path, resume=LATEST), pytest.raises(UserError, match="is running"):
        control.resume(run)
    (run.path / "checkpoints" / "step-000004" / "state.safetensors").unlink()
    with pytest.raises(UserError, match="no checkpoint"):
        control.resume(run)
    assert control.running() == 0
    assert Control(run.path).root == run.path.parent
