"""A run whose reward dies in the middle: it stops in time, says why, and goes on later."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowrl.api import align
from flowrl.scoring.executors.base import RewardFailure
from flowrl.training.checkpoint import STATE
from flowrl.training.tracking import read_metrics

ROOT = Path(__file__).parents[2]
DEADLINE = 2.0  # seconds
STICKY = '''
import time
from pathlib import Path


class Sticky:
    """Brightness, until the file `stuck` is there; then no answer."""

    bounds = (0, 1)

    def __init__(self, stuck):
        self.stuck = Path(stuck)

    def __call__(self, images, prompts, metadata):
        while self.stuck.exists():
            time.sleep(0.1)
        return images.mean((1, 2, 3))
'''


@pytest.fixture
def config_for(tiny_config, tmp_path):
    def make(executor, name="brightness", args=None):
        return tiny_config(
            rewards=[{"name": name, "args": args or {}, "executor": executor}],
            run={"iterations": 40, "checkpoint_every": 50, "output_dir": str(tmp_path / "run")},
        )

    return make


def when_iterations_are(count: int, folder: Path, act) -> threading.Thread:
    """Do something to a run in its middle, from outside."""

    def wait() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) >= count:
                return act()
            time.sleep(0.05)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def assert_saved_where_it_stopped(folder: Path) -> int:
    """-> the iteration."""
    last = read_metrics(folder)[-1]["step"]
    assert (folder / "checkpoints" / f"step-{last:06d}" / STATE).exists()
    return last


def serve(port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "flowrl", "reward-serve", "brightness", "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()  # the address, once it can be asked
    return process


@pytest.mark.slow  # the process that hangs states the same of a reward beside this one
def test_a_run_survives_the_death_of_its_reward_server(config_for, load_tiny, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    config = config_for(
        {"kind": "http", "urls": [url], "deadline": DEADLINE, "timeout": 1, "in_flight": 1}
    )
    folder, server = tmp_path / "run", serve(port)
    killed: list[float] = []

    def kill() -> None:
        server.send_signal(signal.SIGKILL)
        killed.append(time.monotonic())

    try:
        when_iterations_are(2, folder, kill)
        with pytest.raises(RewardFailure, match="8 of 8 images have no reward") as failure:
            align(config, pipeline=load_tiny())
        took = time.monotonic() - killed[0]
    finally:
        server.kill()
        server.wait()
    assert took < DEADLINE + 6  # the rest: an iteration, and saving
    assert "brightness" in str(failure.value) and "prompt" in str(failure.value)
    stopped = assert_saved_where_it_stopped(folder)
    again = serve(port)
    try:
        run = config.run.model_copy(update={"iterations": stopped + 2})
        align(config.model_copy(update={"run": run}), pipeline=load_tiny(), resume="latest")
    finally:
        again.kill()
        again.wait()
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, stopped + 3))


def test_a_run_survives_a_process_that_hangs(config_for, load_tiny, tmp_path, monkeypatch):
    (tmp_path / "sticky.py").write_text(STICKY)
    monkeypatch.syspath_prepend(tmp_path)
    stuck, folder = tmp_path / "stuck", tmp_path / "run"
    pool = {"kind": "pool", "timeout": 1, "micro_batch": None}
    config = config_for(pool, name="sticky:Sticky", args={"stuck": str(stuck)})
    when_iterations_are(2, folder, stuck.touch)
    with pytest.raises(RewardFailure, match=r"took longer than 1 s and was stopped"):
        align(config, pipeline=load_tiny())
    assert_saved_where_it_stopped(folder)
